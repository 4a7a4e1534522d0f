"""The assembly of a trainer: either all parts start, or none is left running."""

from __future__ import annotations

from contextlib import closing
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from skyrl_train.build import trainer as assembly
from skyrl_train.config.compose import compose
from skyrl_train.config.plan import resolve
from skyrl_train.errors import ConfigError
from skyrl_train.observability.reporter import Reporter
from skyrl_train.observability.run_folder import RunFolder
from skyrl_train.rollout.data.dataset import load_dataset


@pytest.mark.parametrize("fails", ["trainer", "backend"])
async def test_started_parts_are_stopped_also_if_that_fails_and_the_first_error_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    overrides = [f"trainer.run_dir={tmp_path}", "generator.inference_engine.executor=thread", "trainer.trackers=[]"]
    config = compose("quickstart", overrides)
    dataset = load_dataset(config.data, config.environment)
    plan = resolve(config, len(dataset))
    stopped: list[str] = []
    build_client = assembly.build_client

    def refuse(*arguments: object) -> Any:
        raise ConfigError("cannot be built")

    def client(*arguments: Any) -> Any:
        built = build_client(*arguments)
        teardown = built.teardown

        async def torn_down() -> None:
            stopped.append("engines")
            await teardown()
            raise RuntimeError("an engine does not end")

        monkeypatch.setattr(built, "teardown", torn_down)
        return built

    def backend(*arguments: object) -> Any:
        return SimpleNamespace(close=lambda: stopped.append("backend"), stage=None)

    monkeypatch.setattr(assembly, "build_client", client)
    monkeypatch.setattr(assembly, "build_backend", refuse if fails == "backend" else backend)
    monkeypatch.setattr(assembly, "trainer_class", refuse)
    with closing(RunFolder(tmp_path, config)) as run_folder:
        reporter = Reporter(config, run_folder, Console(file=StringIO()), plan.total_steps)
        with pytest.raises(ConfigError, match="cannot be built"):
            await assembly.build_trainer(config, plan, dataset, run_folder, reporter)
    assert stopped == ["engines"] + ["backend"] * (fails == "trainer")
