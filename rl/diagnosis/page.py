"""The page of a diagnosis: a Jinja template with automatic escaping. No script, no network, fit for print."""

from __future__ import annotations

from rl.records.page import fill

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{{ title }}</title>
<style>{{ style }}
figure.wide { max-width: 60rem; margin-bottom: 1.2rem; }
.verdict { margin: .6rem 0; padding: .6rem 1rem; border-left: 5px solid #d55e00; background: #fdf3ec; }
.verdict.same { border-color: #009e73; background: #edf7f3; }
</style>
</head>
<body>
<header>
<h1>{{ title }}</h1>
<p class="state">{{ state }}</p>
<p class="result">{{ result }}{% if result_note %}<small>{{ result_note }}</small>{% endif %}</p>
{% for note in notes %}<p>{{ note }}</p>
{% endfor %}</header>
<main>
{% for section in sections %}<section>
<h2>{{ section.title }}</h2>
{% for paragraph in section.text %}<p>{{ paragraph }}</p>
{% endfor %}{% for verdict in section.verdicts %}<p class="verdict{{ ' same' if verdict.same }}">
<strong>{{ verdict.label }}.</strong> {{ verdict.text }}</p>
{% endfor %}{% for figure in section.figures %}<figure class="wide">
<img src="data:image/png;base64,{{ figure.png | base64 }}" alt="{{ figure.caption }}">
<figcaption>{{ figure.caption }} ({{ figure.name }}.png, {{ figure.name }}.pdf)</figcaption>
</figure>
{% endfor %}{% for table in section.tables %}<h3 style="margin-top: 1rem">{{ table.title }}</h3>
<div class="scroll"><table>
<thead><tr>{% for heading in table.headings %}<th scope="col" class="{{ 'number' if not loop.first }}">
{{- heading }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}<tr><th scope="row">{{ row[0] }}</th>
{% for cell in row[1:] %}<td class="number">{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>
{% endfor %}</section>
{% endfor %}<section>
<h2>Configuration</h2>
<pre class="columns">{{ config }}</pre>
</section>
<section>
<h2>Command, software and machine</h2>
{% for launch in launches %}<h3>{{ launch.heading }}</h3>
<pre>{{ launch.command }}</pre>
<div class="scroll"><table><tbody>
{% for label, value in launch.rows %}<tr><th scope="row">{{ label }}</th><td>{{ value }}</td></tr>
{% endfor %}</tbody></table></div>
{% endfor %}</section>
</main>
</body>
</html>
"""


def render(values: dict[str, object]) -> str:
    """The page with `values` in it, each of them escaped."""
    return fill(_TEMPLATE, values)
