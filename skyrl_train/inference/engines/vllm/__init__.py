"""vLLM as an inference engine: ``VLLMEngine`` runs it here, ``remote.RemoteVLLMEngine`` speaks to a server."""

from skyrl_train.inference.engines.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]
