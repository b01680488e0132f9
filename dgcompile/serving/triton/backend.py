"""What of ``triton_python_backend_utils`` is used here. That module exists only inside Triton's python backend.

Its classes are there only once the server initialises a model: before, it imports model.py to complete the
configuration, and then they are missing. So nothing here may touch them while it is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt


class InputTensor(Protocol):
    """``pb_utils.Tensor``, as it comes in."""

    def name(self) -> str: ...

    def as_numpy(self) -> npt.NDArray[Any]: ...


class ResponseSender(Protocol):
    """``InferenceResponseSender``: answers one request of a decoupled model."""

    def send(self, response: Any = None, flags: int = 0) -> None: ...

    def is_cancelled(self) -> bool: ...


class InferenceRequest(Protocol):
    """``pb_utils.InferenceRequest``."""

    def inputs(self) -> Sequence[InputTensor]: ...

    def parameters(self) -> str: ...

    def get_response_sender(self) -> ResponseSender: ...


def pb_utils() -> Any:
    """The module; works inside Triton's python backend only."""
    import triton_python_backend_utils

    return triton_python_backend_utils


def tensor(name: str, values: Sequence[Any], dtype: npt.DTypeLike) -> Any:
    """An output of one dimension."""
    return pb_utils().Tensor(name, np.array(values, dtype=cast(Any, dtype)))
