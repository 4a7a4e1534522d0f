"""Cheap length checks without a tokenizer: they reject requests far beyond the context before validation and rendering."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_train.inference.openai.errors import DialectError

# The longest tokens of vocabularies in use are runs of white space or of dashes, 128 characters long.
CHARACTERS_PER_TOKEN = 128
LONG_TEXT = 20_000  # characters; encoding them takes some milliseconds


def longest_context(context: int) -> str:
    """Return the words of OpenAI and vLLM for the context: client libraries look for them to tell a prompt that is too long."""
    return f"this model's maximum context length is {context} tokens"


def characters(value: Any, enough: int) -> int:
    """Count the characters of all texts in ``value`` (JSON), and 1 for each other value. Stops beyond ``enough``."""
    count, waiting = 0, [value]
    while waiting and count <= enough:
        entry = waiting.pop()
        if isinstance(entry, str):
            count += len(entry)
            continue
        count += 1
        if isinstance(entry, Mapping):
            waiting += entry.values()
        elif isinstance(entry, list | tuple):
            waiting += entry
    return count


def check_counts(body: Mapping[str, Any], context: int) -> None:
    """Check the lists of a body in which each entry takes at least one token: messages, items, token ids.

    Args:
        context: tokens.

    Raises:
        DialectError: one of them has more entries than the context has tokens.
    """
    for name in ("messages", "input", "tokens", "token_ids"):
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
            f"{param} has {len(value)} entries, and {longest_context(context)}. Send fewer.",
            param,
            "context_length_exceeded",
        )


def check_characters(value: Any, context: int, param: str) -> None:
    """Check the length of all text in ``value`` (JSON) against the context.

    Raises:
        DialectError: no tokenizer fits so much text into it.
    """
    most = context * CHARACTERS_PER_TOKEN
    if characters(value, most) > most:
        raise DialectError(
            f"{param} has more than {most} characters, and {longest_context(context)}. Send less.",
            param,
            "context_length_exceeded",
        )
