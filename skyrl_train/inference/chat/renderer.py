"""Messages to tokens, once: what was sampled is never decoded and encoded again (SEMANTICS 2.2).

render(messages) ─────────────────────────────> prompt tokens
extend(prompt tokens, sampled tokens, new messages)
    = prompt tokens + sampled tokens            verbatim
    + what closes the assistant's turn          where the sampled tokens lack it
    + new messages + generation prompt
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_train.errors import ConfigError

if TYPE_CHECKING:
    from renderers import Renderer
    from transformers import PreTrainedTokenizerBase

# Stands for the assistant's answer when a template is rendered to see what follows it. Plain letters and digits survive
# every template's trimming; no template and no system prompt contains them.
_ANSWER = "q7Zk3vX9"


class ChatRenderer:
    """Renders conversations with the model's own chat template.

    Model families that the ``renderers`` library knows by hub name are rendered by it; any other template is asked what
    it puts between an answer and the next generation prompt. Without a template, a conversation is its contents in a
    row.

    Earlier turns stay exactly as sampled, reasoning included, also where the template would drop it from history: the
    tokens trained on are the tokens seen.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model_name_or_path: str) -> None:
        self._tokenizer = tokenizer
        self._name = model_name_or_path
        self._renderer = _known_renderer(tokenizer, model_name_or_path)
        self._has_template = bool(tokenizer.chat_template)
        self._render = lru_cache(maxsize=256)(self._render_json)
        self._closing: list[int] | None = None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the tokens of ``messages`` and the generation prompt.

        Raises:
            ConfigError: the template refuses the messages, or nothing is left to encode.
        """
        return list(self._render(json.dumps(_plain(messages))))  # the samples of a group share their prompt

    def _render_json(self, conversation: str) -> list[int]:
        messages = json.loads(conversation)
        if self._renderer is not None:
            ids = list(self._renderer.render_ids(messages, add_generation_prompt=True))
        elif self._has_template:
            ids = self._encode(self._apply(messages, add_generation_prompt=True))
        else:
            ids = list(self._tokenizer(_contents(messages), add_special_tokens=True)["input_ids"])
            if len(ids) > 1 and ids[-1] == self._tokenizer.eos_token_id:
                ids.pop()  # a tokenizer that ends every text by itself would end the prompt before the answer
        if not ids:
            raise ConfigError(f"The conversation {list(messages)!r:.200} has no tokens; a prompt must not be empty.")
        return ids

    def extend(
        self,
        prompt_token_ids: Sequence[int],
        response_ids: Sequence[int],
        new_messages: Sequence[Mapping[str, Any]],
    ) -> list[int]:
        """Returns the next turn's input; it begins with ``prompt_token_ids + response_ids``.

        Raises:
            ConfigError: the template refuses the messages, or rewrites answers so that it cannot be extended.
        """
        previous = [*prompt_token_ids, *response_ids]
        if self._renderer is not None:
            bridged = self._renderer.bridge_to_next_turn(
                list(prompt_token_ids), list(response_ids), _plain(new_messages)
            )
            if bridged is not None and bridged.token_ids[: len(previous)] == previous:
                return list(bridged.token_ids)
        if not self._has_template:
            return previous + self._encode_after_answer(_contents(new_messages))
        following = self._encode_after_answer(self._after_answer(new_messages, add_generation_prompt=True))
        if self._closing is None:
            self._closing = self._encode_after_answer(self._after_answer((), add_generation_prompt=False))
        return previous + following[_overlap(response_ids, self._closing) :]

    def _after_answer(self, new_messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        dummy = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        text = self._apply([*dummy, *new_messages], add_generation_prompt)
        _, found, rest = text.partition(_ANSWER)
        if not found:
            raise ConfigError(
                f"The chat template of {self._name!r} drops earlier answers, so that a conversation cannot be "
                "continued token by token. Use generator.max_turns=1 or another template."
            )
        return rest

    def _apply(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                _plain(messages), add_generation_prompt=add_generation_prompt, tokenize=False
            )
        except TemplateError as error:
            roles = [message.get("role") for message in messages]
            raise ConfigError(
                f"The chat template of {self._name!r} refuses a conversation of {roles}: {error}"
            ) from error
        return str(text)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _encode_after_answer(self, text: str) -> list[int]:
        """Encodes ``text`` as it would be after other text: some tokenizers put a space before the first word."""
        if not text:
            return []
        answer, both = self._encode(_ANSWER), self._encode(_ANSWER + text)
        return both[len(answer) :] if both[: len(answer)] == answer else self._encode(text)


def _known_renderer(tokenizer: PreTrainedTokenizerBase, name: str) -> Renderer | None:
    """The hand-written renderer of this hub name. A folder has no family name, so nothing is imported for it."""
    if Path(name).is_dir():
        return None
    from renderers import config_from_name, create_renderer
    from renderers.base import MODEL_RENDERER_MAP

    family = MODEL_RENDERER_MAP.get(name)
    config = config_from_name(family) if family is not None else None
    if config is None:
        return None
    # "all": a new message never makes the bridge drop the reasoning of earlier turns.
    return create_renderer(tokenizer, type(config)(thinking_retention="all"))


def _overlap(response_ids: Sequence[int], closing: Sequence[int]) -> int:
    """How many tokens of ``closing`` the response has sampled already: its longest prefix that ends the response."""
    for length in range(min(len(closing), len(response_ids)), 0, -1):
        if list(response_ids[-length:]) == list(closing[:length]):
            return length
    return 0


def _contents(messages: Sequence[Mapping[str, Any]]) -> str:
    return "".join(str(message["content"]) for message in messages)


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [dict(message) for message in messages]
