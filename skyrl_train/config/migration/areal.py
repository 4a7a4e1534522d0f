"""AReaL's settings that most scripts have."""

from __future__ import annotations

from typing import Any

from skyrl_train.config.migration.table import UNSET, Library, Setting, Theirs, mapped_values, other_names, unless_none


def _minibatches(theirs: Theirs) -> int:
    """Return the optimizer steps for a batch, after which the version changes there."""
    return int(theirs.get("actor.ppo_n_minibatches", 1))


def _of_batch(value: Any, theirs: Theirs) -> int:
    return -(-int(value) // _minibatches(theirs))


def _ahead(value: Any, theirs: Theirs) -> Any:
    return value * _minibatches(theirs)


def _clip_high(value: Any, theirs: Theirs) -> Any:
    higher = theirs.get("actor.eps_clip_higher")
    return unless_none(theirs.get("actor.eps_clip", UNSET) if higher is None else higher, theirs)


def _batch(value: Any, theirs: Theirs) -> Any:
    return UNSET if theirs.get(_OFF_POLICY) or _minibatches(theirs) == 1 else value


_OFF_POLICY = "rollout.max_head_offpolicyness"
_BATCH = ("train_dataset.batch_size", "rollout.consumer_batch_size")

_SETTINGS: list[Setting] = [
    *other_names(
        "",
        {
            "seed": "trainer.seed",
            "total_train_epochs": "trainer.epochs",
            "actor.path": "trainer.policy.model.path",
            "actor.gradient_checkpointing": "trainer.policy.gradient_checkpointing",
            "actor.optimizer.lr": "trainer.policy.optimizer_config.lr",
            "actor.optimizer.weight_decay": "trainer.policy.optimizer_config.weight_decay",
            "actor.optimizer.eps": "trainer.policy.optimizer_config.adam_eps",
            "actor.optimizer.gradient_clipping": "trainer.policy.optimizer_config.max_grad_norm",
            "actor.optimizer.lr_scheduler_type": "trainer.policy.optimizer_config.scheduler",
            "actor.eps_clip": "trainer.algorithm.eps_clip_low",
            "gconfig.n_samples": "generator.n_samples_per_prompt",
            "gconfig.max_new_tokens": "generator.sampling_params.max_tokens",
            "gconfig.min_new_tokens": "generator.sampling_params.min_tokens",
            "gconfig.temperature": "generator.sampling_params.temperature",
            "gconfig.top_p": "generator.sampling_params.top_p",
            "gconfig.stop_token_ids": "generator.sampling_params.stop_token_ids",
            "gconfig.ignore_eos": "generator.sampling_params.ignore_eos",
            "rollout.max_concurrent_rollouts": "trainer.fully_async.num_parallel_generation_workers",
        },
    ),
    *[
        Setting(name, "trainer.algorithm.eps_clip_high", note, UNSET, _clip_high)
        for name, note in (("actor.eps_clip", "without eps_clip_higher"), ("actor.eps_clip_higher", ""))
    ],
    *[
        Setting(name, "trainer.policy_mini_batch_size", "divided by actor.ppo_n_minibatches", UNSET, _of_batch)
        for name in _BATCH
    ],
    *[Setting(name, "trainer.train_batch_size", "in a synchronous run", UNSET, _batch) for name in _BATCH],
    Setting(
        "total_train_steps",
        "trainer.max_steps",
        "there batches, here minibatches",
        UNSET,
        lambda value, theirs: None if value is None else value * _minibatches(theirs),
    ),
    Setting(
        "train_dataset.shuffle",
        "data.sampler",
        "true: shuffle; false: sequential",
        UNSET,
        mapped_values({True: "shuffle", False: "sequential"}),
    ),
    Setting(
        "actor.ppo_n_minibatches",
        "trainer.fully_async.weight_sync_interval",
        "with max_head_offpolicyness; the version changes after a batch",
        UNSET,
        lambda value, theirs: value if theirs.get(_OFF_POLICY) else UNSET,
    ),
    Setting(
        _OFF_POLICY,
        "trainer.mode",
        "above 0: fully_async",
        UNSET,
        lambda value, theirs: "fully_async" if value else "sync",
    ),
    Setting(_OFF_POLICY, "trainer.fully_async.generate_ahead_steps", "there batches, here minibatches", UNSET, _ahead),
    Setting(
        _OFF_POLICY,
        "trainer.fully_async.max_staleness_steps",
        "the least that this allows",
        UNSET,
        lambda value, theirs: _ahead(value, theirs) + _minibatches(theirs) - 1,
    ),
    Setting(
        _OFF_POLICY,
        "trainer.fully_async.staleness_policy",
        "there older groups are trained: accept",
        UNSET,
        lambda value, theirs: "accept",
    ),
]

AREAL = Library("AReaL", "1.0.4", _SETTINGS)
