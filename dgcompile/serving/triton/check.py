"""Checking a model repository without a server: what Triton would refuse, and what it lets through and should not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dgcompile.bundle import Bundle
from dgcompile.errors import DgcompileError, MissingDependencyError, RequestError
from dgcompile.progress import Progress
from dgcompile.serving.triton.parameters import Parameters
from dgcompile.serving.triton.repository import CONFIG_FILE, MODEL_FILE, instance_kind, is_ours
from dgcompile.serving.triton.tensors import INPUTS, OUTPUTS, Tensor


@dataclass(frozen=True)
class Problem:
    """Something that is wrong.

    Attributes:
        file: where.
        found: what was found there.
        fix: what to do.
    """

    file: str
    found: str
    fix: str


@dataclass(frozen=True)
class Report:
    """What a check found.

    Attributes:
        models: names of the models that were checked.
        others: names of folders with models that dgcompile did not write: not checked.
        problems: what is wrong.
        notes: what could not be checked here.
    """

    models: list[str]
    others: list[str]
    problems: list[Problem]
    notes: list[str]


def check_repository(repository: Path, *, progress: Progress | None = None) -> Report:
    """Checks every model of ours in a model repository.

    Raises:
        RequestError: no such folder.
        MissingDependencyError: the package with Triton's definition of config.pbtxt is not installed.
    """
    if not repository.is_dir():
        raise RequestError(f"{repository} is no folder", expected="a model repository")
    report = Report([], [], [], [])
    for folder in sorted(path for path in repository.iterdir() if path.is_dir() and not path.name.startswith(".")):
        if _mentions_us(folder):
            report.models.append(folder.name)
            report.problems.extend(_check_model(folder, report.notes, progress))
        else:
            report.others.append(folder.name)
    if not report.models:
        report.problems.append(
            Problem(str(repository), "no model of dgcompile", "write one with: dgcompile triton BUNDLE -o REPOSITORY")
        )
    if (repository / CONFIG_FILE).exists():
        report.problems.append(
            Problem(
                str(repository / CONFIG_FILE),
                "a model's configuration beside the models",
                "give the folder above it to --check and to tritonserver's --model-repository",
            )
        )
    return report


def _mentions_us(folder: Path) -> bool:
    """A model of ours may be damaged in any way: any trace of us counts."""
    if is_ours(folder / CONFIG_FILE):
        return True
    for file in (folder / CONFIG_FILE, *folder.glob(f"*/{MODEL_FILE}")):
        try:
            if file.is_file() and b"dgcompile" in file.read_bytes():
                return True
        except OSError:
            continue
    return False


def _check_model(folder: Path, notes: list[str], progress: Progress | None) -> Iterator[Problem]:
    file = folder / CONFIG_FILE
    yield from _check_versions(folder)
    try:
        config = _parse(file)
    except RequestError as error:
        yield Problem(str(file), error.problem, error.fix or "write the model again with --overwrite")
        return
    for problem in _check_config(config, folder, notes, progress):
        yield Problem(str(file), *problem)


def _parse(file: Path) -> Any:
    """The configuration as Triton's own message.

    Raises:
        RequestError: missing, unreadable, or not what Triton can parse.
        MissingDependencyError: tritonclient is not installed.
    """
    try:
        from google.protobuf import text_format
        from tritonclient.grpc import model_config_pb2
    except ImportError as error:
        raise MissingDependencyError(
            f"the package {error.name!r} is not installed",
            fix="install it with: pip install 'dgcompile[triton-server]'",
        ) from error
    if not file.is_file():  # a pipe would be waited for
        raise RequestError("is no file" if file.exists() else "missing")
    try:
        text = file.read_bytes().decode()
    except OSError as error:
        raise RequestError(f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"is not UTF-8 text at byte {error.start}") from error
    try:
        return text_format.Parse(text, model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        raise RequestError(f"line {' '.join(str(error).split())}", fix="correct that line") from error


def _check_versions(folder: Path) -> Iterator[Problem]:
    """Folders of versions. Triton passes over one with another name, and waits for ever for a missing model.py."""
    versions = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    numeric = [path for path in versions if path.name.isascii() and path.name.isdigit() and path.name[0] != "0"]
    for path in versions:
        if path not in numeric:
            yield Problem(str(path), "a folder that is no version", "name it by a number from 1 on, or move it away")
        elif not (path / MODEL_FILE).is_file():
            yield Problem(str(path / MODEL_FILE), "missing: Triton would wait for it for ever", "write the model again")
        elif "TritonPythonModel" not in (path / MODEL_FILE).read_text(errors="replace"):
            yield Problem(str(path / MODEL_FILE), "has no TritonPythonModel", "write the model again with --overwrite")
    if not numeric:
        yield Problem(str(folder / "1"), "no version of the model", "write the model again with --overwrite")


def _check_config(config: Any, folder: Path, notes: list[str], progress: Progress | None) -> Iterator[tuple[str, str]]:
    """Pairs of what was found and what to do."""
    if config.name and config.name != folder.name:
        yield f"name is {config.name!r} in the folder {folder.name!r}", "give both the same name"
    if config.backend != "python":
        yield f"backend is {config.backend!r}, which Triton does not check", 'write backend: "python"'
    if config.max_batch_size != 0:
        yield f"max_batch_size is {config.max_batch_size}", "write max_batch_size: 0; the model batches by itself"
    scheduling = config.WhichOneof("scheduling_choice")
    if scheduling is not None:
        yield f"{scheduling} is set", "remove it; the model batches by itself"
    if config.runtime:
        yield f"runtime is {config.runtime!r}", "remove it; the backend says enough"
    if config.response_cache.enable:
        yield "the response cache is on, which no decoupled model can use", "remove response_cache"
    versions = set(config.version_policy.specific.versions)
    if versions and not any((folder / str(version)).is_dir() for version in versions):
        yield f"version_policy names only versions that are not there: {sorted(versions)}", "remove it"
    for warmup in config.model_warmup:
        if not warmup.inputs:
            yield f"model_warmup {warmup.name!r} has no inputs", "remove it; the model warms itself up"
    if config.default_model_filename not in ("", MODEL_FILE):
        yield f"default_model_filename is {config.default_model_filename!r}", "remove it"
    if not config.model_transaction_policy.decoupled:
        yield "the model is not decoupled", "write model_transaction_policy { decoupled: true }"
    yield from _check_tensors("input", config.input, INPUTS)
    yield from _check_tensors("output", config.output, OUTPUTS)
    bundle = None
    try:
        parameters = Parameters.from_config({key: value.string_value for key, value in config.parameters.items()})
    except RequestError as error:
        yield (
            f"{error.problem}" + (f", expected {error.expected}" if error.expected else ""),
            "correct that parameter, or write the model again with --overwrite",
        )
    else:
        if parameters.bundle_elsewhere:
            notes.append(f"{folder / CONFIG_FILE}: the bundle {parameters.bundle} is on the server: not checked here")
        else:
            for version in sorted(path for path in folder.iterdir() if path.name.isdigit()):
                try:
                    bundle = Bundle.open(version / parameters.bundle, to_run=False, progress=progress)
                except DgcompileError as error:
                    yield (
                        f"the bundle cannot be opened: {error}",
                        "put it there, or write the model again with --bundle-path or --copy",
                    )
                    break
        if bundle and bundle.max_batch and parameters.rows and parameters.rows > bundle.max_batch:
            yield f"rows is {parameters.rows}", f"give at most {bundle.max_batch}, which the bundle was built for"
    yield from _check_instances(config, bundle)


def _check_instances(config: Any, bundle: Bundle | None) -> Iterator[tuple[str, str]]:
    fix = "write one instance_group with count: 1; more rows serve more requests, more instances load the weights again"
    groups = list(config.instance_group)
    if len(groups) != 1:
        yield f"there are {len(groups)} instance groups", fix
        return
    group = groups[0]
    if group.count != 1:
        yield f"the instance group's count is {group.count}", fix
    found = type(group).Kind.Name(group.kind)
    wanted = [instance_kind(bundle.target)] if bundle else ["KIND_CPU", "KIND_MODEL"]
    if found not in wanted:
        yield f"the instance group's kind is {found}", f"write kind: {' or '.join(wanted)}"


def _check_tensors(what: str, found: Sequence[Any], wanted: Iterable[Tensor]) -> Iterator[tuple[str, str]]:
    by_name = {tensor.name: tensor for tensor in found}
    expected = {tensor.name: tensor for tensor in wanted}
    for name, count in Counter(tensor.name for tensor in found).items():
        if count > 1:
            yield f"{what} {name!r} is there {count} times, which Triton does not check", "keep one of them"
        if name not in expected:
            yield f"{what} {name!r} is none of the model's", f"remove it; the {what}s are {', '.join(expected)}"
    for name, tensor in expected.items():
        if name not in by_name:
            yield f"{what} {name} is missing", f"add it with data_type: {tensor.data_type} dims: {list(tensor.dims)}"
            continue
        actual = by_name[name]
        data_type = _data_type(actual)
        if data_type != tensor.data_type:
            yield f"{what} {name} has data_type {data_type}", f"write data_type: {tensor.data_type}"
        if tuple(actual.dims) != tensor.dims:
            yield f"{what} {name} has dims {list(actual.dims)}", f"write dims: {list(tensor.dims)}"
        if what == "input" and not actual.optional:
            yield f"input {name} is not optional", "write optional: true"
        known = {"name", "data_type", "dims", "optional"}
        for field, _ in actual.ListFields():
            if field.name not in known:
                yield f"{what} {name} has {field.name}", "remove it; the model does not expect it"


def _data_type(tensor: Any) -> str:
    field = tensor.DESCRIPTOR.fields_by_name["data_type"]
    value = field.enum_type.values_by_number.get(tensor.data_type)
    return str(value.name) if value is not None else str(tensor.data_type)
