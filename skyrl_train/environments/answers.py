"""Reading the final answer out of a worked solution, and deciding whether it is the right one. Pure functions.

They decide by form: equal texts after normalisation, or equal rational numbers. That is all that integer and decimal
answers need; ``2\\sqrt{2}`` and ``\\sqrt{8}``, ``x+1`` and ``1+x`` or two orders of a set are equal and count as
different.
"""

from __future__ import annotations

import re
import string
from fractions import Fraction

_LAST_NUMBER = re.compile(r"(?<![\w.])[-+]?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+)?", re.ASCII)
_PLAIN_NUMBER = re.compile(r"([-+]?)\$?(\d+(?:\.\d*)?|\.\d+)(?:/(\d+))?", re.ASCII)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_MARKED = re.compile(r"####[ \t]*([^\n]+)")
_ANSWER_LINE = re.compile(r"(?i)answer[ \t]*:[ \t]*([^\n]+)")
_MAX_DIGITS = 100  # of a number that is compared by value; longer ones are no answers, and cost time


def last_boxed(text: str) -> str | None:
    """What is inside the last ``\\boxed{...}`` whose braces are balanced; None without one."""
    end = len(text)
    while (start := text.rfind("\\boxed{", 0, end)) >= 0:
        depth = 0
        for index in range(start + len("\\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[index], 0) if text[index - 1] != "\\" else 0
            if depth == 0:
                return text[start + len("\\boxed{") : index]
        end = start
    return None


def marked_answer(text: str) -> str | None:
    """The last boxed expression, else what follows the last ``####`` (GSM8K), else the last ``Answer:`` line (DAPO)."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    for pattern in (_MARKED, _ANSWER_LINE):
        found = pattern.findall(text)
        if found:
            return str(found[-1]).strip()
    return None


def last_number(text: str) -> str | None:
    """The last number of a text as it is written there, ``1,234`` and ``$5`` included."""
    found = _LAST_NUMBER.findall(text)
    return found[-1] if found else None


def to_number(text: str) -> Fraction | None:
    """The exact value of ``-1,234.50``, ``$7``, ``3/4``, ``50%`` (read as 50) or ``\\frac{3}{4}``; None for anything else."""
    plain = _THOUSANDS.sub("", normalize_math(text))
    fraction = re.fullmatch(r"(-?)\\frac\{([0-9]+)\}\{([0-9]+)\}", plain)
    if fraction:
        plain = f"{fraction[1]}{fraction[2]}/{fraction[3]}"
    found = _PLAIN_NUMBER.fullmatch(plain)
    if found is None or len(plain) > _MAX_DIGITS:
        return None
    sign, numerator, denominator = found.groups()
    if denominator is not None and int(denominator) == 0:
        return None
    return (-1 if sign == "-" else 1) * Fraction(numerator) / int(denominator or 1)


def normalize_math(text: str) -> str:
    """A LaTeX answer without what does not change it: spaces, ``$``, ``\\left``, ``\\text``, signs of percent and degree."""
    plain = text.strip().rstrip(".").strip()
    plain = re.sub(r"\\(?:text|mathrm|textbf|mbox)\{([^{}]*)\}", r"\1", plain)
    plain = plain.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    plain = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", plain)
    plain = re.sub(r"\\left|\\right|\\[!,;: ]|\^\{?\\circ\}?|\\?%|\\?\$|\s", "", plain)
    plain = re.sub(r"^[A-Za-z]=(?=.)", "", plain)  # x = 5
    return plain.rstrip(".").removeprefix("+")


def same_math(answer: str, target: str) -> bool:
    """Equal numbers, or equal texts after :func:`normalize_math`."""
    left, right = to_number(answer), to_number(target)
    if left is not None and right is not None:
        return left == right
    return normalize_math(answer) == normalize_math(target) != ""


def normalize_question_answer(text: str) -> str:
    """Lower case without punctuation, articles and extra spaces: the usual exact match of question answering (SQuAD)."""
    plain = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", plain).split())
