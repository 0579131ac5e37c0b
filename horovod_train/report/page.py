"""Reports as one HTML file that contains its scripts, styles and data, and loads nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from html import escape
from importlib.resources import files

from horovod_train.report.document import Block, Chart, Report, Table, Text

# A report contains text of tasks: it is escaped, and the policy forbids all requests.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"


def as_html(report: Report) -> str:
    """Return a report as HTML. Charts are drawn by the scripts of the web page."""
    charts = [block for section in report.sections for block in section.blocks if _has_curves(block)]
    places = iter(range(len(charts)))
    body = "\n".join(
        f"<section>\n<h2>{escape(section.title)}</h2>\n"
        + "\n".join(text for block in section.blocks for text in _block(block, places))
        + "\n</section>"
        for section in report.sections
    )
    own, page = files("horovod_train.report"), files("horovod_train.serve") / "page_files"
    style = (page / "page.css").read_text() + (own / "report.css").read_text()
    plotly = (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    script = (page / "charts.js").read_text() + (own / "report.js").read_text()
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(report.title)}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<main>
<h1>{escape(report.title)}</h1>
{body}
</main>
<script type="application/json" id="charts">{_as_json([asdict(chart) for chart in charts])}</script>
<script>{plotly}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def _as_json(value: object) -> str:
    """Return JSON that cannot end the element that contains it."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _has_curves(block: Block) -> bool:
    return isinstance(block, Chart) and bool(block.curves)


def _block(block: Block, places: Iterator[int]) -> Iterator[str]:
    match block:
        case Text(text, is_preformatted):
            tag = "pre" if is_preformatted else "p"
            yield f"<{tag}>{escape(text)}</{tag}>"
        case Table(title, columns, rows) if rows:
            head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
            yield f'<h3>{escape(title)}</h3>\n<div class="scroll" tabindex="0"><table>'
            yield f"<thead><tr>{head}</tr></thead><tbody>" if any(columns) else "<tbody>"
            for row in rows:
                yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
            yield "</tbody></table></div>"
        case Chart() if block.curves:
            chart = f'<div id="chart-{next(places)}" class="chart" role="img"></div>'
            yield f"<figure><figcaption>{escape(block.title)}</figcaption>{chart}</figure>"
