"""An engine of our own: continuous batching with torch over any causal LM that transformers can build."""

from skyrl_train.inference.engines.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
