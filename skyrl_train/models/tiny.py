"""A small model with random weights and a character tokenizer, saved as an ordinary model folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from skyrl_train.config.schema import BuildModelConfig
from skyrl_train.errors import ConfigError, ModelError
from skyrl_train.models.folder import BUILDING, quiet_transformers
from skyrl_train.models.seeded_draws import SeededDraws

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
# No markup between turns: a conversation is the text of its messages in a row.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def character_tokenizer(alphabet: str, words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character of ``alphabet``, after ``<pad>`` (0), ``<eos>`` (1) and ``<unk>`` (2).

    Each of ``words`` is one more token.
    """
    characters = sorted(set(alphabet))
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNK, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in dict.fromkeys(words)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_model_folder(build: BuildModelConfig, folder: Path, seed: int) -> None:
    """Write config, tokenizer and random weights (a function of ``seed``) into ``folder``; keep an existing folder unchanged.

    Raises:
        ConfigError: a size is impossible.
        ModelError: transformers cannot build ``build.model_type`` with these sizes, or ``folder`` cannot be written.
    """
    if folder.is_dir():
        return
    _check(build)
    tokenizer = character_tokenizer(build.alphabet, build.words)
    try:
        config = AutoConfig.for_model(
            build.model_type,
            vocab_size=len(tokenizer),
            hidden_size=build.hidden_size,
            num_hidden_layers=build.num_layers,
            num_attention_heads=build.num_heads,
            num_key_value_heads=build.num_heads,
            head_dim=build.hidden_size // build.num_heads,
            intermediate_size=build.intermediate_size,
            max_position_embeddings=build.max_position_embeddings,
            tie_word_embeddings=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
        with BUILDING, SeededDraws(seed), quiet_transformers():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError) as error:
        raise ModelError(
            f"trainer.policy.model.build: cannot make a {build.model_type!r} model of these sizes: {error}"
        ) from error
    # Written beside and renamed, so that a crash leaves no half-written model that a later run would use.
    unfinished = folder.with_name(folder.name + ".tmp")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        with quiet_transformers():
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
        os.replace(unfinished, folder)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"The model cannot be written to {str(folder)!r}: {error}. Make space there, or name a writable folder in "
            "trainer.runs_dir."
        ) from error


def _check(build: BuildModelConfig) -> None:
    where = "trainer.policy.model.build"
    sizes = ("hidden_size", "num_layers", "num_heads", "intermediate_size", "max_position_embeddings")
    for name in sizes:
        if getattr(build, name) < 1:
            raise ConfigError(f"{where}.{name} must be at least 1, got {getattr(build, name)}.")
    for word in build.words:
        if len(word) < 2:
            raise ConfigError(f"{where}.words has {word!r}; single characters belong to {where}.alphabet.")
    if not build.alphabet:
        raise ConfigError(f"{where}.alphabet is empty; list the characters of the task's prompts and answers.")
    if build.hidden_size % (2 * build.num_heads):
        raise ConfigError(
            f"{where}.hidden_size={build.hidden_size} must be a multiple of 2 * num_heads = {2 * build.num_heads}: "
            "each head rotates pairs of dimensions."
        )
