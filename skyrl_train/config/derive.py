"""What follows from the settings where they are left at None. One function per derived value."""

from __future__ import annotations

from skyrl_train.config.model_shape import ModelShape
from skyrl_train.config.schema import RunConfig, TrainerMode


def is_async(config: RunConfig) -> bool:
    """Whether generation runs ahead of training; the settings of ``trainer.fully_async`` count only then."""
    return config.trainer.mode is TrainerMode.fully_async


def max_staleness_steps(config: RunConfig) -> int:
    """S: the bound on a group's lag. In sync, a batch of k minibatches is k - 1 steps old when its last one trains."""
    if is_async(config):
        return config.trainer.fully_async.max_staleness_steps
    return train_batch_size(config) // config.trainer.policy_mini_batch_size - 1


def pipeline_depth(config: RunConfig) -> int:
    """D: steps that generation may run ahead; 1 unless S is 0."""
    if not is_async(config):
        return 0
    depth = config.trainer.fully_async.pipeline_depth
    return min(1, max_staleness_steps(config)) if depth is None else depth


def train_batch_size(config: RunConfig) -> int:
    """Groups per generation phase; B unless the synchronous trainer is told otherwise."""
    size = config.trainer.train_batch_size
    return config.trainer.policy_mini_batch_size if size is None else size


def num_workers(config: RunConfig) -> int:
    """W: groups generated at once; as many as admission ever lets in."""
    if not is_async(config):
        return train_batch_size(config)
    workers = config.trainer.fully_async.num_parallel_generation_workers
    return (pipeline_depth(config) + 1) * config.trainer.policy_mini_batch_size if workers is None else workers


def longest_request(config: RunConfig) -> int:
    """Tokens of the longest sequence that prompt and response limits allow."""
    return config.generator.max_input_length + config.generator.sampling_params.max_tokens


def max_model_len(config: RunConfig, shape: ModelShape | None) -> int:
    """Tokens per request: prompt and response limits, within what the model has positions for."""
    explicit = config.generator.inference_engine.max_model_len
    if explicit is not None:
        return explicit
    longest = longest_request(config)
    return longest if shape is None else min(longest, shape.max_position_embeddings)


def total_steps(config: RunConfig, dataset_len: int) -> int:
    """Optimizer steps: ``max_steps``, or as many full minibatches as the epochs hold (no barrier between epochs)."""
    if config.trainer.max_steps is not None:
        return config.trainer.max_steps
    return config.trainer.epochs * dataset_len // config.trainer.policy_mini_batch_size
