"""Chat templates: what transformers renders is rendered alike, and a hostile template gets nowhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from dgcompile.errors import BundleError, RequestError
from dgcompile.runtime import chat
from dgcompile.runtime.chat import ChatTemplate

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": [{"type": "text", "text": "Grüß Gott"}, {"type": "text", "text": "{{ 7 * 7 }}"}]},
    {"role": "assistant", "content": "Ja.", "tool_calls": None},
    {"role": "user", "content": ""},
]

TEMPLATES = {
    "turns": """
{%- macro text(content) -%}
    {%- if content is string -%}{{ content }}
    {%- else -%}{%- for part in content -%}{{ part['text'] }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{{ bos_token }}
{%- for message in messages %}
    {%- set role = 'model' if message['role'] == 'assistant' else message.role %}
<start>{{ role }}
{{ text(message.content) | trim }}<end>
    {%- if message.tool_calls is defined %}TOOLS{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<start>model
{% endif %}""",
    "namespace, break and continue": """
{%- set ns = namespace(seen=0, last='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- set ns.seen = ns.seen + 1 %}
    {%- if ns.seen > 2 %}{% break %}{% endif %}
    {{ loop.index }}/{{ loop.length }} {{ loop.first }} {{ loop.previtem.role }} {{ loop.nextitem.role }}
{% endfor %}{{ ns.seen }}""",
    "json": "{{ messages | tojson }}{{ messages[1] | tojson(indent=2) }}{{ dict(b=1, a=2) | tojson(sort_keys=true) }}",
    "generation": "{% for m in messages %}{% generation %}\n{{ m.role }}\n{% endgeneration %}\n{% endfor %}",
    "filters and tests": """{{ messages | map(attribute='role') | unique | join(',') }} {{ range(3) | list }}
{{ messages | selectattr('role', 'eq', 'user') | list | length }} {{ tools is none }} {{ documents is defined }}
{{ not_defined }}""",
    "else and recursion": """{% for m in [] %}x{% else %}none{% endfor %}
{%- for item in [1, [2, [3, 4]], 5] recursive %}
{% if item is iterable %}({{ loop(item) }}){% else %}{{ item }}{% endif %}
{%- endfor %}""",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_like_transformers(template: str, add_generation_prompt: bool) -> None:
    clean = [{key: value for key, value in message.items() if value is not None} for message in MESSAGES]
    rendered: Any = render_jinja_template(
        conversations=[clean],
        chat_template=template,
        add_generation_prompt=add_generation_prompt,
        bos_token="<bos>",
    )[0]
    ours = ChatTemplate(template).render(MESSAGES, add_generation_prompt=add_generation_prompt, bos_token="<bos>")
    assert ours == rendered[0]


@given(st.text(max_size=40), st.sampled_from(["user", "assistant"]))
def test_messages_are_never_run_as_a_template(content: str, role: str) -> None:
    rendered = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}").render(
        [{"role": role, "content": content}]
    )
    assert rendered == f"[{content}]"


ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ joiner.__init__.__globals__['os'] }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ strftime_now.__code__ }}",
    "{{ lipsum.__globals__['os'].popen('true').read() }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '{x.__class__.__mro__}'.format_map(dict(x=1)) }}",
    "{{ messages.append.__self__ }}",
    "{{ messages.__reduce_ex__(2) }}",
    "{{ (messages | groupby('role') | list)[0].__class__ }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ namespace(__class__=1) }}",
    "{% for x in messages %}{{ loop.__class__ }}{{ loop._iterable.gi_frame.f_back }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "{% macro m() %}{{ caller.__class__ }}{% endmacro %}{% call m() %}{% endcall %}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_cannot_reach_into_python(template: str) -> None:
    with pytest.raises(RequestError, match=r"does what a template must not|cannot render"):
        ChatTemplate(template).render(MESSAGES)


@pytest.mark.parametrize(
    "call", ["append(1)", "clear()", "pop()", "extend([1])", "insert(0, 1)", "reverse()", "sort()"]
)
def test_a_template_cannot_change_the_messages(call: str) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
    with pytest.raises(RequestError, match="does what a template must not"):
        ChatTemplate("{{ messages." + call + " }}").render(messages)
    assert messages == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in 'x' * 90000 %}{% for j in 'x' * 90000 %}{{ '' }}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for i in range(3000) recursive %}{% if loop.depth < 9 %}{{ loop(range(3000)) }}{% endif %}{% endfor %}",
        "{% for i in [0] recursive %}{% if loop.depth == 1 %}{{ loop('x' * 90000) }}{% endif %}{% endfor %}",
    ],
    ids=["range", "nested ranges", "nested strings", "macro", "recursive loop", "one recursion"],
)
def test_endless_work_is_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_STEPS", 20_000)
    compiled = ChatTemplate(template)
    for _ in range(2):  # an exhausted budget is not inherited
        with pytest.raises(RequestError, match=r"does what a template must not|cannot render"):
            compiled.render(MESSAGES)
    with pytest.raises(RequestError, match=re.escape("Range too big")):
        ChatTemplate("{{ range(10**9) }}").render(MESSAGES)


@pytest.mark.parametrize(
    "expression",
    ["9 ** (9 ** 9)", "n ** (9 ** 9)", "'x' * 10 ** 10", "10 ** 10 * 'x'", "[n] * 10 ** 10", "2 ** 4000 * 2 ** 4000"],
)
def test_one_operation_cannot_make_something_huge(expression: str) -> None:
    with pytest.raises(RequestError, match="does what a template must not"):
        ChatTemplate("{% set n = messages | length + 8 %}{{ " + expression + " }}").render(MESSAGES)


def test_ordinary_arithmetic_is_python_s() -> None:
    template = ChatTemplate("{{ 2 ** 10 }} {{ 'ab' * 3 }} {{ [1] * 2 }} {{ 1.5 * 2 }} {{ 2 ** -1 }} {{ 'x' * -1 }}.")
    assert template.render(MESSAGES) == "1024 ababab [1, 1] 3.0 0.5 ."


def test_the_budget_is_for_one_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_STEPS", 100)
    template = ChatTemplate("{% for i in range(90) %}.{% endfor %}")
    for _ in range(3):
        assert template.render(MESSAGES) == "." * 90


def test_raise_exception_is_shown_to_the_user() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", source="here/template")
    with pytest.raises(RequestError, match="here/template refuses the messages: roles must alternate"):
        template.render(MESSAGES)


@pytest.mark.parametrize(
    "template", ["{{ messages[99].role.x }}", "{{ 1 / 0 }}", "{{ messages + 1 }}", "{{ nothing() }}"]
)
def test_other_faults_of_a_template_are_request_errors(template: str) -> None:
    with pytest.raises(RequestError, match="cannot render the messages"):
        ChatTemplate(template).render(MESSAGES)


@pytest.mark.parametrize(
    "template", ["{% if %}", "{{ a", "{% for x in y %}", "{{ x | no_such_filter }}", "{% include 'x' %}"]
)
def test_broken_templates(template: str) -> None:
    with pytest.raises((BundleError, RequestError), match="here/template"):
        ChatTemplate(template, source="here/template").render(MESSAGES)


def test_messages_may_be_nested_but_not_without_end() -> None:
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    template = ChatTemplate("{{ messages[0].content[0][0][0] }}")
    assert template.render([{"role": "user", "content": [[["deep"]]]}]) == "deep"
    with pytest.raises(RequestError, match="more than 64 levels"):
        template.render([{"role": "user", "content": nested}])


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "chat_template.jinja"
    with pytest.raises(BundleError, match=r"chat_template.jinja cannot be read"):
        ChatTemplate.from_file(path)
    path.write_bytes(b"\xff{{ messages }}")
    with pytest.raises(BundleError, match=r"chat_template.jinja cannot be read"):
        ChatTemplate.from_file(path)
    path.write_bytes("{{ messages[0].role }}ü".encode())
    assert ChatTemplate.from_file(path).render(MESSAGES) == "systemü"


class Rich(str):
    def secret(self) -> str:
        return "leak"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r"messages are \[\]"),
        ("hello", "messages are 'hello'"),
        ({"role": "user"}, "messages are {'role'"),
        (["hello"], "message 0 is 'hello'"),
        ([{"content": "x"}], "message 0 is {'content'"),
        ([{"role": "user", "content": "x"}, {"role": 1}], "message 1 is"),
        ([{"role": "user", "content": object()}], "message 0 holds a object"),
        ([{"role": "user", "content": b"x"}], "message 0 holds a bytes"),
        ([{"role": "user", "content": Rich("x")}], "message 0 holds a Rich"),
        ([{"role": "user", 3: "x"}], "message 0 has the key 3"),
    ],
)
def test_malformed_messages(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ChatTemplate("{{ messages }}").render(messages)


def test_the_time_is_todays() -> None:
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render(MESSAGES))


def test_variables_names_what_a_template_wants() -> None:
    wanted = ChatTemplate(
        "{% set own = 1 %}{{ bos_token }}{{ own }}{% for m in messages %}{{ m }}{% endfor %}"
    ).variables
    assert wanted == {"bos_token", "messages"}
