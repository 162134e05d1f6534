"""The report's HTML and CSS, as a Jinja template that escapes everything it is given except our own SVG."""

import jinja2

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1b1f27; --muted: #666e7d; --grid: #e3e6eb; --link: #2f5bd0;
  --series-0: #3b66d1; --series-1: #e3a008; --series-2: #e4572e; --series-3: #4fb3a3; --series-4: #35a04c;
  --series-5: #ea7aa8; --series-6: #9257e0; --series-7: #8fb4f2; --series-8: #96653f; --series-9: #a3a8b3;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12151b; --card: #1b1f28; --ink: #e9ebf0; --muted: #9aa3b2; --grid: #313743; --link: #8fb0ff;
    --series-0: #6f97f5; --series-1: #f0b93a; --series-2: #ff7d58; --series-3: #6ccdbd; --series-4: #5cc473;
    --series-5: #ff9cc3; --series-6: #b68af5; --series-7: #a9c7fa; --series-8: #bb8a62; --series-9: #7f8693;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif;
}
main, header { max-width: 1240px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 36px; }
main { padding-bottom: 60px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font-size: 23px; margin: 52px 0 2px; letter-spacing: -.01em; overflow-wrap: anywhere; }
h3 { font-size: 16px; margin: 28px 0 10px; }
p { margin: 4px 0; }
.muted, .unit { color: var(--muted); }
nav { display: flex; flex-wrap: wrap; gap: 6px 18px; margin: 14px 0 0; }
nav ul { list-style: none; margin: 0; padding: 0; }
nav .part { font-size: 14px; padding-left: 12px; }
nav.parts { display: grid; grid-template-columns: repeat(auto-fill, minmax(190px, 1fr)); }
svg a { cursor: pointer; }
:target { outline: 2px solid var(--link); outline-offset: 3px; }
a { color: var(--link); text-decoration: none; }
a:hover { text-decoration: underline; }
.numbers { display: grid; grid-template-columns: repeat(auto-fill, minmax(200px, 1fr)); gap: 14px; margin: 18px 0 0; }
.card { background: var(--card); border: 1px solid var(--grid); border-radius: 10px; padding: 14px 16px; min-width: 0; }
.number .label, .number .note { font-size: 13px; color: var(--muted); }
.number .value { font-size: 25px; font-weight: 600; line-height: 1.3; overflow-wrap: anywhere; }
.number .before { font-size: 17px; font-weight: 400; color: var(--muted); }
.number .error { display: block; font-size: 13px; font-weight: 400; color: var(--muted); }
.summary .value { font-size: 28px; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); gap: 14px; }
figure { margin: 0; height: 100%; display: flex; flex-direction: column; justify-content: space-between; }
figcaption { font-weight: 600; line-height: 1.35; margin-bottom: 6px; }
figcaption .unit { font-weight: 400; font-size: 13px; margin-left: 6px; }
.legend { display: flex; flex-wrap: wrap; gap: 0 14px; font-weight: 400; font-size: 13px; color: var(--muted); }
.swatch { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 5px; }
figure svg { display: block; width: 100%; height: auto; }
figure svg * { stroke-linejoin: round; }
.phases { grid-column: span 2; display: grid; grid-template-columns: 1fr 1fr; gap: 32px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; font-weight: 400; color: var(--muted); }
th, td { padding: 3px 10px 3px 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
td.figure, th.figure { text-align: right; white-space: nowrap; }
td.figure, .value { font-variant-numeric: tabular-nums; }
td.name { white-space: nowrap; }
td.setting { overflow-wrap: anywhere; width: 100%; }
.scroll { overflow-x: auto; }
.spark { width: 100px; height: 20px; display: block; }
details { margin-top: 14px; }
summary { cursor: pointer; font-weight: 600; }
details .scroll, details table { margin-top: 8px; }
.sample { margin-bottom: 14px; }
.sides { display: grid; grid-template-columns: 1fr 1fr; gap: 0 20px; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; margin: 2px 0 0; }
.turn { padding: 2px 0 2px 10px; border-left: 3px solid transparent; }
.turn.answer { border-left-color: var(--series-1); background: var(--page); }
.tag { font-size: 13px; color: var(--muted); }
.side { padding-top: 8px; min-width: 0; }
.prompt { border-bottom: 1px solid var(--grid); padding-bottom: 8px; }
.warning { margin-top: 14px; border-left: 4px solid var(--series-2); overflow-wrap: anywhere; }
footer { margin-top: 48px; font-size: 13px; color: var(--muted); }
@media (max-width: 760px) {
  .phases { grid-column: auto; grid-template-columns: minmax(0, 1fr); }
}
@media (max-width: 560px) {
  main, header { padding-left: 12px; padding-right: 12px; }
  header { padding-top: 20px; }
  .sides { grid-template-columns: minmax(0, 1fr); }
  .numbers { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 10px; }
  .number .value, .summary .value { font-size: 21px; }
  .number .before { font-size: 15px; }
  .card { padding: 10px 12px; }
  .spark { display: none; }
  nav .part { display: inline-block; padding: 0 12px 0 0; }
}
@media print { body { background: none; } .card { break-inside: avoid; } }
"""

TEMPLATE = """<!DOCTYPE html>
<html lang="en">
{%- macro numbers(figures, kind="") %}
<div class="numbers {{ kind }}">
{%- for figure in figures %}
  <div class="card number">
    <div class="label">{{ figure.label }}</div>
    <div class="value">
      {%- if figure.before %}<span class="before">{{ figure.before }} →</span> {% endif %}{{ figure.now }}
      {%- if figure.error %} <span class="error">± {{ figure.error }}{% if figure.before_error %}, before
        ± {{ figure.before_error }}{% endif %}</span>{% endif -%}
    </div>
    {%- if figure.note %}<div class="note">{{ figure.note }}</div>{% endif %}
  </div>
{%- endfor %}
</div>
{%- endmacro %}
{%- macro chart(drawing) %}
<figure>
  <figcaption>{{ drawing.title }}<span class="unit">{{ drawing.unit }}</span>
    {%- if drawing.legend %}<span class="legend">
      {%- for label, color in drawing.legend %}<span><i class="swatch" style="background:var(--series-{{ color }})"></i>
      {{- label }}</span>{% endfor -%}
    </span>{% endif -%}
  </figcaption>
  {{ drawing.svg | safe }}
</figure>
{%- endmacro %}
{%- macro charts(title, drawings, id="") %}
{%- if drawings or id %}
<h3{% if id %} id="{{ id }}"{% endif %}>{{ title }}</h3>
<div class="charts">{% for drawing in drawings %}<div class="card">{{ chart(drawing) }}</div>{% endfor %}</div>
{%- endif %}
{%- endmacro %}
{%- macro turns_of(turns) %}
{%- for role, text in turns %}
{%- if role %}<div class="turn{{ " answer" if role != "assistant" }}"><span class="tag">{{ role }}</span>{% endif -%}
<p class="text" dir="auto">{{ text }}</p>{% if role %}</div>{% endif %}
{%- endfor %}
{%- endmacro %}
{%- macro settings_of(rows) %}
{%- if rows %}
<details{% if settings_open %} open{% endif %}><summary>{{ settings_title }}</summary><div class="card scroll"><table>
{%- for name, value in rows %}<tr><td class="name">{{ name }}</td><td class="setting">{{ value }}</td></tr>{% endfor -%}
</table></div></details>
{%- endif %}
{%- endmacro %}
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{{ name }} – {{ kind | lower }}</title>
<style>{{ style | safe }}</style>
</head>
<body>
<header>
  <p class="muted">{{ kind }}</p>
  <h1>{{ name }}</h1>
  <p class="muted">written {{ written }}</p>
  <nav class="parts">
  {%- for step in steps %}
  <ul><li><a href="#{{ step.key }}">{{ step.title }}</a></li>
  {%- for part, title in step.parts %}
  <li class="part"><a href="#{{ step.key }}-{{ part }}">{{ title }}</a></li>
  {%- endfor %}</ul>
  {%- endfor %}
  </nav>
</header>
<main>
{%- if summary %}{{ numbers(summary, "summary") }}{% endif %}
{{ settings_of(settings) }}
{%- for step in steps %}
<section id="{{ step.key }}">
{% if step.title != name %}<h2>{{ step.title }}</h2>{% endif %}
<p class="muted">
  {%- if step.iterations %}{{ step.iterations }} iteration{{ "s" if step.iterations > 1 }}
  {%- if step.duration %} · {{ step.duration }}{% endif %}
  {%- else %}no iteration was logged{% endif -%}
</p>
{%- if step.not_finite %}
<div class="card warning"><b>Not finite:</b> {% for line in step.not_finite %}{{ line }}{{ "; " if not loop.last }}
{%- endfor %}</div>
{%- endif %}
{%- if step.figures %}{{ numbers(step.figures) }}{% endif %}
{{ settings_of(step.settings) }}
{{ charts("Learning", step.learning, step.key ~ "-learning") }}
{%- if step.phases or step.speed %}
<h3 id="{{ step.key }}-speed">Time and memory</h3>
<div class="charts">
  {%- if step.phases %}
  <div class="card phases">
    {{ chart(step.phases) }}
    <div><table>
      <tr><th>phase</th><th class="figure">seconds per iteration</th><th class="figure">share</th></tr>
      {%- for phase, color, seconds, share in step.phase_rows %}
      <tr><td><i class="swatch" style="background:var(--series-{{ color }})"></i>{{ phase }}</td>
      <td class="figure">{{ seconds }}</td><td class="figure">{{ share }}</td></tr>
      {%- endfor %}
    </table></div>
  </div>
  {%- endif %}
  {%- for drawing in step.speed %}<div class="card">{{ chart(drawing) }}</div>{% endfor %}
</div>
{%- endif %}
{{ charts("Sampler and trainer", step.numerics, step.key ~ "-numerics" if step.numerics else "") }}
{%- if step.samples %}
<h3 id="{{ step.key }}-samples">{{ samples_title }}</h3>
{%- for sample in step.samples %}
<div class="card sample">
  <div class="prompt"><div class="tag">prompt</div><p class="text" dir="auto">{{ sample.prompt }}</p></div>
  <div class="sides">
    {%- for side, title in sides %}
    {%- set reward = sample["reward_" ~ side] %}
    <div class="side"><div class="tag">{{ title }}{% if reward %} · reward {{ reward }}{% endif %}</div>
    {%- if sample[side] %}{{ turns_of(sample[side]) }}
    {%- else %}<p class="muted">(empty)</p>{% endif -%}
    </div>
    {%- endfor %}
  </div>
</div>
{%- endfor %}
{%- endif %}
{%- if step.completions %}
<details id="{{ step.key }}-completions"><summary>Completions of held-out prompts during training</summary>
<p><a href="#{{ step.key }}-learning">back to the curves</a></p>
{%- for prompt, rows in step.completions %}
{%- set first = loop.first %}
<div class="card scroll"><div class="tag">prompt</div><p class="text" dir="auto">{{ prompt }}</p><table>
<tr><th>iteration</th><th>completion</th><th>reward</th></tr>
{%- for iteration, completion, reward in rows %}
<tr{% if first %} id="{{ step.key }}-iteration-{{ iteration }}"{% endif %}>
<td class="figure">{{ iteration }}</td><td>{{ turns_of(completion) }}</td>
<td class="figure">{{ reward }}</td></tr>
{%- endfor %}
</table></div>
{%- endfor %}
</details>
{%- endif %}
{%- if step.metrics %}
<details id="{{ step.key }}-metrics"><summary>All metrics</summary><div class="card scroll"><table>
<tr><th>metric</th><th></th>
{%- for name in ("first", "last", "minimum", "maximum") %}<th class="figure">{{ name }}</th>{% endfor %}</tr>
{%- for row in step.metrics %}
<tr><td class="name">{{ row.name }}</td><td>{{ row.spark | safe }}</td>
{%- for figure in row.figures %}<td class="figure">{{ figure }}</td>{% endfor %}</tr>
{%- endfor %}
</table></div></details>
{%- endif %}
</section>
{%- endfor %}
<footer>Thin lines show single iterations, thick lines a centred moving average over a tenth of the run.
{%- if steps | selectattr("phases") | list %}
The stacked chart of a long run shows means of adjacent iterations.
{%- endif %}
{%- if steps | selectattr("completions") | list %}
A large dot leads to the completions of that iteration.
{%- endif %}
{{ arrow }}</footer>
</main>
</body>
</html>
"""

PAGE = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
    TEMPLATE, globals={"style": STYLE}
)
