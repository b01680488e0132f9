"""Checkpoint: a Hugging Face folder (or hub id) of a DiffusionGemma model, opened without trusting it.

Only JSON and safetensors are read; nothing in the folder is ever executed. Tensors stay on disk until :meth:`read`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgcompile.config_file import read_json
from dgcompile.content_hashes import tensor_hashes
from dgcompile.errors import CheckpointError, MissingDependencyError
from dgcompile.generation_config import GenerationConfig
from dgcompile.model_spec import ModelSpec
from dgcompile.progress import Progress
from dgcompile.published import CODES_DTYPE, QuantizedWeight, quantization_of, take_quantized
from dgcompile.safetensors_file import StoredTensor, read_header

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpoint", "StoredTensor", "canonical_name", "is_vision_tensor"]

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

READABLE_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""Dtypes that text weights may be stored in unless they are quantized, with torch's name."""

_TORCH_DTYPES = {**READABLE_DTYPES, CODES_DTYPE: "float8_e4m3fn"}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.jinja", "*.safetensors")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_VISION = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")
# Everything that transformers ties to the decoder. The encoder's layer_scalar is its own, so the pattern leaves it out.
_TIED_TO_DECODER = re.compile(
    r"model\.encoder\.language_model\.(embed_tokens\.weight|norm\.weight|layers\.\d+\.(?!layer_scalar$).+)"
)
_COMPARED_BYTES = 8 << 20
_NAMES_SHOWN = 3


def canonical_name(name: str) -> str:
    """The one name under which a stored tensor is known: the decoder's for all that encoder, decoder and LM head share.

    All renaming happens here. Names that belong to no tied pair, known or not, come back as they are.
    """
    if name == "lm_head.weight":
        return "model.decoder.embed_tokens.weight"
    tied = _TIED_TO_DECODER.fullmatch(name)
    return f"model.decoder.{tied[1]}" if tied else name


def is_vision_tensor(name: str) -> bool:
    """Whether a stored tensor belongs to the vision tower, which dgcompile leaves out."""
    return name.startswith(_VISION)


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint, all of whose text tensors are present with the right shapes.

    Attributes:
        path: its folder.
        config: the parsed ``config.json``.
        spec: the model's shape.
        generation: its ``generation_config.json``; transformers' defaults where it has none.
        tensors: where the text model's plain tensors lie, by canonical name, in the order of
            ``spec.expected_tensors()``.
        quantized: the text model's other weights, likewise: none but for published quantized checkpoints.
        quantization: the scheme that those are quantized by, in a few words.
    """

    path: Path
    config: dict[str, Any]
    spec: ModelSpec
    generation: GenerationConfig
    tensors: Mapping[str, StoredTensor]
    quantized: Mapping[str, QuantizedWeight] = field(default_factory=dict)
    quantization: str | None = None

    @classmethod
    def open(cls, source: str | Path) -> Checkpoint:
        """Opens and checks a checkpoint. Reads headers and the scales of quantized weights only, except where a tied
        tensor is stored more than once.

        Args:
            source: a folder, or a hub id such as "google/diffusiongemma-26B-A4B-it" where no such folder exists.

        Raises:
            CheckpointError: anything wrong with it. Names the file, and the tensor if there is one.
            MissingDependencyError: a hub id, but no huggingface_hub.
        """
        folder = _folder(source)
        config = read_json(folder / CONFIG_FILE)
        spec = ModelSpec.from_config(config, source=str(folder / CONFIG_FILE))
        quantization = quantization_of(folder, config)
        generation = _generation(folder, config, spec)
        listing, stored = _stored_tensors(folder)
        text = {name: tensor for name, tensor in stored.items() if not is_vision_tensor(name)}
        expected = spec.expected_tensors()
        quantized: dict[str, QuantizedWeight] = {}
        if quantization is not None:
            text, quantized = take_quantized(text, expected, canonical_name, listing, _same_bytes)
        plain = {name: shape for name, shape in expected.items() if name not in quantized}
        tensors = _plain_tensors(text, plain, listing)
        return cls(folder, config, spec, generation, tensors, quantized, quantization)

    @property
    def stored(self) -> dict[str, StoredTensor]:
        """Every stored tensor of the text model by a name of its own: the canonical one of a plain tensor, for
        quantized weights those of their parts' codes and scales."""
        parts = [part.stored for weight in self.quantized.values() for part in weight.parts]
        return {**self.tensors, **{name: tensor for part in parts for name, tensor in part.items()}}

    def read(self, name: str) -> torch.Tensor:
        """One weight: in its stored dtype, mapped from the file, so that pages are read as they are used; or the
        float32 values of a quantized one, computed.

        Args:
            name: a canonical name, a key of ``tensors`` or ``quantized``.

        Raises:
            CheckpointError: the file shrank or vanished since it was opened.
        """
        import torch

        if name not in self.quantized:
            return self._mapped(name, self.tensors[name])
        weight = self.quantized[name]
        values = torch.empty(weight.shape)
        rows = values.view(-1, weight.shape[-1])
        first = 0
        for part in weight.parts:
            codes = self._mapped(part.name, part.codes)
            scales = torch.from_numpy(part.scales())
            torch.mul(codes.float(), scales[:, None], out=rows[first : first + len(codes)])
            first += len(codes)
        return values

    def _mapped(self, name: str, tensor: StoredTensor) -> torch.Tensor:
        import numpy
        import torch

        try:
            # Copy-on-write: torch wants writable memory, and nothing may reach the checkpoint.
            mapped = numpy.memmap(tensor.file, numpy.uint8, "c", tensor.offset, (tensor.nbytes,))
        except (OSError, ValueError) as problem:
            raise CheckpointError(f"{name} in {tensor.file} cannot be read: {problem}") from problem
        if mapped.ctypes.data % 4:
            # A header of odd length puts tensors at addresses that torch's kernels do not expect.
            mapped = mapped.copy()
        return torch.from_numpy(mapped).view(getattr(torch, _TORCH_DTYPES[tensor.dtype])).view(tensor.shape)

    @property
    def tokenizer_file(self) -> Path | None:
        """``tokenizer.json``, if the checkpoint has one."""
        return self._file("tokenizer.json")

    @property
    def chat_template_file(self) -> Path | None:
        """``chat_template.jinja``, if the checkpoint has one; see also :meth:`chat_template`."""
        return self._file("chat_template.jinja")

    @property
    def generation_config_file(self) -> Path | None:
        """``generation_config.json``, if the checkpoint has one."""
        return self._file(GENERATION_CONFIG_FILE)

    def chat_template(self) -> str | None:
        """Text of the chat template, from ``chat_template.jinja`` or, as older checkpoints have it, from
        ``tokenizer_config.json``.

        Raises:
            CheckpointError: unreadable, or not one text.
        """
        if self.chat_template_file:
            try:
                return self.chat_template_file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as problem:
                raise CheckpointError(f"{self.chat_template_file} cannot be read: {problem}") from problem
        file = self._file("tokenizer_config.json")
        template = read_json(file).get("chat_template") if file else None
        if template is not None and not isinstance(template, str):
            raise CheckpointError(f"{file}: chat_template is a {type(template).__name__}", expected="one text")
        return template

    def fingerprint(self, progress: Progress | None = None) -> str:
        """SHA-256 (hexadecimal) over the config and every text tensor, scales included: name, dtype, shape and bytes.

        It depends neither on the shard split nor on times and paths. Reads all weights the first time, unless
        ``convert_weights`` did so already; after that it is remembered (see ``content_hashes``).

        Raises:
            CheckpointError: a file vanished or changed meanwhile.
        """
        stored = self.stored
        hashes = tensor_hashes(stored, progress or Progress())
        content = {
            "config": self.config,
            "tensors": {name: [tensor.dtype, tensor.shape, hashes[name]] for name, tensor in sorted(stored.items())},
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def _file(self, name: str) -> Path | None:
        path = self.path / name
        return path if path.is_file() else None


def _folder(source: str | Path) -> Path:
    """The folder that ``source`` means, fetched from the hub if need be."""
    try:
        path = Path(source).expanduser()
        if path.is_dir():
            return path
        if path.exists():
            raise CheckpointError(f"{path} is a file", expected="the folder of a checkpoint, or a hub id")
    except (OSError, RuntimeError) as problem:
        raise CheckpointError(f"{source} cannot be opened: {problem}") from problem
    if isinstance(source, Path) or not is_hub_id(source):
        raise CheckpointError(f"no such folder: {path}", expected="the folder of a checkpoint, or a hub id (org/name)")
    return fetch_from_hub(source)


def is_hub_id(source: str) -> bool:
    """Whether it can name a checkpoint on the Hugging Face hub, ``org/name``."""
    return _HUB_ID.fullmatch(source) is not None


def fetch_from_hub(hub_id: str, file: str | None = None) -> Path:
    """Fetches a checkpoint, or one file of it, into the hub's cache; returns the folder, or the file.

    Raises:
        MissingDependencyError: huggingface_hub is not installed.
        CheckpointError: it could not be fetched; says why.
    """
    try:
        import huggingface_hub
    except ImportError as problem:
        raise MissingDependencyError(
            f"there is no folder {hub_id}, and a checkpoint from the hub needs huggingface_hub",
            fix="pip install 'dgcompile[build]', or give a folder",
        ) from problem
    try:
        if file is not None:
            return Path(huggingface_hub.hf_hub_download(hub_id, file))
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=list(_HUB_FILES)))
    except (OSError, ValueError) as problem:
        # All of the hub's own errors are one of the two; their texts run over many lines.
        summary = next((line.strip() for line in str(problem).splitlines() if line.strip()), type(problem).__name__)
        wanted = f"its {file} " if file else ""
        raise CheckpointError(
            f"{hub_id} is no folder and {wanted}could not be fetched from the hub: {summary}",
            fix="check the name, the network and the login, or give a folder",
        ) from problem


def _generation(folder: Path, config: Mapping[str, Any], spec: ModelSpec) -> GenerationConfig:
    """The generation config, with token ids from config.json where it leaves them out."""
    text = config["text_config"]
    keys = ("eos_token_id", "pad_token_id", "bos_token_id")
    ids = {key: text[key] for key in keys if text.get(key) is not None}
    generation = GenerationConfig.from_values(ids, source=f"{folder / CONFIG_FILE}: text_config")
    file = folder / GENERATION_CONFIG_FILE
    if file.exists():
        generation = GenerationConfig.from_file(file, defaults=generation)
    generation.check_vocabulary(spec.vocab_size, source=str(file if file.exists() else folder / CONFIG_FILE))
    return generation


def _stored_tensors(folder: Path) -> tuple[Path, dict[str, StoredTensor]]:
    """All tensors of the checkpoint's safetensors files by stored name, and the file that lists them."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    # As in transformers, the single file wins over an index beside it.
    if single.exists():
        return single, read_header(single)
    if index.exists():
        return index, _sharded_tensors(folder, index)
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder / pickles[0]}: weights in a pickle are not read, because unpickling runs code",
            expected=f"{SINGLE_FILE} or {INDEX_FILE}",
            fix="convert the checkpoint to safetensors where you trust it",
        )
    raise CheckpointError(f"{folder} has no weights", expected=f"{SINGLE_FILE} or {INDEX_FILE}")


def _sharded_tensors(folder: Path, index: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing or malformed", expected="tensor names with file names")
    first_tensor: dict[str, str] = {}
    for name, shard in weight_map.items():
        if not name.isprintable():
            raise CheckpointError(f"{index} lists a tensor named {name!r}", expected="a printable name")
        if not isinstance(shard, str) or not re.fullmatch(r"[\w-][\w.-]{0,199}\.safetensors", shard, re.ASCII):
            raise CheckpointError(
                f"{index}: {name} is said to lie in {shard!r}",
                expected="the plain name of a .safetensors file in the same folder",
            )
        first_tensor.setdefault(shard, name)
    stored: dict[str, StoredTensor] = {}
    for shard, name in sorted(first_tensor.items()):
        if not (folder / shard).exists():
            raise CheckpointError(
                f"{folder / shard} is missing, where {index.name} says {name} lies", fix="fetch the checkpoint again"
            )
        for found, tensor in read_header(folder / shard).items():
            if weight_map.get(found) != shard:
                said = f"says it lies in {weight_map[found]}" if found in weight_map else "does not list it"
                raise CheckpointError(f"{found} is in {tensor.file}, but {index.name} {said}")
            stored[found] = tensor
    _refuse_missing([name for name in weight_map if name not in stored], {n: folder / s for n, s in weight_map.items()})
    return stored


def _plain_tensors(
    text: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]], listing: Path
) -> dict[str, StoredTensor]:
    """The tensors that are not quantized, by canonical name, checked against what the model needs."""
    unexpected = [name for name in text if canonical_name(name) not in expected]
    if unexpected:
        raise CheckpointError(
            f"{_some(unexpected)} in {text[unexpected[0]].file}: the model of config.json has no such tensor",
            fix="check that config.json belongs to these weights",
        )
    _refuse_missing([name for name in expected if name not in set(map(canonical_name, text))], listing)
    for name, tensor in text.items():
        shape = expected[canonical_name(name)]
        if tensor.shape != shape:
            raise CheckpointError(
                f"{name} in {tensor.file} has shape {list(tensor.shape)}",
                expected=f"{list(shape)}, by config.json",
            )
        if tensor.dtype not in READABLE_DTYPES:
            raise CheckpointError(
                f"{name} in {tensor.file} is stored as {tensor.dtype}", expected=f"one of {', '.join(READABLE_DTYPES)}"
            )
    chosen: dict[str, str] = {}
    # The canonical name itself comes first, so that a copy never replaces the original.
    for name in sorted(text, key=lambda name: (name != canonical_name(name), name)):
        original = chosen.setdefault(canonical_name(name), name)
        if not _same_bytes(text[original], text[name]):
            raise CheckpointError(
                f"{name} in {text[name].file} differs from {original} in {text[original].file}",
                expected="equal copies: the model shares this tensor",
            )
    return {name: text[chosen[name]] for name in expected}


def _refuse_missing(missing: list[str], file: Path | Mapping[str, Path]) -> None:
    if missing:
        where = file if isinstance(file, Path) else file[missing[0]]
        raise CheckpointError(f"{_some(missing)} missing from {where}", fix="fetch the checkpoint again")


def _some(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    if one == other:
        return True
    if one.dtype != other.dtype:
        return False
    try:
        with one.file.open("rb") as a, other.file.open("rb") as b:
            a.seek(one.offset)
            b.seek(other.offset)
            left = one.nbytes
            while left:
                size = min(left, _COMPARED_BYTES)
                if a.read(size) != b.read(size):
                    return False
                left -= size
    except OSError as problem:
        raise CheckpointError(f"{problem.filename or one.file} cannot be read: {problem.strerror}") from problem
    return True
