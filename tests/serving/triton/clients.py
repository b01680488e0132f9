"""Clients of a Triton server: NVIDIA's own for gRPC, plain HTTP for the generate endpoints."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from dgcompile.serving.triton.tensors import INPUTS

TIMEOUT = 120.0

# Idle connections are not kept: a server that is asked to stop waits for them until its exit timeout.
_http = httpx.Client(timeout=TIMEOUT, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0))

_DATATYPES = {"TYPE_STRING": "BYTES", "TYPE_INT64": "INT64", "TYPE_UINT64": "UINT64", "TYPE_FP64": "FP64"}
_DTYPES = {"BYTES": np.object_, "INT64": np.int64, "UINT64": np.uint64, "FP64": np.float64, "BOOL": np.bool_}


@dataclass
class Reply:
    """All responses to one request, their outputs by name."""

    responses: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(response["TEXT"] for response in self.responses)

    @property
    def token_ids(self) -> list[int]:
        return [token for response in self.responses for token in _as_list(response["TOKEN_IDS"])]

    @property
    def last(self) -> dict[str, Any]:
        return self.responses[-1]


def _as_list(value: Any) -> list[int]:
    return value if isinstance(value, list) else [value]  # /generate writes a list of one as a number


def generate(address: str, values: Mapping[str, Any] | bytes, model: str = "sudoku") -> httpx.Response:
    """POSTs to /generate; bytes go as they are."""
    body = values if isinstance(values, bytes) else json.dumps(values).encode()
    return _http.post(f"http://{address}/v2/models/{model}/generate", content=body)


def reply_of(response: httpx.Response) -> Reply:
    """The one response of /generate."""
    assert response.status_code == 200, response.text
    return Reply([response.json()])


@contextmanager
def open_stream(address: str, values: Mapping[str, Any], model: str = "sudoku") -> Iterator[Iterator[dict[str, Any]]]:
    """POSTs to /generate_stream; gives the events one by one. Leaving the block closes the connection."""
    url = f"http://{address}/v2/models/{model}/generate_stream"
    with _http.stream("POST", url, json=dict(values)) as response:
        lines = response.iter_lines()
        yield (json.loads(line.removeprefix("data: ")) for line in lines if line)


def generate_stream(address: str, values: Mapping[str, Any], model: str = "sudoku") -> Reply:
    """All events of /generate_stream."""
    with open_stream(address, values, model) as events:
        return Reply(list(events))


class GrpcStream:
    """One bidirectional gRPC stream."""

    def __init__(self, address: str) -> None:
        self._client = tritonclient.grpc.InferenceServerClient(address)
        self._arrived: queue.Queue[tuple[Any, InferenceServerException | None]] = queue.Queue()
        self._client.start_stream(lambda result, error: self._arrived.put((result, error)))
        self._open = 0

    def __enter__(self) -> GrpcStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, values: Mapping[str, Any], model: str = "sudoku", **options: Any) -> None:
        """Sends a request; values are numbers, strings, bytes or lists of them."""
        self._open += 1
        self._client.async_stream_infer(
            model, [_input(name, value) for name, value in values.items()], enable_empty_final_response=True, **options
        )

    def next(self) -> tuple[dict[str, Any], bool]:
        """The next response, and whether it is the last.

        Raises:
            InferenceServerException: it is an error.
        """
        result, error = self._arrived.get(timeout=TIMEOUT)
        if error is not None:
            self._open -= 1
            raise error
        response = result.get_response()
        outputs = {output.name: _value(output.name, result.as_numpy(output.name)) for output in response.outputs}
        last = response.parameters["triton_final_response"].bool_param
        self._open -= last
        return outputs, last

    def infer(self, values: Mapping[str, Any], model: str = "sudoku") -> Reply:
        """Sends a request and waits for all that it gets."""
        self.send(values, model)
        reply, last = Reply(), False
        while not last:
            outputs, last = self.next()
            if outputs:
                reply.responses.append(outputs)
        return reply

    def close(self) -> None:
        """Closes the stream; what runs is cancelled."""
        # Not where nothing runs: a cancellation that meets the end of the last response makes Triton 2.51 hold on to
        # the model (seen with a model of ten lines, too), so that the server later stops by its exit timeout.
        self._client.stop_stream(cancel_requests=self._open > 0)
        self._client.close()


def _input(name: str, value: Any) -> Any:
    types = {tensor.name: _DATATYPES.get(tensor.data_type, "BOOL") for tensor in INPUTS}
    datatype = types.get(name, "BYTES")
    array = np.array(value if isinstance(value, list) else [value], dtype=_DTYPES[datatype])
    tensor = tritonclient.grpc.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def _value(name: str, array: Any) -> Any:
    values = [value.decode() if isinstance(value, bytes) else value for value in array.tolist()]
    return values if name == "TOKEN_IDS" else values[0]
