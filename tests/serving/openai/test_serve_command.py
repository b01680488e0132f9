"""``dgcompile serve`` as a process: what it says, how it is stopped, and what it refuses to start with."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from openai import APIError, OpenAI

from tests.cli.helpers import ROOT, finish, run, start
from tests.serving.openai.helpers import CHAT, ENDLESS

READY = re.compile(r"Serving (\S+) on (http://\S+)/v1, (\d+) rows")


class Process:
    """A running ``dgcompile serve``."""

    def __init__(self, *args: str, **env: str) -> None:
        self.popen = start("serve", *args, "--port", "0", "--threads", "1", env={**os.environ, **env})
        self.lines: list[str] = []
        self.url, self.model = "", ""
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.lines.append(line)
            if found := READY.search(line):
                self.model, self.url, self.rows = found[1], found[2], int(found[3])
                return
        raise AssertionError("".join(self.lines))

    def stop(self, number: int) -> tuple[int, str]:
        """Sends a signal; exit code and what was written to stderr since."""
        self.popen.send_signal(number)
        code, stdout, stderr = finish(self.popen, timeout=60)
        assert stdout == ""
        return code, stderr


@contextmanager
def process(*args: str, **env: str) -> Iterator[Process]:
    """A running ``dgcompile serve`` that does not outlive the test."""
    running = Process(*args, **env)
    try:
        yield running
    finally:
        running.popen.kill()
        running.popen.wait()


@pytest.mark.parametrize(
    ("number", "code", "words"), [(signal.SIGINT, 130, "Interrupted"), (signal.SIGTERM, 0, "Stopped")]
)
def test_it_says_where_it_is_and_stops_cleanly(bundle: Path, number: int, code: int, words: str) -> None:
    with process(str(bundle), "--rows", "3", "--model-name", "google/dg") as running:
        assert (running.model, running.rows) == ("google/dg", 3)
        assert httpx.get(f"{running.url}/ready").status_code == 200
        client = OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0)
        assert client.chat.completions.create(model="google/dg", messages=CHAT, seed=1).choices  # type: ignore[arg-type]
        assert running.stop(number) == (code, f"\n{words}\n" if code else f"{words}\n")
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{running.url}/ready")


def test_the_model_is_called_as_its_folder(bundle: Path) -> None:
    with process(str(bundle)) as running:
        assert running.model == bundle.name
        assert running.stop(signal.SIGTERM)[0] == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_what_runs_when_it_is_stopped_is_answered(bundle: Path, number: int, code: int) -> None:
    slow = {**ENDLESS, "max_denoising_steps": 1000}
    with process(str(bundle), "--model-name", "m") as running:
        client = OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0)
        stream = client.chat.completions.create(  # type: ignore[call-overload]
            model="m", messages=CHAT, seed=1, max_tokens=5, stream=True, extra_body=slow
        )
        assert next(iter(stream)).choices[0].delta.role == "assistant"
        running.popen.send_signal(number)
        *_, last = list(stream)
        assert last.choices[0].finish_reason in ("stop", "length")
        assert last.model_extra["dgcompile"]["denoising_steps"] == 1000
        assert finish(running.popen, timeout=60)[0] == code


def test_a_second_ctrl_c_breaks_off_what_still_runs(bundle: Path) -> None:
    with process(str(bundle), "--model-name", "m") as running:
        client = OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0)
        stream = client.chat.completions.create(model="m", messages=CHAT, stream=True, extra_body=ENDLESS)  # type: ignore[call-overload]
        next(iter(stream))
        running.popen.send_signal(signal.SIGINT)
        assert running.popen.stderr is not None
        assert running.popen.stderr.readline() == "\n"
        assert "Stopping when 1 answer is done" in running.popen.stderr.readline()
        with pytest.raises(httpx.TransportError):
            while True:  # no new requests
                httpx.get(f"{running.url}/ready")
                time.sleep(0.01)
        assert running.stop(signal.SIGINT) == (130, "\nInterrupted\n")
        with pytest.raises(APIError) as raised:
            list(stream)
        assert raised.value.body["code"] == "closing"  # type: ignore[index]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_can_be_stopped_while_it_loads(bundle: Path, number: int) -> None:
    port = free_port()
    running = start("serve", str(bundle), "--port", str(port))
    try:
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/health")
                break
            except httpx.ConnectError:
                assert running.poll() is None
                time.sleep(0.002)
        running.send_signal(number)
        code, _, stderr = finish(running, timeout=60)
        assert code == (130 if number == signal.SIGINT else 0)
        assert "Traceback" not in stderr
    finally:
        running.kill()


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_key_comes_from_a_file_or_the_environment(bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "key.txt"
    file.write_text("from-file\n")
    for args, expected in (((), "from-env"), (("--api-key-file", str(file)), "from-file")):
        with process(str(bundle), *args, DGCOMPILE_API_KEY="from-env") as running:
            for key in ("from-env", "from-file"):
                response = httpx.get(f"{running.url}/v1/models", headers={"Authorization": f"Bearer {key}"})
                assert response.status_code == (200 if key == expected else 401)


@pytest.mark.parametrize("key", ["", " \n", "two words", "two\nlines", "schlüssel"])
def test_a_key_that_nobody_could_send_is_refused(bundle: Path, tmp_path: Path, key: str) -> None:
    file = tmp_path / "key.txt"
    file.write_text(key)
    result = run("serve", str(bundle), "--api-key-file", str(file))
    assert result.exit_code == 2 and f"{file} holds no usable key" in result.stderr
    result = run("serve", str(bundle), env={"DGCOMPILE_API_KEY": key})
    assert result.exit_code == 2 and "$DGCOMPILE_API_KEY holds no usable key" in result.stderr


def test_a_key_file_that_is_not_there(bundle: Path, tmp_path: Path) -> None:
    result = run("serve", str(bundle), "--api-key-file", str(tmp_path / "none"))
    assert result.exit_code == 2 and "none cannot be read" in result.stderr


def test_a_port_in_use_is_one_line_and_nothing_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = run("serve", str(tmp_path / "none"), "--port", str(port))
    assert result.exit_code == 2
    assert result.stderr == (
        f"Error: cannot listen on 127.0.0.1, port {port}: Address already in use; give another --host or --port\n"
    )


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "a" * 70])
def test_a_host_that_is_not_this_machine(tmp_path: Path, host: str) -> None:
    result = run("serve", str(tmp_path / "none"), "--host", host, "--port", "0")
    assert result.exit_code == 2 and f"cannot listen on {host}" in result.stderr


def test_a_missing_bundle_ends_it(tmp_path: Path) -> None:
    before = threading.active_count()
    result = run("serve", str(tmp_path / "none"), "--port", "0")
    assert result.exit_code == 2 and str(tmp_path / "none") in result.stderr
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("host", "key", "warned"),
    [("127.0.0.1", None, False), ("localhost", None, False), ("0.0.0.0", None, True), ("0.0.0.0", "sesame", False)],
)
def test_an_open_server_is_warned_about(tmp_path: Path, host: str, key: str | None, warned: bool) -> None:
    result = run("serve", str(tmp_path / "none"), "--host", host, "--port", "0", env={"DGCOMPILE_API_KEY": key})
    assert ("Warning: whoever reaches http://0.0.0.0:" in result.stderr) == warned


def test_without_its_extra_it_says_how_to_get_it(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "sys.modules['uvicorn'] = None\n"
        "from dgcompile.cli import main\n"
        f"sys.argv = ['dgcompile', 'serve', {json.dumps(str(tmp_path))}]\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr == (
        "Error: the package 'uvicorn' is not installed; install it with: pip install 'dgcompile[serve]'\n"
    )
