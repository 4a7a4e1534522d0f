"""vLLM as an inference engine: ``VLLMEngine`` runs it in the calling process, on GPUs and on CPUs."""

from skyrl_train.inference.engines.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]
