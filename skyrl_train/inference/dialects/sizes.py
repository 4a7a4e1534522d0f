"""What can never fit a context: told by counting, before anything is looked at one by one, rendered or encoded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_train.inference.dialects.errors import DialectError
from skyrl_train.inference.text_length import CHARACTERS_PER_TOKEN, characters

_TOO_LONG = "context_length_exceeded"


def check_counts(body: Mapping[str, Any], context: int) -> None:
    """Checks the lists of a body whose every entry takes a token at least: messages, items, token ids.

    Args:
        context: tokens.

    Raises:
        DialectError: one of them has more entries than the context has tokens.
    """
    for name in ("messages", "input", "tokens"):
        _check_count(body.get(name), context, name)
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], str):
        return
    _check_count(prompt, context, "prompt")
    for place, entry in enumerate(prompt):
        _check_count(entry, context, f"prompt[{place}]")


def _check_count(value: Any, context: int, param: str) -> None:
    if isinstance(value, list) and len(value) > context:
        raise DialectError(
            f"{param} has {len(value)} entries, more than the context of {context} tokens. Send fewer.",
            param,
            _TOO_LONG,
        )


def check_characters(value: Any, context: int, param: str) -> None:
    """Checks the text in ``value`` (JSON) against a context of so many tokens.

    Raises:
        DialectError: no tokenizer fits so much text into it.
    """
    most = context * CHARACTERS_PER_TOKEN
    if characters(value, most) > most:
        raise DialectError(
            f"{param} has more than {most} characters, which a context of {context} tokens never holds. Send less.",
            param,
            _TOO_LONG,
        )
