"""The size of a causal language model, from its configuration alone: no torch, no weights, no network."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_train.config.schema import LoraConfig, ModelConfig

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2}
NUM_SPECIAL_TOKENS = 3  # <pad>, <eos>, <unk> of the character tokenizer


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder-only transformer with gated feed-forward layers (the Llama family)."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    tied_embeddings: bool

    @property
    def num_parameters(self) -> int:
        """Weights of embeddings, attention, feed-forward layers and norms, without biases."""
        h = self.hidden_size
        attention = 2 * h * self.head_dim * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * h * self.intermediate_size + 2 * h
        embeddings = self.vocab_size * h * (1 if self.tied_embeddings else 2)
        return embeddings + self.num_layers * layer + h

    def adapter_parameters(self, lora: LoraConfig) -> int | None:
        """Return the elements of A and B in all adapted linear layers; None if the names do not tell which layers those are."""
        heads, kv_heads = self.head_dim * self.num_heads, self.head_dim * self.num_kv_heads
        h, i = self.hidden_size, self.intermediate_size
        ends = {
            "q_proj": h + heads,
            "k_proj": h + kv_heads,
            "v_proj": h + kv_heads,
            "o_proj": heads + h,
            "gate_proj": h + i,
            "up_proj": h + i,
            "down_proj": i + h,
        }
        named = list(ends) if lora.target_modules == ["all-linear"] else list(lora.target_modules)
        if not ends.keys() >= {*named, *lora.exclude_modules}:
            return None
        return self.num_layers * lora.rank * sum(ends[name] for name in {*named} - {*lora.exclude_modules})


def model_shape(model: ModelConfig) -> ModelShape | None:
    """Return the shape of the configured model, or None if only loading it would tell (for a hub name, say)."""
    build = model.build
    if model.path is None:
        return ModelShape(
            num_layers=build.num_layers,
            hidden_size=build.hidden_size,
            num_heads=build.num_heads,
            num_kv_heads=build.num_heads,
            head_dim=build.hidden_size // build.num_heads,
            intermediate_size=build.intermediate_size,
            vocab_size=len(set(build.alphabet)) + len(set(build.words)) + NUM_SPECIAL_TOKENS,
            max_position_embeddings=build.max_position_embeddings,
            tied_embeddings=False,
        )
    try:
        config: dict[str, Any] = json.loads((Path(model.path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    # A mixture of experts has other sizes; no estimate is better than a wrong one.
    if any("expert" in key for key in config):
        return None
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return ModelShape(
            num_layers=config["num_hidden_layers"],
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            max_position_embeddings=config["max_position_embeddings"],
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        )
    except (KeyError, TypeError):
        return None
