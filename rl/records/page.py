"""The page of a report: a Jinja template with automatic escaping. No script, no network, fit for print."""

from __future__ import annotations

from base64 import b64encode

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 2rem 1.5rem 4rem; background: #fff; color: #1b1b1b;
       font: .95rem/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { margin: 0; font-size: 1.6rem; }
h2 { margin: 2.6rem 0 .8rem; padding-bottom: .3rem; border-bottom: 2px solid #0072b2; font-size: 1.2rem; }
h3 { margin: 0 0 .3rem; font-size: 1rem; }
.state { margin: .2rem 0 1rem; color: #555; }
.result { margin: 1rem 0; padding: .8rem 1rem; border-left: 5px solid #0072b2; background: #eef5fa;
          font-size: 1.25rem; }
.result small { display: block; color: #444; font-size: .9rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .7rem; margin: 0; }
.tiles div { padding: .6rem .8rem; border: 1px solid #ddd; border-radius: 4px; }
.tiles dt { color: #555; font-size: .85rem; }
.tiles dd { margin: 0; font-size: 1.15rem; font-weight: 600; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(27rem, 100%), 1fr));
          gap: 1.2rem; }
figure { margin: 0; padding: .8rem 1rem; border: 1px solid #ddd; border-radius: 4px; break-inside: avoid; }
figure img { display: block; width: 100%; height: auto; }
figcaption { margin-top: .3rem; color: #444; font-size: .8rem; line-height: 1.45; }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: .87rem; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #e2e2e2; text-align: left; vertical-align: top; }
th { background: #f5f5f5; }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
tr { break-inside: avoid; }
code, pre { font: .82rem/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
pre { margin: .5rem 0; padding: .8rem 1rem; border: 1px solid #ddd; border-radius: 4px; background: #fafafa;
      white-space: pre-wrap; overflow-wrap: anywhere; }
.columns { columns: 22rem; column-gap: 2rem; }
.good { color: #00694d; font-weight: 600; }
.bad { color: #a33c00; font-weight: 600; }
@page { margin: 14mm; }
@media print {
  html { font-size: 11px; }
  body { max-width: none; padding: 0; }
  th, td { padding: .15rem .35rem; }
  .charts { grid-template-columns: 1fr 1fr; }
  h2, h3 { break-after: avoid; }
}
"""

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{{ title }}</title>
<style>{{ style }}</style>
</head>
<body>
<header>
<h1>{{ title }}</h1>
<p class="state">{{ state }}</p>
<p class="result">{{ result }}{% if result_note %}<small>{{ result_note }}</small>{% endif %}</p>
<dl class="tiles">
{% for label, value in tiles %}<div><dt>{{ label }}</dt><dd>{{ value }}</dd></div>
{% endfor %}</dl>
</header>
<main>
<section>
<h2>Curves</h2>
{% if not charts %}<p>No metrics have been recorded.</p>
{% else %}<p>{{ smoothing }} The table at the end holds every metric.</p>
{% endif %}<div class="charts">
{% for chart in charts %}<figure>
<h3>{{ chart.title }}</h3>
<img src="data:image/svg+xml;base64,{{ chart.svg | base64 }}" alt="{{ chart.alternative }}">
<figcaption>{% for name, meaning in chart.series %}<strong>{{ name }}</strong>: {{ meaning }}.
{% endfor %}</figcaption>
</figure>
{% endfor %}</div>
</section>
<section>
<h2>Execution specification</h2>
{% if not engines %}<p>The engines have not reported their specification.</p>
{% else %}<p class="{{ 'good' if same_spec else 'bad' }}">{{ spec_verdict }}</p>
<div class="scroll"><table>
<thead><tr>
<th scope="col">engine</th><th scope="col">precision map fingerprint</th><th scope="col">back end</th>
<th class="number" scope="col">expert layers</th><th class="number" scope="col">expert calls</th>
</tr></thead>
<tbody>
{% for engine in engines %}<tr>
<th scope="row">{{ engine.engine }}</th><td><code>{{ engine.fingerprint }}</code></td>
<td>{{ engine.backend }}</td><td class="number">{{ engine.expert_layers }}</td>
<td class="number">{{ engine.expert_calls }}</td></tr>
{% endfor %}</tbody></table></div>
{% for spec in specs %}<h3 style="margin-top: 1.2rem">{{ spec.name }}: layers {{ spec.layers }} of
{{ spec.engines | join(', ') }}, <code>{{ spec.fingerprint }}</code></h3>
<pre class="columns">{{ spec.canonical }}</pre>
{% endfor %}{% endif %}
</section>
<section>
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
{% else %}<p>Not recorded.</p>
{% endfor %}</section>
<section>
<h2>All metrics</h2>
<div class="scroll"><table>
<thead><tr><th scope="col">metric</th><th scope="col">meaning</th><th scope="col">unit</th>
<th scope="col">reduced by</th>
{% for label in ('first', 'last', 'least', 'greatest') %}<th class="number" scope="col">{{ label }}</th>
{% endfor %}</tr></thead>
<tbody>
{% for row in metrics %}<tr><th scope="row"><code>{{ row.name }}</code></th><td>{{ row.meaning }}</td>
<td>{{ row.unit }}</td>
<td>{{ row.reducer }}</td>
{% for value in row.quantities %}<td class="number">{{ value }}</td>
{% endfor %}</tr>
{% endfor %}</tbody></table></div>
</section>
</main>
</body>
</html>
"""


def render(values: dict[str, object]) -> str:
    """The page with `values` in it, each of them escaped."""
    return fill(_TEMPLATE, values)


def fill(template: str, values: dict[str, object]) -> str:
    """A Jinja template with `values` in it, each of them escaped, in the style of all pages; `base64` is a filter."""
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters["base64"] = lambda data: b64encode(data).decode("ascii")
    return environment.from_string(template).render(style=Markup(STYLE), **values)
