"""One HTML file with everything in it: the page's scripts and styles, the data that they draw, and the sections as text."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import orjson

from skyrl_train.observability.readers.encoding import to_json
from skyrl_train.observability.report.sections import Paragraph, Picture, Preformatted, Section, TextTable
from skyrl_train.observability.screen import visible

STATIC = Path(__file__).parents[1] / "page" / "static"
_MODULES = ("vendor/preact.js", "util.js", "charts.js", "overview.js", "lanes.js", "compare.js", "report.js")
_IMPORT = re.compile(r'from "\./(?:vendor/)?(\w+\.js)"')
# Nothing is loaded from anywhere: the modules are data: addresses.
_POLICY = "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def to_html(
    title: str, sections: Sequence[Section], pictures: Mapping[str, Mapping[str, Any]], answers: Mapping[str, Any]
) -> str:
    """Return a document. Texts of the run are escaped, hidden characters are drawn.

    Args:
        pictures: properties of the views that draw the sections' pictures, by name. Others have none.
        answers: what the page's server would answer these views, by path, run and axis.
    """
    body = []
    for section in sections:
        if section.title:
            body.append(f'<h2 class="section">{_text(section.title)}</h2>')
        for block in section.blocks:
            match block:
                case Paragraph(text, strong):
                    body.append(f"<p{' class=strong' if strong else ''}>{_text(text)}</p>")
                case TextTable():
                    body.append(_table(block))
                case Preformatted(text):
                    body.append(f'<pre class="mono">{_text(text)}</pre>')
                case Picture(name) if name in pictures:
                    properties = escape(to_json(pictures[name]).decode())
                    body.append(f'<div data-picture="{name}" data-with="{properties}">Pictures need JavaScript.</div>')
    content = "\n".join(body)
    # As JSON, < is the only character that could end the element.
    data = to_json(answers).replace(b"<", b"\\u003c").decode()
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="content-security-policy" content="{_POLICY}">
<title>{_text(title)}</title>
<style>{_read("vendor/uplot.css")}{_read("page.css")}{_read("report.css")}</style>
<script>{_read("vendor/uplot.js")}</script>
<script type="importmap">{_import_map()}</script>
<script type="application/json" id="answers">{data}</script>
</head>
<body>
<header><div class="top"><span class="name">{_text(title)}</span></div><nav></nav></header>
<main class="report">
{content}
</main>
<script type="module">import "page/report.js";</script>
</body>
</html>
"""


def _text(text: str) -> str:
    return escape(visible(text))


def _table(table: TextTable) -> str:
    def cell(tag: str, column: int, text: str) -> str:
        classes = " ".join(name for name, columns in (("n", table.numbers), ("mono", table.code)) if column in columns)
        return f'<{tag} class="{classes}">{_text(text)}</{tag}>'

    head = "".join(cell("th", column, header) for column, header in enumerate(table.headers))
    rows = ("".join(cell("td", column, text) for column, text in enumerate(row)) for row in table.rows)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


@cache
def _read(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


@cache
def _import_map() -> str:
    """Return the import map of the page's modules. Modules at data: addresses have no neighbours, so they import by name."""
    imports = {}
    for name in _MODULES:
        code = _IMPORT.sub(r'from "page/\1"', _read(name)).encode()
        imports[f"page/{Path(name).name}"] = f"data:text/javascript;base64,{base64.b64encode(code).decode()}"
    return orjson.dumps({"imports": imports}).decode()
