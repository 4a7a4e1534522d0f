"""Check the prose of README, CONTRIBUTING, CHANGELOG and the pages in ``docs/`` against the rules in ``.vale/``.

python docs/prose.py [FILE ...]

The rules have vale's format, of which this reads ``existence``, ``substitution`` and ``occurrence``. A finding is a line
``file:line: message``, and makes the exit code 1.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
RULES = ROOT / ".vale" / "Plain"
# Not prose: blanked, with their line ends. Code becomes a word, so that a sentence keeps its length.
_NOT_PROSE = re.compile(
    r"^( *)(```|~~~).*?^\1\2|<!--.*?-->|(?<=\])\([^)\s]*\)|<[^>\n]+>|https?://\S+", re.DOTALL | re.MULTILINE
)
_CODE = re.compile(r"`[^`\n]+`")
_BLOCK_END = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*|#>]|\d+\. ))|\|")
_SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+")


def prose_files() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of each sentence, table cell and heading of a Markdown page."""
    text = _NOT_PROSE.sub(lambda match: "\n" * match[0].count("\n"), text)
    text = _CODE.sub("code", text)
    for block, start in _pieces(text, _BLOCK_END, 0):
        for sentence, at in _pieces(block, _SENTENCE_END, start):
            words = " ".join(sentence.split()).lstrip("-*#> ")
            if words:
                leading = len(sentence) - len(sentence.lstrip())
                yield text.count("\n", 0, at + leading) + 1, words


def _pieces(text: str, separator: re.Pattern[str], offset: int) -> Iterator[tuple[str, int]]:
    start = 0
    for match in separator.finditer(text):
        yield text[start : match.start()], offset + start
        start = match.end()
    yield text[start:], offset + start


def broken_rules(sentence: str, rules: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the message of each place in ``sentence`` that breaks a rule."""
    for rule in rules:
        flags = re.IGNORECASE if rule.get("ignorecase") else 0
        if rule["extends"] == "occurrence":
            if len(re.findall(rule["token"], sentence)) > rule["max"]:
                yield f"{rule['message']} ({sentence[:60]}...)"
            continue
        whole = "{}" if rule.get("nonword") else r"\b(?:{})\b"
        patterns = (
            rule["swap"].items() if rule["extends"] == "substitution" else ((token, "") for token in rule["tokens"])
        )
        for pattern, better in patterns:
            for match in re.finditer(whole.format(pattern), sentence, flags):
                found = match[0][:60]
                yield rule["message"] % ((better, found) if better else found)


def read_rules() -> list[dict[str, Any]]:
    return [yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(RULES.glob("*.yml"))]


def findings(paths: list[Path]) -> list[str]:
    """Return ``file:line: message`` for each broken rule."""
    rules = read_rules()
    return [
        f"{path}:{line}: {message}"
        for path in paths
        for line, sentence in sentences(path.read_text(encoding="utf-8"))
        for message in broken_rules(sentence, rules)
    ]


if __name__ == "__main__":
    found = findings([Path(name) for name in sys.argv[1:]] or prose_files())
    sys.stdout.writelines(f"{each}\n" for each in found)
    sys.exit(bool(found))
