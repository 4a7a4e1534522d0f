"""What is trained: a model that exists or one that is built on the spot, whole or by a LoRA adapter."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class BuildModelConfig:
    """A small model with random weights and a character tokenizer, made on the spot."""

    alphabet: str = "0123456789"  # the characters of the tokenizer's vocabulary, beside its special tokens
    words: list[str] = field(default_factory=list)  # longer texts of one token each: the fixed parts of a tool call
    model_type: str = "qwen3"  # any causal LM type that transformers can build from a config
    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    intermediate_size: int = 256
    max_position_embeddings: int = 512


@dataclass
class LoraConfig:
    """A LoRA adapter (arXiv 2106.09685) is trained and published; the model's own weights stay. Needs peft."""

    rank: int = 0  # of each update; 0: no adapter, all weights are trained
    alpha: float = 16.0  # an update counts alpha / rank
    dropout: float = 0.0  # must be 0: the engines sample without it, and the first pass's proximal ratio would not be 1
    # The last parts of linear layers' names; all-linear: all but the head
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    exclude_modules: list[str] = field(default_factory=list)  # of those, by their names' last parts
    init_method: str = "kaiming"  # kaiming | gaussian: of A; B starts at 0, so that a run starts from the model itself


@dataclass
class ModelConfig:
    """The model that the policy starts from."""

    path: str | None = None  # a folder or hub name that transformers opens; None: build one
    # Without a path: made on the spot, in <run>/model
    build: BuildModelConfig = field(default_factory=BuildModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
