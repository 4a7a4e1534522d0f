"""Finds prompts that are longer than a request may be, before anything starts or as a stream reads them."""

from __future__ import annotations

import bisect
import logging
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from skyrl_train.config import derive
from skyrl_train.config.model_shape import model_shape
from skyrl_train.config.schema import RunConfig
from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import DataError
from skyrl_train.models.place import in_hub_cache, is_local
from skyrl_train.rollout.data.dataset import PromptDataset, canonical_json
from skyrl_train.types import ConversationType

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from skyrl_train.inference.chat import ChatRenderer

logger = logging.getLogger(__name__)

# More than any chat template adds to a conversation, and to each message of it.
TEMPLATE_TOKENS, MESSAGE_TOKENS = 256, 64


class PromptLimit:
    """Applies ``data.on_long_prompt`` to prompts of more than ``tokens`` tokens.

    A prompt whose bytes are few enough needs no tokenizer: a token has at least one byte. So the tokenizer is loaded at the
    first prompt that may be too long.

    Args:
        download: whether the tokenizer of a model on the hub may be downloaded; otherwise its prompts are not checked.

    Attributes:
        tokens: limit of a rendered prompt.
        notes: a sentence about each data set that had prompts which are too long.
        left_out: prompts that a stream has left out.
    """

    def __init__(self, config: RunConfig, *, download: bool) -> None:
        model = config.trainer.policy.model
        context = derive.max_model_len(config, model_shape(model))
        self.tokens = min(config.generator.max_input_length, context - 1)  # one token is sampled at least
        self.notes: list[str] = []
        self.left_out = 0
        self._config = config
        # Agents make their own requests. The tokenizer of a new model has no file yet that could take another template.
        self._checks = (
            config.data.on_long_prompt != "keep"
            and config.generator.name != "harness"
            and (
                config.generator.chat_template is None
                if model.path is None
                else download or is_local(model.path) or in_hub_cache(model.path)
            )
        )

    def excess(self, record: PromptRecord) -> int | None:
        """Return the number of tokens of a prompt that is too long, else None.

        Raises:
            DataError: it has no tokens.
        """
        if self._checks and self._most_tokens(record.prompt) == 0:
            raise DataError(
                f"Prompt {record.uid!r} is empty, and a model of trainer.policy.model.build has no chat template that adds "
                "tokens. Remove the row, or write something into its prompt."
            )
        # A template of the user may add any number of tokens.
        by_bytes = self._config.generator.chat_template is None
        if not self._checks or (by_bytes and self._most_tokens(record.prompt) <= self.tokens):
            return None
        tokens = self._count(record.prompt)
        return tokens if tokens > self.tokens else None

    def fit(self, record: PromptRecord) -> PromptRecord | None:
        """Return the prompt as it is, or shortened; None: it is left out.

        Raises:
            DataError: it is too long and ``data.on_long_prompt=error``, or cannot be shortened.
        """
        tokens = self.excess(record)
        if tokens is None:
            return record
        action = self._config.data.on_long_prompt
        if action == "truncate":
            return self._shortened(record)
        if action == "error":
            raise DataError(self._message(f"prompt {record.uid!r} has {tokens} tokens", tokens))
        self.left_out += 1
        if self.left_out in (1, 10, 100, 1_000, 10_000, 100_000):
            logger.warning("%d prompts were left out; %r has %d tokens", self.left_out, record.uid, tokens)
        return None

    def fit_all(self, dataset: PromptDataset, name: str = "prompts") -> PromptDataset:
        """Return the data set without, or with shortened, prompts that are too long. If there are any, a note is added.

        Args:
            name: of the prompts, for the note.

        Raises:
            DataError: some are too long and ``data.on_long_prompt=error``, or all are.
        """
        lengths = {record.uid: tokens for record in dataset.records if (tokens := self.excess(record)) is not None}
        if not lengths:
            return dataset
        longest, most = max(lengths.items(), key=lambda item: item[1])
        some = f"{len(lengths):,} of {len(dataset):,} {name} are too long: {longest!r} has {most:,} tokens"
        action = self._config.data.on_long_prompt
        if action == "error" or (action == "filter" and len(lengths) == len(dataset)):
            raise DataError(self._message(some, most, filtered=action == "filter"))
        if action == "truncate":
            records = [self._shortened(each) if each.uid in lengths else each for each in dataset.records]
            self.notes.append(f"{some}; they were cut to {self.tokens:,}")
        else:
            records = [record for record in dataset.records if record.uid not in lengths]
            self.notes.append(f"{some}, more than {self.tokens:,}; they are left out")
        return PromptDataset(tuple(records))

    def _message(self, some: str, tokens: int, *, filtered: bool = False) -> str:
        """Return the message about ``some`` prompts, the longest of which has ``tokens`` tokens, with the remedies.

        Args:
            filtered: too long prompts are left out, and no other is there.
        """
        given = self._config.generator.max_input_length
        # Positions of the model, or max_model_len, may be the narrower limit.
        limit = (
            f"generator.max_input_length={given}"
            if self.tokens == given
            else f"the {self.tokens + 1} tokens of a request"
        )
        room = (
            f"generator.max_input_length={tokens}"
            if self.tokens == given
            else "generator.inference_engine.max_model_len, as far as the model has positions"
        )
        leave_out = "" if filtered else "filter to leave such prompts out, "
        return (
            f"{some}, more than {limit}. Raise {room}, or set data.on_long_prompt={leave_out}truncate to cut their beginnings "
            "off, or keep to resume a run that has them."
        )

    def _most_tokens(self, prompt: ConversationType) -> int:
        """Return a number of tokens that the prompt certainly does not exceed."""
        if self._config.trainer.policy.model.path is None:
            # A token is a character, or a longer word, and the template adds nothing.
            return sum(len(str(message.get("content") or "")) for message in prompt)
        return TEMPLATE_TOKENS + sum(MESSAGE_TOKENS + len(canonical_json(message)) for message in prompt)

    def rendered(self, record: PromptRecord) -> tuple[int, str]:
        """Return the number of tokens of a prompt and its text, with the chat template and its special tokens."""
        tokens = self._renderer.render(record.prompt)
        return len(tokens), str(self._tokenizer.decode(tokens))

    def _count(self, prompt: ConversationType) -> int:
        return len(self._renderer.render(prompt))

    @cached_property
    def _renderer(self) -> ChatRenderer:
        from skyrl_train.inference.chat import ChatRenderer

        return ChatRenderer.configured(
            self._config.generator, self._tokenizer, self._config.trainer.policy.model.path or ""
        )

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        # They import torch, like the renderer.
        from skyrl_train.models.folder import load_tokenizer
        from skyrl_train.models.tiny import character_tokenizer

        model = self._config.trainer.policy.model
        if model.path is None:
            return character_tokenizer(model.build.alphabet, model.build.words)
        return load_tokenizer(model.path, self._config.generator.chat_template)

    def _shortened(self, record: PromptRecord) -> PromptRecord:
        """Cut the beginning of the longest message off, as little as is necessary."""
        prompt = record.prompt
        index = max(range(len(prompt)), key=lambda index: len(str(prompt[index].get("content"))))
        text = prompt[index].get("content")
        if not isinstance(text, str):
            raise DataError(f"The longest message of prompt {record.uid!r} is not a text, so it cannot be shortened.")

        def cut(characters: int) -> ConversationType:
            return [*prompt[:index], {**prompt[index], "content": text[characters:]}, *prompt[index + 1 :]]

        dropped = bisect.bisect_left(
            range(len(text)), True, key=lambda characters: self._count(cut(characters)) <= self.tokens
        )
        if dropped == len(text):
            raise DataError(
                f"Prompt {record.uid!r} is longer than {self.tokens} tokens even without its longest message."
            )
        return replace(record, prompt=cut(dropped))
