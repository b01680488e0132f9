"""Reading JSON and YAML files that nobody vouches for: objects only, no key twice, clear errors."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from dgcompile.errors import CheckpointError, DgcompileError

_SHORT = reprlib.Repr()  # of values in messages: a file may hold anything
_SHORT.maxstring = _SHORT.maxother = 80

MAX_FILE_BYTES = 64 << 20
"""Largest config-like file that is read into memory."""

Model = TypeVar("Model", bound=BaseModel)


def parse_json(text: bytes, source: str, *, error: type[DgcompileError] = CheckpointError) -> dict[str, Any]:
    """Parses a JSON object.

    Args:
        text: the document in UTF-8.
        source: how error messages name it.
        error: class of the exceptions.

    Raises:
        DgcompileError: (``error``) not UTF-8, not JSON, not an object, nested too deeply, or a key that occurs twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            raise error(
                f"{source}: {_first_repeated(key for key, _ in pairs)!r} occurs twice", expected="each key once"
            )
        return values

    try:
        value = json.loads(text.decode(), object_pairs_hook=unique)
    except UnicodeDecodeError as problem:
        raise error(f"{source} is not UTF-8 text at byte {problem.start}") from problem
    except json.JSONDecodeError as problem:
        raise error(f"{source} is not JSON: {problem}") from problem
    except RecursionError as problem:
        raise error(f"{source} is nested too deeply") from problem
    except ValueError as problem:
        raise error(f"{source} holds an integer with thousands of digits") from problem
    if not isinstance(value, dict):
        raise error(f"{source} holds a {type(value).__name__}", expected="a JSON object")
    return value


def require_file(path: Path, *, error: type[DgcompileError] = CheckpointError) -> None:
    """Refuses what is no regular file (or a symlink to one): opening a pipe would wait for ever.

    Raises:
        DgcompileError: (``error``) missing, or something else than a file.
    """
    if not path.is_file():
        raise error(f"{path} is {'not a regular file' if path.exists() else 'missing'}")


def read_bytes(path: Path, *, error: type[DgcompileError] = CheckpointError) -> bytes:
    """Reads a small regular file.

    Raises:
        DgcompileError: (``error``) missing, unreadable, not a regular file, or larger than :data:`MAX_FILE_BYTES`.
    """
    try:
        require_file(path, error=error)
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}") from problem
    if len(data) > MAX_FILE_BYTES:
        raise error(f"{path} has more than {MAX_FILE_BYTES} bytes", expected="a small text file")
    return data


def read_json(path: Path, *, error: type[DgcompileError] = CheckpointError) -> dict[str, Any]:
    """Reads a JSON object from a file; errors as in :func:`read_bytes` and :func:`parse_json`."""
    return parse_json(read_bytes(path, error=error), str(path), error=error)


def read_yaml(path: Path, model: type[Model], *, error: type[DgcompileError]) -> Model:
    """Reads a YAML file into a pydantic model.

    Raises:
        DgcompileError: (``error``) unreadable, not YAML, a key that is unknown, missing, doubled or of a wrong type;
            names the file and the key.
    """
    try:
        values = yaml.load(read_bytes(path, error=error), Loader=_UniqueKeyLoader)
    except yaml.YAMLError as problem:
        raise error(f"{path} is not usable YAML: {' '.join(str(problem).split())}") from problem
    except (
        ValueError,
        LookupError,
        AttributeError,
        TypeError,
    ) as problem:  # what PyYAML's own types make of bad values
        raise error(f"{path} holds a value that its YAML type does not allow ({problem})") from problem
    except RecursionError as problem:
        raise error(f"{path} is nested too deeply") from problem
    if not isinstance(values, dict):
        raise error(f"{path} holds a {type(values).__name__}", expected="a mapping of keys to values")
    try:
        return model.model_validate(values)
    except ValidationError as problem:
        raise validation_error(str(path), problem, model, error=error) from problem


def validation_error(
    source: str,
    problem: ValidationError,
    model: type[BaseModel],
    *,
    error: type[DgcompileError],
    prefix: str = "",
) -> DgcompileError:
    """Turns pydantic's most telling complaint into one of our errors.

    Args:
        source: the file, or whatever the values came from.
        problem: what pydantic raised.
        model: what was validated; its fields are offered when a key is unknown.
        error: class of the result.
        prefix: put before the key's name, such as ``"text_config."``.
    """
    errors = problem.errors(include_url=False)
    # A misspelt key is also a missing one; what was written helps more than what was not.
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    # Keys are untrusted too: an escape sequence in one must not reach the terminal.
    parts = [part if isinstance(part, str) and part.isprintable() else repr(part) for part in first["loc"]]
    where = prefix + ".".join(parts)
    if first["type"] == "extra_forbidden":
        known = ", ".join(model.model_fields) if len(first["loc"]) == 1 else None
        return error(f"{source}: unknown key {where!r}", expected=f"one of {known}" if known else None)
    if first["type"] == "missing":
        return error(f"{source}: {where} is missing")
    message = str(first["msg"]).removeprefix("Value error, ")
    if not first["loc"]:
        return error(f"{source}: {message}")
    return error(f"{source}: {where} is {_SHORT.repr(first.get('input'))}: {message[:1].lower()}{message[1:]}")


def data_file_names(package: str) -> list[str]:
    """Names (without the ending) of the YAML files in a package, sorted."""
    names = (file.name for file in resources.files(package).iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def find_data_file(source: str | Path, kind: str, package: str, *, error: type[DgcompileError]) -> Path:
    """The YAML file that ``source`` means: a path when it ends in .yaml or has a folder in it, otherwise a name.

    Args:
        source: what the user gave.
        kind: what it should name ("target"), for the error.
        package: where the files that have names lie.
        error: class of the exceptions.

    Raises:
        DgcompileError: (``error``) no such name.
    """
    text = str(source)
    if isinstance(source, Path) or text.endswith((".yaml", ".yml")) or "/" in text:
        return Path(source).expanduser()
    known = data_file_names(package)
    if text not in known:
        raise error(f"unknown {kind} {text!r}", expected=f"one of {', '.join(known)}, or the path of a .yaml file")
    # The package lies in a folder: dgcompile is not run from a zip file.
    return Path(str(resources.files(package).joinpath(f"{text}.yaml")))


class _UniqueKeyLoader(yaml.SafeLoader):
    """Plain data only, and no key twice: PyYAML would silently keep the last one."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        # A few lines of aliases can stand for more values than memory holds.
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not read", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        repeated = _first_repeated(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if repeated is not None:
            raise yaml.constructor.ConstructorError(None, None, f"key {repeated!r} occurs twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _first_repeated(keys: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            return key
        seen.add(key)
    return None
