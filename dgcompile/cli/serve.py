"""``dgcompile serve``: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import click

from dgcompile.cli.command import FOLDER, Command
from dgcompile.cli.text import printable
from dgcompile.errors import InputError

KEY_VARIABLE = "DGCOMPILE_API_KEY"


@click.command(
    "serve",
    cls=Command,
    examples=[
        ("serve BUNDLE", "Serve http://127.0.0.1:8000/v1 to programs on this machine"),
        ("serve BUNDLE --host 0.0.0.0 --api-key-file key.txt", "Serve other machines too, with a key"),
        ("serve BUNDLE --rows 16 --model-name diffusiongemma", "16 answers at once, under a name"),
    ],
)
@click.argument("bundle", type=FOLDER)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0 takes a free one."
)
@click.option(
    "--api-key-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"File with the key that requests must bear.  [default: ${KEY_VARIABLE}, else no key]",
)
@click.option("--model-name", help="What requests call the model.  [default: the folder's name]")
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    help="Answers that share a denoising step.  [default: the bundle's; on a CPU, 8]",
)
@click.option("--queue-limit", type=click.IntRange(min=0), help="Requests that may wait for a row.  [default: 256]")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of the engine.  [default: its own choice]")
@click.option("--max-request-bytes", type=click.IntRange(min=1), help="Largest body of a request.  [default: 4194304]")
def command(
    bundle: Path,
    host: str,
    port: int,
    api_key_file: Path | None,
    model_name: str | None,
    rows: int | None,
    queue_limit: int | None,
    threads: int | None,
    max_request_bytes: int | None,
) -> None:
    """Serve BUNDLE over HTTP, in the form of OpenAI's API.

    Ctrl-C and SIGTERM stop it: running answers get 20 seconds to end. Health is at /health, /ready and /metrics.
    """
    from dgcompile.cli.render import progress
    from dgcompile.serving.openai.front import DEFAULT_MAX_REQUEST_BYTES, Front
    from dgcompile.serving.openai.server import Server, bind, is_local, url
    from dgcompile.serving.service import DEFAULT_QUEUE_LIMIT, Service

    front = Front(
        model_name=bundle.resolve().name if model_name is None else model_name,
        api_key=_read_key(api_key_file),
        max_request_bytes=DEFAULT_MAX_REQUEST_BYTES if max_request_bytes is None else max_request_bytes,
    )
    listener = bind(host, port)
    address = url(listener)
    if front.api_key is None and not is_local(listener):
        _say(f"Warning: whoever reaches {address} can use it; give --api-key-file to ask for a key")
    with _terminating(), Server(front, listener) as server:
        try:
            service = Service.open(
                bundle,
                rows=rows,
                queue_limit=DEFAULT_QUEUE_LIMIT if queue_limit is None else queue_limit,
                threads=threads,
                progress=progress(),
            )
            front.service = service
            _say(f"Serving {front.model_name} on {address}/v1, {service.rows} rows. Ctrl-C stops it.")
            server.wait()
        except (KeyboardInterrupt, _Terminated):
            now = front.statistics()
            if now is not None and (running := now.active_rows + now.queued):
                what = "1 answer is" if running == 1 else f"{running} answers are"
                _say(f"\nStopping when {what} done, or at once with another Ctrl-C")
            raise


class _Terminated(BaseException):
    """SIGTERM came: like KeyboardInterrupt, nothing on the way may take it for an error."""


@contextmanager
def _terminating() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, but is no failure: it is how a server is stopped."""

    def terminate(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except _Terminated:
        _say("Stopped")
    finally:
        signal.signal(signal.SIGTERM, before)


def _read_key(file: Path | None) -> str | None:
    """The key from the file, or else from the environment; None where there is neither.

    Raises:
        InputError: an unreadable file, or a key that no request could bear.
    """
    if file is None:
        source, key = f"${KEY_VARIABLE}", os.environ.get(KEY_VARIABLE)
        if key is None:
            return None
    else:
        source = str(file)
        try:
            key = file.read_text(encoding="ascii")
        except OSError as error:
            raise InputError(f"{file} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError:
            key = ""  # refused below
    key = key.strip()
    if not key or not all("!" <= character <= "~" for character in key):
        # An empty key is refused too: a secret that is missing must not open the server.
        raise InputError(f"{source} holds no usable key", expected="one line of ASCII letters, digits and signs")
    return key


def _say(message: str) -> None:
    click.echo(printable(message), err=True)
