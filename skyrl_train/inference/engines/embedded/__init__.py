"""The embedded engine: continuous batching in plain torch, for any causal LM that transformers can build."""

from skyrl_train.inference.engines.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
