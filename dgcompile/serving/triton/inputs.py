"""Requests as Triton hands them over, turned into ours: untrusted tensors and parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dgcompile.errors import RequestError
from dgcompile.serving.request import GenerateRequest
from dgcompile.serving.triton.backend import InferenceRequest
from dgcompile.serving.triton.tensors import INPUTS

MAX_TEXT_BYTES = 4 << 20
"""Of TEXT, MESSAGES or PROMPT: several times what fills the published model's context, 262,144 tokens of about 4 bytes.
Text is tokenized before its length in tokens is known, and a server's own limit may be gigabytes."""

SOURCES = ("TEXT", "MESSAGES", "PROMPT", "INPUT_IDS")

_FIELDS = {"MAX_TOKENS": "max_new_tokens"}
"""Our fields whose names are not just the inputs' in lower case."""

_NAMES = {_FIELDS.get(tensor.name, tensor.name.lower()): tensor.name for tensor in INPUTS}

_DTYPES = {
    "TYPE_STRING": np.dtype(object),
    "TYPE_INT64": np.dtype(np.int64),
    "TYPE_UINT64": np.dtype(np.uint64),
    "TYPE_FP64": np.dtype(np.float64),
    "TYPE_BOOL": np.dtype(np.bool_),
}

_IGNORED_PARAMETERS = frozenset({"id"})
"""/generate passes the request's id on as a parameter, too."""


@dataclass(frozen=True)
class TritonRequest:
    """A request.

    Attributes:
        request: what to generate.
        stream: a response for each canvas, or one for all.
    """

    request: GenerateRequest
    stream: bool


def read_request(incoming: InferenceRequest, max_context: int) -> TritonRequest:
    """Validates one request.

    Args:
        incoming: what Triton hands over.
        max_context: tokens that a row may hold; more INPUT_IDS are refused before they are copied.

    Raises:
        RequestError: an input or parameter that is unknown, malformed or out of range; names it.
    """
    _refuse_parameters(incoming.parameters())
    values = {tensor.name(): tensor.as_numpy() for tensor in incoming.inputs()}
    given = [name for name in SOURCES if name in values]
    if len(given) != 1:
        raise RequestError(
            f"the request has {' and '.join(given) or 'no prompt'}", expected=f"exactly one of {', '.join(SOURCES)}"
        )
    size = values["INPUT_IDS"].size if "INPUT_IDS" in values else 0
    if size > max_context:
        raise RequestError(f"INPUT_IDS has {size} tokens", expected=f"at most {max_context}, the bundle's context")
    fields = _read_values(values)
    stream = fields.pop("stream", False)
    try:
        return TritonRequest(GenerateRequest.from_values(fields), stream)
    except RequestError as error:
        raise in_tritons_words(error) from error


def in_tritons_words(error: RequestError) -> RequestError:
    """The error with our fields called by the names of the inputs."""

    def translate(text: str | None) -> str | None:
        if text is None:
            return None
        # Names that are words of their own ("stop") only where a field is named.
        text = re.sub(r"(?<=^the request: )\w+", lambda found: _NAMES.get(found[0], found[0]), text)
        return re.sub(r"\b[a-z]+_[a-z_]+\b", lambda found: _NAMES.get(found[0], found[0]), text)

    return RequestError(translate(error.problem) or "", expected=translate(error.expected), fix=translate(error.fix))


def _refuse_parameters(text: str) -> None:
    """/generate makes parameters of all fields that are no inputs; none is known here."""
    parameters = json.loads(text) if text else {}
    unknown = sorted(set(parameters) - _IGNORED_PARAMETERS)
    if unknown:
        raise RequestError(
            f"unknown field or parameter {unknown[0][:80]!r}",
            expected=f"one of {', '.join(tensor.name for tensor in INPUTS)}",
        )


def _read_values(values: Mapping[str, npt.NDArray[Any]]) -> dict[str, Any]:
    """The inputs' values under our fields' names."""
    fields: dict[str, Any] = {}
    for tensor in INPUTS:
        array = values.get(tensor.name)
        if array is None:
            continue
        name, dtype = tensor.name, _DTYPES[tensor.data_type]
        # Triton has checked both against the configuration, if that is ours.
        if array.dtype != dtype:
            raise RequestError(f"{name} has elements of type {array.dtype}", expected=tensor.data_type)
        if tensor.dims == (1,) and array.size != 1:
            raise RequestError(f"{name} has {array.size} elements", expected="one")
        elements = array.reshape(-1).tolist()
        if tensor.data_type == "TYPE_STRING":
            elements = [_decode(name, element) for element in elements]
        value: Any = elements[0] if tensor.dims == (1,) else elements
        if name == "MESSAGES":
            value = _parse_messages(value)
        elif name == "STOP":
            value = tuple(value)
        fields[_FIELDS.get(name, name.lower())] = value
    return fields


def _decode(name: str, value: Any) -> str:
    # Strings come as bytes, whatever was sent; another server's may differ.
    data = value if isinstance(value, bytes) else str(value).encode(errors="surrogatepass")
    if len(data) > MAX_TEXT_BYTES:
        raise RequestError(f"{name} has {len(data)} bytes", expected=f"at most {MAX_TEXT_BYTES}")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not UTF-8 text at byte {error.start}") from error


def _parse_messages(text: str) -> list[Any]:
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise RequestError("MESSAGES is nested too deeply") from error
    except ValueError as error:
        raise RequestError(
            f"MESSAGES is not JSON: {error}", expected='a list such as [{"role": "user", "content": "..."}]'
        ) from error
    if not isinstance(value, list):
        raise RequestError(f"MESSAGES holds a {type(value).__name__}", expected="a list of messages")
    return value
