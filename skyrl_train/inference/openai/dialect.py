"""The parts of responses that the dialects share.

    body ──parse──> call ──request──> ChatService
                     │ ──response(result, context)──────> body
                     └ ──stream(context)──> formatter: opened / event / closed / failed ──> Frames

Dialects are pure: time and ids come from :class:`ResponseContext`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from skyrl_train.inference.interface import TopLogprobs
from skyrl_train.inference.requests import Generation
from skyrl_train.inference.response_text import BYTE_LEVEL, REPLACEMENT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"  # how sentencepiece vocabularies write a space


class Frame(NamedTuple):
    """One server-sent event. ``data`` is sent as JSON, a string verbatim; ``event`` is its name, if the dialect uses names."""

    data: Mapping[str, Any] | str
    event: str | None = None


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """The facts that a response needs besides the result.

    Args:
        unique: a hexadecimal id of the response; the dialect adds its prefix.
        created: seconds since the epoch.
        tokens: the spelling of single tokens, for log-probs.
    """

    unique: str
    created: int
    tokens: TokenTexts


class TokenText(NamedTuple):
    """One token. ``text`` has a replacement character if the token is only part of a character; ``bytes`` is exact."""

    text: str
    bytes: list[int]


class TokenTexts:
    """Caches the spelling of a vocabulary's tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, TokenText] = {}

    def __getitem__(self, token_id: int) -> TokenText:
        known = self._known.get(token_id)
        if known is not None:
            return known
        piece = str(self._tokenizer.convert_ids_to_tokens(token_id) or "")
        text = str(self._tokenizer.decode([token_id], skip_special_tokens=False))
        if (byte := _BYTE.fullmatch(piece)) is not None:
            known = TokenText(text, [int(byte[1], 16)])
        elif REPLACEMENT in text and piece and all(character in BYTE_LEVEL for character in piece):
            known = TokenText(text, [BYTE_LEVEL[character] for character in piece])
        else:
            if piece.startswith(_WORD_START) and not text.startswith(" "):
                text = " " + text  # decoders drop the space before the first word
            known = TokenText(text, list(text.encode()))
        self._known[token_id] = known
        return known

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        """Return a token with its log-prob in OpenAI's shape."""
        text, spelt = self[token_id]
        return {"token": text, "bytes": spelt, "logprob": logprob}

    def entries(
        self, token_ids: Sequence[int], logprobs: Sequence[float], top: TopLogprobs | None
    ) -> list[dict[str, Any]]:
        """Return sampled tokens with their alternatives in OpenAI's shape. ``top`` is None if none were requested."""
        alternatives = top or [[]] * len(token_ids)
        entries = []
        for token_id, logprob, others in zip(token_ids, logprobs, alternatives, strict=True):
            entry = self.entry(token_id, logprob)
            entry["top_logprobs"] = [self.entry(other, value) for other, value in others]
            entries.append(entry)
        return entries


def training_data(generation: Generation) -> dict[str, Any]:
    """Return the fields of the ``skyrl`` object: what a trainer needs of a response, besides its prompt."""
    return {
        "token_ids": generation.token_ids,
        "logprobs": generation.logprobs,
        "versions": generation.versions,
        "segments": generation.segments,
        "restarts": generation.restarts,
    }


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Return OpenAI's usage object; each token counts once. ``cached_tokens`` are those of the prompt."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
