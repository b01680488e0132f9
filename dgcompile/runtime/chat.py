"""Renders chat messages with a checkpoint's template. The template is untrusted code and runs in jinja2's sandbox.

What a template may use is what transformers offers: ``{% break %}`` and ``{% continue %}``, ``{% generation %}``,
``raise_exception``, ``strftime_now``, ``tojson``, ``messages``, ``tools``, ``documents``, ``add_generation_prompt`` and
the special tokens' names. Beyond the sandbox's own limits, the number of loop iterations and calls is bounded,
and so is what one multiplication or power can make.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from dgcompile.errors import BundleError, RequestError

MAX_STEPS = 1_000_000
"""Loop iterations and calls that one rendering may take; a long chat takes some thousands."""

_MAX_BITS = 4096
"""Of the integers that a multiplication or power may give: 9 ** (9 ** 9) alone would run for hours."""

_MAX_DEPTH = 64
_TEMPLATE_BUGS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class ChatTemplate:
    """A compiled chat template.

    Args:
        text: the template.
        source: how error messages name it.

    Raises:
        BundleError: it is no valid jinja template.
    """

    def __init__(self, text: str, *, source: str = "chat_template.jinja") -> None:
        self._source = source
        self._environment = _Environment()
        try:
            self._template = self._environment.from_string(text)
            self._variables = jinja2.meta.find_undeclared_variables(self._environment.parse(text))
        except (jinja2.TemplateError, RecursionError) as error:
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise BundleError(
                f"{source}{line}: not a valid chat template: {error}",
                fix="fix the checkpoint's template and build again",
            ) from error

    @classmethod
    def from_file(cls, path: Path) -> ChatTemplate:
        """Reads and compiles a template.

        Raises:
            BundleError: the file cannot be read or is no valid template.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BundleError(f"{path} cannot be read: {error}", fix="build the bundle again") from error
        # Not the whole path: what is wrong with a chat is told to clients of a server too.
        return cls(text, source=path.name)

    @property
    def variables(self) -> frozenset[str]:
        """Names that the template expects from outside."""
        return frozenset(self._variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt's text.

        Args:
            messages: objects with ``role`` and ``content``, of JSON types only. As in transformers, keys
                whose value is None are left out.
            add_generation_prompt: whether to open the assistant's turn.
            tools: descriptions of tools, for templates that know them.
            **variables: further variables, such as ``bos_token``.

        Raises:
            RequestError: the messages are malformed, or the template refuses them or does what it must not.
        """
        if isinstance(messages, (str, bytes, Mapping)) or not messages:
            raise RequestError(f"the messages are {messages!r:.200}", expected="a list of at least one message")
        plain = []
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RequestError(f"message {index} is {message!r:.200}", expected="an object with role and content")
            present = {key: value for key, value in message.items() if value is not None}
            plain.append(_plain(present, f"message {index}"))
        self._environment.start()
        try:
            return self._template.render(
                messages=plain,
                tools=None if tools is None else _plain(tools, "tools"),
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **_plain(variables, "the template's variables"),
            )
        except jinja2.exceptions.SecurityError as error:
            raise RequestError(
                f"{self._source} does what a template must not: {error}", fix="do not trust this checkpoint"
            ) from error
        except _Refused as error:
            raise RequestError(f"{self._source} refuses the messages: {error}") from error
        # Whatever else goes wrong inside goes wrong because template and messages do not fit.
        except (jinja2.TemplateError, *_TEMPLATE_BUGS) as error:
            raise RequestError(
                f"{self._source} cannot render the messages: {type(error).__name__}: {error}",
                fix="compare the messages with what the model's template expects",
            ) from error
        except MemoryError as error:
            raise RequestError(f"{self._source} needs too much memory", fix="do not trust this checkpoint") from error


class _Refused(jinja2.TemplateError):
    """The template called raise_exception."""


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox with transformers' additions and a budget of loop iterations and calls."""

    # jinja then does not compute them while compiling either.
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
        # Per thread: a server renders several chats at once.
        self._budget = threading.local()
        self.filters["tojson"] = _to_json
        self.filters[_COUNTED] = self.counted
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["namespace"] = _Namespace

    def start(self) -> None:
        """Gives the rendering that starts in this thread its budget."""
        self._budget.left = MAX_STEPS

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(jinja2.nodes.For)):
            loop.iter = jinja2.nodes.Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
        return tree

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """``items``, each of which costs a step of the budget."""
        for item in items:
            self._spend()
            yield item

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self._spend()
        if isinstance(__obj, jinja2.runtime.LoopContext) and args:
            # A recursive loop calls itself with its next items, past the parser's wrapping.
            args = (__self.counted(args[0]), *args[1:])
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_BITS:
                raise jinja2.exceptions.SecurityError(f"it computes an integer of more than {_MAX_BITS} bits")
        elif operator == "*":
            items, times = (left, right) if isinstance(right, int) else (right, left)
            if isinstance(times, int) and isinstance(items, (str, list, tuple)) and len(items) * times > MAX_STEPS:
                raise jinja2.exceptions.SecurityError(f"it repeats something to more than {MAX_STEPS} items")
        return super().call_binop(context, operator, left, right)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        # jinja2 itself complains only when the result is used, and prints it as nothing.
        raise jinja2.exceptions.SecurityError(f"it reaches for {attribute!r} of a {type(obj).__name__}")

    def _spend(self) -> None:
        self._budget.left -= 1
        if self._budget.left < 0:
            raise jinja2.exceptions.SecurityError(f"it takes more than {MAX_STEPS} loop iterations and calls")


_COUNTED = "dgcompile_counted"


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %} ... {% endgeneration %}``: marks the assistant's words for training; here just its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """``namespace(...)`` without names that reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        for name in dict(*rest, **kwargs):
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, *rest, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Unlike jinja2's own filter, without escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """Rebuilds ``value`` from plain JSON types: objects with methods of their own must not get into the sandbox."""
    if depth > _MAX_DEPTH:
        raise RequestError(f"{where} holds more than {_MAX_DEPTH} levels of lists and objects")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_key(key, where): _plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where, depth + 1) for item in value]
    raise RequestError(f"{where} holds a {type(value).__name__}", expected="JSON types only")


def _key(key: Any, where: str) -> str:
    if type(key) is not str:
        raise RequestError(f"{where} has the key {key!r}", expected="strings as keys")
    return key
