"""An evaluation as one page that needs nothing else: no network, no script."""

from __future__ import annotations

from jinja2 import Environment
from markupsafe import Markup

from dgcompile.evaluate.plots import plots
from dgcompile.evaluate.report import EvaluationReport
from dgcompile.evaluate.summary import facts, reference_name, tables

SHOWN_PROMPTS = 20
"""Prompts whose texts are shown, those with the largest KL."""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; }
th, td { padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
td { overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); gap: 1rem; }
.plots svg { width: 100%; height: auto; }
.wide { overflow-x: auto; }
pre { margin: 0; max-height: 14rem; overflow: auto; white-space: pre-wrap; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<table>
{%- for name, value in facts.items() %}
<tr><th>{{ name }}</th><td>{{ value }}</td></tr>
{%- endfor %}
</table>
<div class="plots">
{%- for plot in plots.values() %}
<figure>{{ plot }}</figure>
{%- endfor %}
</div>
{%- for table in tables %}
<h2>{{ table.title }}</h2>
<div class="wide"><table>
<tr>{% for name in table.columns %}<th class="number">{{ name }}</th>{% endfor %}</tr>
{%- for row in table.rows %}
<tr>{% for cell in row %}<td class="number">{{ cell }}</td>{% endfor %}</tr>
{%- endfor %}
</table></div>
{%- endfor %}
<h2>The prompts with the largest KL in the first step</h2>
<div class="wide"><table>
<tr><th>prompt</th><th class="number">KL (nats)</th><th>text</th>{% if answers %}<th>answer</th>{% endif %}
<th>{{ reference }}</th><th>bundle</th></tr>
{%- for prompt in prompts %}
<tr><td>{{ prompt.place }}</td><td class="number">{{ "%.2e" % prompt.kl }}</td>
<td><pre>{{ prompt.prompt if prompt.prompt is not none else "token ids" }}</pre></td>
{%- if answers %}<td><pre>{{ prompt.answer if prompt.answer is not none else "-" }}</pre></td>{% endif %}
<td><pre>{{ prompt.reference_text if prompt.reference_text is not none else "-" }}</pre></td>
<td>{% if prompt.identical %}the same{% else %}
<pre>{{ prompt.candidate_text if prompt.candidate_text is not none else "other tokens" }}</pre>{% endif %}</td></tr>
{%- endfor %}
</table></div>
</body>
</html>
"""


def render_html(report: EvaluationReport) -> str:
    """The page. Texts that come from files or models are escaped."""
    page = Environment(autoescape=True).from_string(_PAGE)
    prompts = sorted(report.prompts, key=lambda prompt: -prompt.kl)[:SHOWN_PROMPTS]
    return page.render(
        title=f"What recipe {report.recipe} costs: {report.bundle}",
        facts=facts(report),
        plots={name: Markup(svg) for name, svg in plots(report).items()},
        tables=tables(report),
        prompts=prompts,
        answers=report.answers > 0,
        reference=reference_name(report),
    )
