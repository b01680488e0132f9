"""Clients that do not speak as they should: each gets an error or is cut off, and the server goes on."""

from __future__ import annotations

import json
import socket
from http.client import HTTPConnection

import pytest

from dgcompile.serving.openai import body
from dgcompile.serving.openai.server import MAX_HEADER_BYTES
from tests.serving.openai.helpers import CHAT, MODEL, Served

REQUEST = json.dumps({"model": MODEL, "messages": CHAT, "seed": 1, "max_tokens": 4}).encode()
JSON = "Content-Type: application/json\r\n"


def head(*lines: str, method: str = "POST") -> bytes:
    """The line and the headers of a request."""
    return "".join([f"{method} /v1/chat/completions HTTP/1.1\r\nHost: test\r\n", *lines, "\r\n"]).encode()


def talk(served: Served, *pieces: bytes) -> bytes:
    """Sends pieces; everything that comes back until the server has nothing more to say."""
    with socket.create_connection(served.address, timeout=20) as connection:
        for piece in pieces:
            connection.sendall(piece)
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
            if b'"error"' in answer or b"Invalid HTTP" in answer:
                break
        return answer


@pytest.fixture(autouse=True)
def goes_on(served: Served) -> object:
    """After each test the server answers as before, and holds nothing."""
    yield
    assert served.settles(served.is_idle)
    answer = served.post("/v1/chat/completions", content=REQUEST, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200


@pytest.mark.parametrize("length", ["-1", "x", "1e3", "", "9" * 30, "9" * 5000, "10, 11"])
def test_a_length_that_is_none(served: Served, length: str) -> None:
    answer = talk(served, head(JSON, f"Content-Length: {length}\r\n"))
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 413")), answer


def test_two_lengths(served: Served) -> None:
    assert talk(served, head(JSON, "Content-Length: 5\r\nContent-Length: 6\r\n")).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("chunk", [b"x\r\n", b"-5\r\n", b"FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF\r\n"])
def test_chunks_that_are_none(served: Served, chunk: bytes) -> None:
    answer = talk(served, head(JSON, "Transfer-Encoding: chunked\r\n"), chunk)
    assert answer.startswith(b"HTTP/1.1 400"), answer


def test_bytes_that_are_no_http(served: Served) -> None:
    assert talk(served, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03").startswith(b"HTTP/1.1 400")


def test_headers_without_end(served: Served) -> None:
    answer = talk(served, head()[:-2], b"X: " + b"x" * (2 * MAX_HEADER_BYTES))
    assert answer.startswith(b"HTTP/1.1 400")


def test_a_body_that_does_not_arrive(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_SECONDS", 0.3)
    answer = talk(served, head(JSON, f"Content-Length: {len(REQUEST)}\r\n"), REQUEST[:-1])
    assert answer.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("sent", [0, 1, len(REQUEST) - 1])
def test_a_client_that_goes_away_in_its_body(served: Served, sent: int) -> None:
    before = served.service.statistics().refused
    with socket.create_connection(served.address) as connection:
        connection.sendall(head(JSON, f"Content-Length: {len(REQUEST)}\r\n") + REQUEST[:sent])
    assert served.settles(lambda: served.service.statistics().refused == before + 1)


def test_a_request_after_a_refused_one_on_the_same_connection(served: Served) -> None:
    connection = HTTPConnection(*served.address, timeout=20)
    connection.connect()
    first = connection.sock
    for content, status in ((b"{}", 400), (REQUEST, 200), (b"[]", 400)):
        connection.request("POST", "/v1/chat/completions", content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert (response.status, bool(response.read())) == (status, True)
        assert connection.sock is first
    connection.close()
