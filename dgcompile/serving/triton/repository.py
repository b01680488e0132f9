"""Writing a model into a model repository, as a whole or not at all."""

from __future__ import annotations

import re
import shutil
from importlib import resources
from pathlib import Path, PurePosixPath

import jinja2

import dgcompile
from dgcompile.bundle import MANIFEST_FILE, Bundle
from dgcompile.errors import InputError, RequestError
from dgcompile.file_lock import file_lock
from dgcompile.files import PARTIAL_SUFFIX, sync_folder, write_atomically
from dgcompile.progress import Progress
from dgcompile.serving.service import DEFAULT_QUEUE_LIMIT, DEFAULT_ROWS
from dgcompile.serving.triton.parameters import Parameters
from dgcompile.serving.triton.tensors import INPUTS, OUTPUTS
from dgcompile.target import Target

DEFAULT_NAME = "diffusiongemma"

CONFIG_FILE = "config.pbtxt"
MODEL_FILE = "model.py"
VERSION = "1"

COPIED_BUNDLE = "bundle"
"""Folder beside model.py that ``copy`` puts the bundle into."""

MARK = "Written by dgcompile"
"""In the first line of a config.pbtxt of ours: only such a model is overwritten."""

_MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")

_MODEL_PY = '''\
"""Written by dgcompile. The model itself is a part of that package."""

try:
    from dgcompile.serving.triton.model import TritonPythonModel
except ModuleNotFoundError as error:
    raise RuntimeError(
        f"the Python that runs this model lacks the package {error.name!r}: install dgcompile there with pip"
    ) from None

__all__ = ["TritonPythonModel"]
'''


def instance_kind(target: Target) -> str:
    """Triton's kind of instance: on a GPU the model itself takes its device."""
    return "KIND_CPU" if target.backend == "onnxruntime" else "KIND_MODEL"


def write_model(
    bundle_path: Path,
    repository: Path,
    *,
    name: str = DEFAULT_NAME,
    rows: int | None = None,
    queue_limit: int | None = None,
    threads: int | None = None,
    bundle_path_there: str | None = None,
    copy: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Writes ``repository/name``, which Triton can serve; makes the repository if there is none.

    Args:
        bundle_path: the bundle.
        repository: the model repository.
        name: what clients call the model.
        rows, queue_limit, threads: as :meth:`dgcompile.serving.service.Service.open` takes them; None for its defaults.
        bundle_path_there: the bundle's absolute path as the server sees it, where that is another one.
        copy: put a copy of the bundle into the model's folder.
        overwrite: replace a model of that name that was written by this function.
        progress: told how far checking and copying got.

    Returns:
        The model's folder.

    Raises:
        BundleError: the bundle is missing, unfinished or damaged.
        RequestError: an argument is out of range, or the name is taken.
        OSError: the repository cannot be written; nothing is left under the model's name then.
    """
    _check_arguments(name, bundle_path_there, copy)
    bundle = Bundle.open(bundle_path, to_run=False, progress=progress)
    if rows is not None and bundle.max_batch is not None and rows > bundle.max_batch:
        raise RequestError(f"rows is {rows}", expected=f"at most {bundle.max_batch}, which the bundle was built for")
    folder = COPIED_BUNDLE if copy else bundle_path_there or str(bundle_path.resolve())
    values = {
        "bundle": folder,
        **({"bundle_elsewhere": "true"} if bundle_path_there else {}),
        **{
            key: str(value)
            for key, value in (("rows", rows), ("queue_limit", queue_limit), ("threads", threads))
            if value is not None
        },
    }
    Parameters.from_config(values)
    config = _render_config(name, bundle, values)

    repository.mkdir(parents=True, exist_ok=True)
    busy = RequestError(f"another `dgcompile triton` is writing into {repository}", fix="wait for it to end")
    with file_lock(repository / f".{name}.lock", busy):
        final, partial, old = repository / name, repository / f".{name}{PARTIAL_SUFFIX}", repository / f".{name}.old"
        if old.exists() and not final.exists():
            old.rename(final)  # a process was killed between the two renames below
        _check_free(final, overwrite)
        for left_over in (partial, old):
            shutil.rmtree(left_over, ignore_errors=True)
        try:
            version = partial / VERSION
            version.mkdir(parents=True)
            if copy:
                _copy_bundle(bundle, version / COPIED_BUNDLE, progress or Progress())
            write_atomically(version / MODEL_FILE, _MODEL_PY.encode())
            write_atomically(partial / CONFIG_FILE, config.encode())
            if final.exists():
                final.rename(old)
            partial.rename(final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        sync_folder(repository)
        shutil.rmtree(old, ignore_errors=True)
    return final


def is_ours(config: Path) -> bool:
    """Whether a config.pbtxt was written here."""
    try:
        if not config.is_file():  # a pipe would be waited for
            return False
        with config.open("rb") as file:
            return MARK.encode() in file.readline(200)
    except OSError:
        return False


def _check_arguments(name: str, bundle_path_there: str | None, copy: bool) -> None:
    if not _MODEL_NAME.fullmatch(name):
        raise RequestError(
            f"name is {name[:120]!r}", expected="up to 100 letters, digits and _ . - beginning with no dot or dash"
        )
    if bundle_path_there is None:
        return
    if copy:
        raise RequestError("both a bundle path and a copy were asked for", expected="one of the two")
    if not PurePosixPath(bundle_path_there).is_absolute() or not bundle_path_there.isprintable():
        raise RequestError(f"the bundle path is {bundle_path_there!r}", expected="an absolute path on the server")


def _check_free(final: Path, overwrite: bool) -> None:
    if not final.exists() and not final.is_symlink():
        return
    if not is_ours(final / CONFIG_FILE):
        raise RequestError(
            f"{final} exists and was not written by dgcompile", fix="choose another --name, or remove it yourself"
        )
    if not overwrite:
        raise RequestError(f"{final} exists", fix="give --overwrite to replace it, or choose another --name")


def _copy_bundle(bundle: Bundle, folder: Path, progress: Progress) -> None:
    """Copies the bundle's files. Hard links would not do: ONNX's checker refuses weights that have a second name."""
    files = {MANIFEST_FILE: (bundle.path / MANIFEST_FILE).stat().st_size}
    files |= {name: record.size for name, record in bundle.manifest.files.items()}
    with progress.task("copy the bundle", sum(files.values()), "bytes") as advance:
        for name, size in files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle.path / name, target)
            advance(size)


def _render_config(name: str, bundle: Bundle, parameters: dict[str, str]) -> str:
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters["quote"] = _quote
    template = resources.files(__package__).joinpath("config.pbtxt.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        mark=MARK,
        version=dgcompile.__version__,
        target=bundle.target.name,
        name=name,
        kind=instance_kind(bundle.target),
        parameters=parameters,
        default_rows=f"{bundle.max_batch or DEFAULT_ROWS}",
        default_queue_limit=DEFAULT_QUEUE_LIMIT,
        inputs=INPUTS,
        outputs=OUTPUTS,
    )


def _quote(text: str) -> str:
    """A string of protobuf's text format."""
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the path {text!r} is not UTF-8 text", expected="a path that config.pbtxt can hold"
        ) from error
    plain = {ord("\\"): "\\\\", ord('"'): '\\"'}
    return '"' + "".join(plain.get(byte, chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}") for byte in data) + '"'
