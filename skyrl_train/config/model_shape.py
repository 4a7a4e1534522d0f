"""The size of a causal language model, from its configuration alone: no torch, no weights, no network."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from skyrl_train.config.schema import LoraConfig, ModelConfig

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2}
NUM_SPECIAL_TOKENS = 3  # <pad>, <eos>, <unk> of the character tokenizer
# Types of models whose config.json leaves out tie_word_embeddings if the head shares the weights of the embeddings
_TIED_BY_DEFAULT = {"gemma", "gemma2", "gemma3_text", "cohere", "cohere2", "smollm3", "ernie4_5"}
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}  # kinds of layers with the same weights


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
    max_position_embeddings: int | None  # None: unknown
    tied_embeddings: bool

    @property
    def linear_parameters(self) -> int:
        """Weights of the linear layers of attention and feed-forward, without the head."""
        h = self.hidden_size
        attention = 2 * h * self.head_dim * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * h * self.intermediate_size)

    @property
    def num_parameters(self) -> int:
        """Weights of embeddings, attention, feed-forward layers and norms, without biases."""
        h = self.hidden_size
        embeddings = self.vocab_size * h * (1 if self.tied_embeddings else 2)
        return embeddings + self.linear_parameters + self.num_layers * 2 * h + h

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


# Layers, hidden size, heads, heads of keys and values, size of a head, feed-forward size, vocabulary, tied embeddings: from the
# config.json of each family and size on the hub.
_PUBLISHED = {
    "Qwen2.5-0.5B": (24, 896, 14, 2, 64, 4864, 151_936, True),
    "Qwen2.5-1.5B": (28, 1536, 12, 2, 128, 8960, 151_936, True),
    "Qwen2.5-3B": (36, 2048, 16, 2, 128, 11_008, 151_936, True),
    "Qwen2.5-7B": (28, 3584, 28, 4, 128, 18_944, 152_064, False),
    "Qwen2.5-14B": (48, 5120, 40, 8, 128, 13_824, 152_064, False),
    "Qwen2.5-32B": (64, 5120, 40, 8, 128, 27_648, 152_064, False),
    "Qwen3-0.6B": (28, 1024, 16, 8, 128, 3072, 151_936, True),
    "Qwen3-1.7B": (28, 2048, 16, 8, 128, 6144, 151_936, True),
    "Qwen3-4B": (36, 2560, 32, 8, 128, 9728, 151_936, True),
    "Qwen3-8B": (36, 4096, 32, 8, 128, 12_288, 151_936, False),
    "Qwen3-14B": (40, 5120, 40, 8, 128, 17_408, 151_936, False),
    "Qwen3-32B": (64, 5120, 64, 8, 128, 25_600, 151_936, False),
    "Llama-3.2-1B": (16, 2048, 32, 8, 64, 8192, 128_256, True),
    "Llama-3.2-3B": (28, 3072, 24, 8, 128, 8192, 128_256, True),
    "Llama-3.1-8B": (32, 4096, 32, 8, 128, 14_336, 128_256, False),
}
# Trainings of the same shape: the name of a size, with or without these parts.
_PUBLISHED_NAME = re.compile(
    r"(?:Qwen|meta-llama)/(Qwen2\.5|Qwen3|Llama-3\.[12])(?:-Coder)?(-[\d.]+B)(?:-Base|-Instruct)?(?:-\d{4})?"
)


def model_shape(model: ModelConfig) -> ModelShape | None:
    """Return the shape of the configured model, or None if only loading it would tell (a hub name that is not listed here)."""
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
        return _published_shape(model.path)
    # Experts, latent attention and recurrent layers have other sizes; no estimate is better than a wrong one.
    layers = config.get("layer_types") or ()
    if any("expert" in key for key in config) or config.get("kv_lora_rank") or not _ATTENTION.issuperset(layers):
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
            max_position_embeddings=num_positions(SimpleNamespace(**config)),
            tied_embeddings=bool(config.get("tie_word_embeddings", config.get("model_type") in _TIED_BY_DEFAULT)),
        )
    except (KeyError, TypeError):
        return None


def num_positions(config: object) -> int | None:
    """Return how many tokens a sequence may have; None: the model's configuration does not say.

    With LongRoPE (Phi-3, Phi-4-mini), one sequence beyond the original positions changes the frequencies of all sequences in its
    batch, and vLLM chooses them by its context. So only the original positions can be used: there, each sequence has the same
    log-probs everywhere.

    Args:
        config: has the fields of a ``config.json`` as attributes.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    original: int | None = rope.get("original_max_position_embeddings")
    original = original or getattr(config, "original_max_position_embeddings", None)
    positions: int | None = getattr(config, "max_position_embeddings", None)
    is_long = "longrope" in (rope.get("rope_type"), rope.get("type"))
    if is_long and rope.get("long_factor") != rope.get("short_factor"):
        return original or positions
    return positions


def _published_shape(name: str) -> ModelShape | None:
    """Return the shape of a model on the hub; its positions differ between trainings of a size, and are left out."""
    match = _PUBLISHED_NAME.fullmatch(name)
    sizes = None if match is None else _PUBLISHED.get(match[1] + match[2])
    if sizes is None:
        return None
    num_layers, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size, vocab_size, tied_embeddings = sizes
    return ModelShape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
        max_position_embeddings=None,
        tied_embeddings=tied_embeddings,
    )
