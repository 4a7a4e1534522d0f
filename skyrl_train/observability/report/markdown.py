"""Sections of a report as Markdown that can be pasted into an issue: no HTML, no script, no picture."""

from __future__ import annotations

import re
from collections.abc import Sequence

from skyrl_train.observability.report.sections import Paragraph, Picture, Preformatted, Section, TextTable
from skyrl_train.observability.screen import visible

_MARKS = re.compile(r"([\\`*\[\]|~#<&]|(?<!\w)_|_(?!\w))")  # an underscore within a word is none


def to_markdown(title: str, sections: Sequence[Section]) -> str:
    """Return a document. Texts of the run cannot change its form: marks are escaped, hidden characters are drawn."""
    lines = [f"# {_plain(title)}", ""]
    for section in sections:
        if section.title:
            lines += [f"## {_plain(section.title)}", ""]
        for block in section.blocks:
            match block:
                case Paragraph(text, strong):
                    lines += [f"**{_plain(text)}**" if strong else _plain(text), ""]
                case TextTable():
                    lines += [*_table(block), ""]
                case Preformatted(text) | Picture(_, text) if text:
                    text = visible(text)
                    # A fence is longer than each one in the text.
                    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
                    lines += [f"{fence}text", *text.split("\n"), fence, ""]
    return "\n".join(lines)


def _table(table: TextTable) -> list[str]:
    ruler = ["---:" if column in table.numbers else "---" for column in range(len(table.headers))]
    rows = [
        [_code(cell) if column in table.code else _plain(cell) for column, cell in enumerate(row)] for row in table.rows
    ]
    return [f"| {' | '.join(cells)} |" for cells in ([_plain(header) for header in table.headers], ruler, *rows)]


def _plain(text: str) -> str:
    return _MARKS.sub(r"\\\1", " ".join(visible(text).split()))


def _code(text: str) -> str:
    """Return a text as code within a table, where a bar must be escaped even there."""
    text = " ".join(visible(text).split()).replace("|", "\\|")
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    pad = " " if "`" in text else ""
    return f"{fence}{pad}{text}{pad}{fence}" if text else ""
