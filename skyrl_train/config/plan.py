"""What a configuration amounts to: every derived number, for the trainers and for ``--dry-run``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from skyrl_train.config import derive, plan_rows, refusals
from skyrl_train.config.limits import Problems
from skyrl_train.config.memory import MemoryEstimate, estimate_memory
from skyrl_train.config.model_shape import model_shape
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.config.schema.trainer import TrainerMode


@dataclass(frozen=True, slots=True)
class Plan:
    """The resolved run. Letters as in the documentation: B, n, S, D, k, W."""

    config: RunConfig
    mode: TrainerMode
    dataset_len: int | None  # prompts; None: a stream
    total_steps: int
    steps_per_epoch: float | None  # None: a stream; the tail of an epoch flows into the next one
    policy_mini_batch_size: int  # B
    n_samples_per_prompt: int  # n
    train_batch_size: int  # groups per generation phase
    max_staleness_steps: int  # S; in sync, batch // minibatch - 1
    pipeline_depth: float  # D
    steps_per_publication: int  # k
    overlap_publication: bool
    streaming_min_groups: int | None  # None: a step begins with all its groups
    num_workers: int  # W
    straggler_policy: str
    max_model_len: int  # tokens per request, prompt and response
    memory: MemoryEstimate | None  # None: only loading the model would tell

    @property
    def capacity(self) -> int:
        """Groups that may be admitted and untrained at once: ``(D + k) * B``, rounded down."""
        return derive.capacity(self.config)

    @property
    def sequences_per_step(self) -> int:
        """Samples that one optimizer step trains on."""
        return self.policy_mini_batch_size * self.n_samples_per_prompt

    def describe(self) -> str:
        """A table for ``--dry-run``: one line per fact, grouped."""
        sections = plan_rows.sections(self)
        width = max(len(name) for _, rows in sections for name, _ in rows)
        lines: list[str] = []
        for title, rows in sections:
            lines.append(title)
            lines += [f"  {name:<{width}}  {value}" for name, value in rows]
        return "\n".join(lines)


def resolve(
    config: RunConfig, dataset_len: int | None, known_names: Mapping[str, Collection[str]] | None = None
) -> Plan:
    """Derives everything that the configuration leaves open.

    Args:
        dataset_len: prompts in the training set; None: a stream.
        known_names: see :func:`skyrl_train.config.refusals.refuse`.

    Raises:
        ConfigError: the configuration, or the configuration with a data set of this size, cannot work.
    """
    refusals.refuse(config, known_names)
    steps = derive.total_steps(config, dataset_len)
    refusals.raise_problems(list(_problems_with_data(config, dataset_len, steps)))
    shape = model_shape(config.trainer.policy.model)
    length = derive.max_model_len(config, shape)
    return Plan(
        config=config,
        mode=config.trainer.mode,
        dataset_len=dataset_len,
        total_steps=steps,
        steps_per_epoch=None if dataset_len is None else dataset_len / config.trainer.policy_mini_batch_size,
        policy_mini_batch_size=config.trainer.policy_mini_batch_size,
        n_samples_per_prompt=config.generator.n_samples_per_prompt,
        train_batch_size=derive.train_batch_size(config),
        max_staleness_steps=derive.max_staleness_steps(config),
        pipeline_depth=derive.pipeline_depth(config),
        steps_per_publication=derive.steps_per_publication(config),
        overlap_publication=derive.overlap_publication(config),
        streaming_min_groups=derive.streaming_min_groups(config),
        num_workers=derive.num_workers(config),
        straggler_policy=derive.straggler_policy(config),
        max_model_len=length,
        memory=estimate_memory(config, shape, length),
    )


def _problems_with_data(config: RunConfig, dataset_len: int | None, steps: int) -> Problems:
    minibatch = config.trainer.policy_mini_batch_size
    if dataset_len is None:
        return
    if dataset_len < 1:
        yield "The data set has no prompts. Name files in data.train_data, or set data.generate."
    elif steps < 1:
        yield (
            f"{config.trainer.epochs} epoch(s) of {dataset_len} prompts do not fill one minibatch of {minibatch}. Set "
            f"trainer.epochs={-(-minibatch // dataset_len)}, or trainer.policy_mini_batch_size={dataset_len} or less."
        )
