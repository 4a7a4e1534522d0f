"""``trainer.mode`` names a built-in trainer, or a subclass of one by its import path."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Harness

from skyrl_train.build.trainer import trainer_class
from skyrl_train.config.compose import compose, from_yaml, to_yaml
from skyrl_train.config.plan import resolve
from skyrl_train.config.schema import TrainerMode
from skyrl_train.errors import ConfigError
from skyrl_train.trainer import PPOTrainer

MINE = """
from skyrl_train.fully_async_trainer import FullyAsyncTrainer
from skyrl_train.one_step_off_trainer import OneStepOffTrainer
from skyrl_train.trainer import PPOTrainer


class Base(FullyAsyncTrainer):
    pass


class Mine(Base):
    pass


class Synchronous(PPOTrainer):
    pass


class Turns(FullyAsyncTrainer):
    always_colocated = True


class NoTrainer:
    pass


def function():
    pass
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "my_trainer_file.py").write_text(MINE)
    return str(tmp_path / "my_trainer_file.py")


@pytest.mark.parametrize("mode", TrainerMode)
def test_each_built_in_mode_has_a_trainer(mode: TrainerMode) -> None:
    assert issubclass(trainer_class(mode), PPOTrainer)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("Mine", TrainerMode.fully_async),
        ("Synchronous", TrainerMode.sync),
        ("OneStepOffTrainer", TrainerMode.one_step_off),
    ],
)
def test_a_subclass_is_planned_in_the_mode_of_its_nearest_built_in_ancestor(
    mine: str, name: str, mode: TrainerMode
) -> None:
    config = compose("quickstart", [f"trainer.mode={mine}:{name}"])
    assert trainer_class(config.trainer.mode).__name__ == name
    plan = resolve(config, 512)
    built_in = resolve(compose("quickstart", [f"trainer.mode={mode}"]), 512)
    assert plan.mode is mode and plan.capacity == built_in.capacity and plan.num_workers == built_in.num_workers
    assert f"{mine}:{name} ({mode})" in plan.describe()
    assert from_yaml(to_yaml(config)) == config


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("asynchronous", "Set it to sync, one_step_off, fully_async, partial_rollout, or to a subclass"),
        ("fully_asink", r"trainer.mode=fully_asink is unknown. Did you mean fully_async\?"),
        ("{mine}:NoTrainer", "is no subclass of PPOTrainer"),
        ("{mine}:function", "is no subclass of PPOTrainer"),
        ("{mine}:Absent", "trainer.mode='.*' cannot be imported"),
        ("no_such.module:Trainer", "trainer.mode='no_such.module:Trainer' cannot be imported"),
    ],
)
def test_anything_else_is_an_error_before_the_run_starts(mine: str, mode: str, expected: str) -> None:
    mode = mode.format(mine=mine)
    with pytest.raises(ConfigError, match=expected):
        trainer_class(mode)
    with pytest.raises(ConfigError, match=expected):
        resolve(compose("quickstart", [f"trainer.mode={mode}"]), 512)


async def test_a_trainer_of_the_user_trains(mine: str, tmp_path: Path) -> None:
    h = Harness(tmp_path / "run", f"trainer.mode={mine}:Mine")
    await h.train()
    assert type(h.trainer).__name__ == "Mine" and h.trainer.finished


async def test_a_trainer_of_the_user_that_takes_turns_samples_nothing_while_it_trains(
    mine: str, tmp_path: Path
) -> None:
    h = Harness(tmp_path / "run", f"trainer.mode={mine}:Turns")
    sampling: set[bool] = set()
    h.backend.before_update = lambda part: sampling.add(h.client.gate.is_open)
    await h.train()
    assert sampling == {False} and h.trainer.finished
    # Engines would sleep while later steps of a weight sync wait for groups, or sample while parts of a step train.
    for name, value in (("weight_sync_interval", 2), ("streaming_min_groups", 1)):
        with pytest.raises(ConfigError, match=r"Turns is always_colocated.*interval=1 and streaming_min_groups=null"):
            Harness(tmp_path / name, f"trainer.mode={mine}:Turns", f"trainer.fully_async.{name}={value}")
