"""The two operations as plugins of TensorRT and of TensorRT-RTX: one code, given the library's Python module.

Both libraries swallow exceptions of some callbacks and produce an engine nevertheless. So every exception in here is
recorded, and whoever builds or loads an engine asks :meth:`PluginRegistration.check` afterwards.
"""

# Classes whose bases come from a module that is known at run time only have no static types.
# mypy: disable-error-code="misc, name-defined, no-untyped-call"

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from dgcompile.errors import DgcompileError, EngineError
from dgcompile.plugins.block_attention.plugin import BlockAttention
from dgcompile.plugins.cuda_launch import LoadedKernels, PreparedCall, cuda_driver
from dgcompile.plugins.kernel_library import KernelLibrary
from dgcompile.plugins.moe.plugin import MixtureOfExperts
from dgcompile.plugins.operation import Field, Operation, Tensor

NAMESPACE = "dgcompile"
"""Plugin namespace, and domain of the ONNX nodes."""

VERSION = "1"
OPERATIONS: tuple[type[Operation], ...] = (BlockAttention, MixtureOfExperts)

LIBRARY_FIELD = "kernel_library"
MULTIPROCESSORS_FIELD = "multiprocessors"
"""Fields of a serialised plugin beside the node's attributes: digest of the kernels and size of the GPU that it was
planned with. The second fixes the workspace, so that it does not follow the machine the engine runs on."""

_PREPARED_SHAPES = 64  # calls that a plugin keeps prepared, for shapes that alternate

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass
class PluginRegistration:
    """The registered plugins.

    Attributes:
        kernel_library: kernels that they launch.
        multiprocessors: of the GPU that engines are planned for.
        failures: one line for each exception that left a callback.
        creators: what the registry points at; it does not keep them alive.
    """

    kernel_library: KernelLibrary
    multiprocessors: int
    failures: list[str] = field(default_factory=list)
    creators: list[Any] = field(default_factory=list)

    def check(self) -> None:
        """Raises EngineError when a callback failed since the last check, with the failures."""
        if self.failures:
            failures, self.failures = self.failures, []
            raise EngineError("a plugin failed: " + "; ".join(dict.fromkeys(failures)))

    def record(self, where: str, problem: BaseException) -> None:
        """Adds an exception to the failures."""
        # Our own errors and the planning's ValueErrors speak for themselves.
        kind = "" if isinstance(problem, DgcompileError | ValueError) else f"{type(problem).__name__}: "
        self.failures.append(f"{where}: {kind}{problem}")

    @functools.cached_property
    def kernels(self) -> LoadedKernels:
        """Kernels on the GPU, shared by all plugins."""
        return LoadedKernels(self.kernel_library, cuda_driver())


_registered: dict[str, PluginRegistration] = {}


def register_plugins(trt: ModuleType, library: KernelLibrary, multiprocessors: int) -> PluginRegistration:
    """Registers the plugins with an engine library; those of an earlier call are replaced.

    Engines that were loaded before keep the kernels they were loaded with.

    Args:
        trt: ``tensorrt`` or ``tensorrt_rtx``.
        library: kernels, for the GPU that engines are built for or run on.
        multiprocessors: of that GPU; engines that are loaded use the number they were built with.

    Raises:
        EngineError: the engine library refuses them.
    """
    registry = trt.get_plugin_registry()
    if registry is None:
        raise EngineError(f"{trt.__name__} has no plugin registry", fix=f"install {trt.__name__} again")
    if trt.__name__ in _registered:
        for creator in _registered.pop(trt.__name__).creators:
            registry.deregister_creator(creator)
    registration = PluginRegistration(library, multiprocessors)
    creator_class = _plugin_classes(trt)
    for operation in OPERATIONS:
        creator = creator_class(operation, registration)
        if not registry.register_creator(creator, NAMESPACE):
            raise EngineError(
                f"{trt.__name__} refuses the plugin {NAMESPACE}::{operation.NAME}",
                expected="a process in which nobody else has registered one of that name",
            )
        registration.creators.append(creator)
    _registered[trt.__name__] = registration
    return registration


def _recorded(method: Method) -> Method:
    """Lets no exception of a callback go unrecorded."""

    @functools.wraps(method)
    def wrapper(self: Any, *arguments: Any) -> Any:
        try:
            return method(self, *arguments)
        except Exception as problem:
            self.registration.record(f"{self.operation.NAME}.{method.__name__}", problem)
            raise

    return wrapper  # type: ignore[return-value]


def _type_names(trt: ModuleType) -> dict[Any, str]:
    """The engine library's types by the names that operations know."""
    names = {"FLOAT": "fp32", "HALF": "fp16", "BF16": "bf16", "FP8": "fp8", "INT8": "i8", "INT32": "i32"}
    return {getattr(trt.DataType, theirs): ours for theirs, ours in names.items()}


def _read_field(trt: ModuleType, field: Any, kind: type[Field]) -> Field:
    """Value of a plugin field."""
    types = {float: trt.PluginFieldType.FLOAT32, int: trt.PluginFieldType.INT32, str: trt.PluginFieldType.CHAR}
    if field.type != types[kind]:
        raise ValueError(f"{field.name} is of type {field.type}, expected {types[kind]}")
    data = field.data
    if kind is str:
        # From the parser with a zero at the end.
        return (data if isinstance(data, bytes) else np.asarray(data).tobytes()).rstrip(b"\0").decode()
    values = np.asarray(data).reshape(-1)
    if values.size != 1:
        raise ValueError(f"{field.name} has {values.size} values, expected one")
    return kind(values[0])


def _make_fields(trt: ModuleType, values: Mapping[str, Field]) -> tuple[Any, list[Any]]:
    """A collection of plugin fields, and the arrays that hold their values: fields only point there."""
    fields, arrays = [], []
    for name, value in values.items():
        if isinstance(value, str):
            array, kind = np.frombuffer(value.encode(), np.uint8).copy(), trt.PluginFieldType.CHAR
        elif isinstance(value, float):
            array, kind = np.array([value], np.float32), trt.PluginFieldType.FLOAT32
        else:
            array, kind = np.array([value], np.int32), trt.PluginFieldType.INT32
        arrays.append(array)
        fields.append(trt.PluginField(name, array, kind))
    return trt.PluginFieldCollection(fields), arrays


@functools.cache
def _plugin_classes(trt: ModuleType) -> type[Any]:
    """The creator's class; its plugins' class is inside."""
    type_names = _type_names(trt)

    def type_name(kind: Any) -> str:
        return type_names.get(kind, str(kind))

    class Plugin(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):
        """One node, or one layer of an engine."""

        def __init__(self, operation: Operation, registration: PluginRegistration, multiprocessors: int) -> None:
            trt.IPluginV3.__init__(self)
            trt.IPluginV3OneCore.__init__(self)
            trt.IPluginV3OneBuild.__init__(self)
            trt.IPluginV3OneRuntime.__init__(self)
            self.plugin_name = operation.NAME
            self.plugin_version = VERSION
            self.plugin_namespace = NAMESPACE
            self.num_outputs = 1
            self.operation = operation
            self.registration = registration
            self.multiprocessors = multiprocessors
            self.attached = False
            self.prepared: dict[tuple[Tensor, ...], PreparedCall] = {}
            self.current: PreparedCall | None = None
            self.serialized: Any = None

        def get_capability_interface(self, type: Any) -> Any:
            return self

        @_recorded
        def clone(self) -> Any:
            return Plugin(self.operation, self.registration, self.multiprocessors)

        @_recorded
        def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
            self._check_number(input_types)
            self.operation.check_types(
                {name: type_name(kind) for name, kind in zip(self.operation.inputs, input_types, strict=True)}
            )
            return [input_types[0]]

        @_recorded
        def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], builder: Any) -> list[Any]:
            self._check_number(inputs)
            return [trt.DimsExprs(inputs[0])]

        @_recorded
        def supports_format_combination(self, pos: int, in_out: Sequence[Any], num_inputs: int) -> bool:
            if in_out[pos].desc.format != trt.TensorFormat.LINEAR:
                return False
            first, kind = type_name(in_out[0].desc.type), type_name(in_out[pos].desc.type)
            if pos >= num_inputs:
                return kind == first
            allowed = self.operation.types(first)[self.operation.inputs[pos]]
            return kind in allowed and (pos > 0 or self._known(first))

        @_recorded
        def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            library = self.registration.kernel_library
            for shape in ("min", "max"):
                tensors = self._tensors(inputs, shape)
                self.operation.check(tensors)
                # A kernel that is missing is to fail the build, not the first run.
                for launch in self.operation.plan(tensors, library, self.multiprocessors).launches:
                    library.record(launch)

        @_recorded
        def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
            largest = self._tensors(inputs, "max")
            return self.operation.workspace_limit(largest, self.registration.kernel_library.sm, self.multiprocessors)

        @_recorded
        def get_fields_to_serialize(self) -> Any:
            fields = {
                **self.operation.fields(),
                LIBRARY_FIELD: self.registration.kernel_library.digest,
                MULTIPROCESSORS_FIELD: self.multiprocessors,
            }
            # The engine library reads them after this returns.
            self.serialized = _make_fields(trt, fields)
            return self.serialized[0]

        @_recorded
        def attach_to_context(self, context: Any) -> Any:
            attached = self.clone()
            attached.attached = True
            return attached

        @_recorded
        def set_tactic(self, tactic: int) -> None:
            pass

        @_recorded
        def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            self.current = None
            # A builder asks too, perhaps without a GPU: it gets to load kernels only if it really runs them.
            if self.attached:
                self._prepare(inputs)

        @_recorded
        def enqueue(
            self,
            input_desc: Sequence[Any],
            output_desc: Sequence[Any],
            inputs: Sequence[int],
            outputs: Sequence[int],
            workspace: int,
            stream: int,
        ) -> None:
            call = self.current or self._prepare(input_desc)
            call.run([*inputs, *outputs], workspace, stream)

        def _prepare(self, inputs: Sequence[Any]) -> PreparedCall:
            names = self.operation.inputs
            tensors = tuple(Tensor(tuple(desc.dims), type_name(desc.type)) for desc in inputs)
            call = self.prepared.get(tensors)
            if call is None:
                by_name = dict(zip(names, tensors, strict=True))
                plan = self.operation.plan(by_name, self.registration.kernel_library, self.multiprocessors)
                call = PreparedCall(plan, (*names, "output"), self.registration.kernels)
                if len(self.prepared) >= _PREPARED_SHAPES:
                    del self.prepared[next(iter(self.prepared))]
                self.prepared[tensors] = call
            self.current = call
            return call

        def _known(self, first: str) -> bool:
            try:
                self.operation.check_types(
                    {name: kinds[0] for name, kinds in self.operation.types(first).items()},
                )
            except ValueError:
                return False
            return True

        def _check_number(self, inputs: Sequence[Any]) -> None:
            if len(inputs) != len(self.operation.inputs):
                raise ValueError(f"{len(inputs)} inputs, expected {', '.join(self.operation.inputs)}")

        def _tensors(self, inputs: Sequence[Any], shape: str) -> Mapping[str, Tensor]:
            self._check_number(inputs)
            return {
                name: Tensor(tuple(getattr(tensor, shape)), type_name(tensor.desc.type))
                for name, tensor in zip(self.operation.inputs, inputs, strict=True)
            }

    class Creator(trt.IPluginCreatorV3One):
        """Makes the plugins of one operation."""

        def __init__(self, operation: type[Operation], registration: PluginRegistration) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name = operation.NAME
            self.plugin_version = VERSION
            self.plugin_namespace = NAMESPACE
            self.operation = operation
            self.registration = registration
            samples: Mapping[type[Field], Field] = {float: 0.0, int: 0, str: ""}
            self.field_names, self.samples = _make_fields(
                trt, {name: samples[kind] for name, kind in operation.FIELDS.items()}
            )

        @_recorded
        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            given = {field.name: field for field in fields}
            kinds: dict[str, type[Field]] = dict(self.operation.FIELDS)
            if phase == trt.TensorRTPhase.RUNTIME:
                kinds |= {LIBRARY_FIELD: str, MULTIPROCESSORS_FIELD: int}
            if missing := [key for key in kinds if key not in given]:
                raise ValueError(f"node {name}: attribute {', '.join(missing)} is missing")
            values = {key: _read_field(trt, given[key], kind) for key, kind in kinds.items()}
            registration, multiprocessors = self.registration, self.registration.multiprocessors
            if phase == trt.TensorRTPhase.RUNTIME:
                digest = values.pop(LIBRARY_FIELD)
                multiprocessors = int(values.pop(MULTIPROCESSORS_FIELD))
                if digest != registration.kernel_library.digest:
                    raise EngineError(
                        f"the engine was built with other kernels than those in {registration.kernel_library.folder}",
                        expected="the engine and the kernels of one build",
                        fix="build the bundle again",
                    )
            return Plugin(self.operation.from_fields(values), registration, multiprocessors)

    return Creator
