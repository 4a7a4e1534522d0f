"""AReaL's settings that most scripts have."""

from __future__ import annotations

from skyrl_train.config.migration.table import Library, Setting, other_names

_SETTINGS: list[Setting] = other_names(
    "rollout.",
    {
        "max_head_offpolicyness": "trainer.fully_async.generate_ahead_steps",
        "consumer_batch_size": "trainer.policy_mini_batch_size",
        "max_concurrent_rollouts": "trainer.fully_async.num_parallel_generation_workers",
    },
)

AREAL = Library("AReaL", "1.0.4", _SETTINGS)
