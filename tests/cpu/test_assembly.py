"""The assembly of a trainer: either all parts start, or none is left running."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from skyrl_train.build import backend as of_backend
from skyrl_train.build import trainer as assembly
from skyrl_train.build.engines import build_engine
from skyrl_train.config.compose import compose
from skyrl_train.config.plan import resolve
from skyrl_train.errors import ConfigError
from skyrl_train.observability.reporter import Reporter
from skyrl_train.observability.run_folder import RunFolder
from skyrl_train.rollout.data.dataset import load_dataset
from skyrl_train.training import process_backend
from skyrl_train.training.messages import ModelSettings, Role


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


@pytest.mark.parametrize(
    ("overrides", "engines_first"),
    [
        (["generator.inference_engine.backend=vllm", "trainer.device=cuda"], True),
        (["generator.inference_engine.backend=vllm", "rollout.stages.reference.device=cuda"], True),
        (["generator.inference_engine.backend=vllm"], False),
        (["generator.inference_engine.device=cuda", "trainer.device=cuda"], False),
    ],
)
async def test_training_loads_after_engines_that_measure_the_memory_of_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], engines_first: bool
) -> None:
    config = compose(
        "quickstart",
        [f"trainer.run_dir={tmp_path}", "trainer.trackers=[]", "trainer.algorithm.kl_loss_coef=0.1", *overrides],
    )
    dataset = load_dataset(config.data, config.environment)
    plan = resolve(config, len(dataset))
    order: list[str] = []
    built, started = threading.Event(), asyncio.Event()
    build_client = assembly.build_client

    def client(*arguments: Any) -> Any:
        async def start() -> None:
            # Beside a backend that does not wait for the engines, they are slower than it is.
            await asyncio.sleep(0) if engines_first else await asyncio.to_thread(built.wait)
            order.append("engines")
            started.set()

        engines = build_client(*arguments)
        monkeypatch.setattr(engines, "start", start)
        return engines

    def backend(*arguments: object) -> Any:
        order.append("backend")
        built.set()
        return SimpleNamespace(close=lambda: None, stage=None)

    async def start_stage() -> None:
        order.append(f"stage after engines={started.is_set()}")

    async def close_stage() -> None: ...

    def refuse(*arguments: object) -> Any:
        raise ConfigError("enough")

    stage = SimpleNamespace(start=start_stage, aclose=close_stage)
    monkeypatch.setattr(assembly, "build_client", client)
    monkeypatch.setattr(assembly, "build_stages", lambda *arguments: [stage])
    monkeypatch.setattr(assembly, "build_backend", backend)
    monkeypatch.setattr(assembly, "trainer_class", refuse)
    with closing(RunFolder(tmp_path, config)) as run_folder:
        reporter = Reporter(config, run_folder, Console(file=StringIO()), plan.total_steps)
        with pytest.raises(ConfigError, match="enough"):
            await assembly.build_trainer(config, plan, dataset, run_folder, reporter)
    loading = ["backend", f"stage after engines={engines_first}"]
    assert order[0] == "engines" if engines_first else order[-1] == "engines"
    assert sorted(order) == sorted(["engines", *loading])


@pytest.mark.parametrize(
    ("overrides", "devices", "reserved"),
    [
        ([], [[], []], None),
        (["device=cuda"], [[0], [1]], None),
        (["device=cuda", "tensor_parallel_size=2"], [[0, 1], [2, 3]], None),
        (["device=cuda", "devices=[2,2]"], [[2], [2]], None),
        (["executor=ray"], [[], []], 0),
        (["executor=ray", "device=cuda"], [None, None], 1),
        (["executor=ray", "device=cuda", "pipeline_parallel_size=4"], [None, None], 4),
    ],
)
def test_engines_of_vllm_are_built_for_their_gpus(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], devices: list[list[int] | None], reserved: float | None
) -> None:
    """In an actor, Ray chooses the GPUs; None leaves that to it."""
    prefix = "generator.inference_engine."
    vllm = [f"{prefix}{override}" for override in ("backend=vllm", "num_engines=2", *overrides)]
    config = compose("quickstart", vllm)
    plan = resolve(config, 32)
    found: list[Any] = []

    def local(factory: str, arguments: dict[str, Any], *, log_file: str | None) -> Any:
        found.append((arguments["devices"], None))

    def in_ray(factory: str, arguments: dict[str, Any], placement: Any) -> Any:
        found.append((arguments["devices"], placement.num_gpus))

    monkeypatch.setattr("skyrl_train.build.engines.ProcessEngine", local)
    monkeypatch.setattr("skyrl_train.inference.engines.ray_engine.RayEngine", in_ray)
    for index in range(2):
        build_engine(config, plan, "/model", index)
    assert found == [(expected, reserved) for expected in devices]


def test_each_vllm_engine_has_a_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of its process and, from the environment of that, of vLLM's workers."""
    found: list[str] = []

    def local(factory: str, arguments: dict[str, Any], *, log_file: str) -> Any:
        assert arguments["log_file"] == log_file
        found.append(log_file)

    monkeypatch.setattr("skyrl_train.build.engines.ProcessEngine", local)
    monkeypatch.setattr(
        "skyrl_train.inference.engines.ray_engine.RayEngine",
        lambda _, arguments, __: found.append(arguments["log_file"]),
    )
    prefix = "generator.inference_engine."
    for executor in ("process", "ray"):
        config = compose(
            "quickstart", [f"{prefix}backend=vllm", f"{prefix}num_engines=2", f"{prefix}executor={executor}"]
        )
        for index in range(2):
            build_engine(config, resolve(config, 32), "/model", index, logs=tmp_path)
    assert [Path(log).name for log in found] == ["engine-0.log", "engine-1.log"] * 2


@pytest.mark.parametrize("executor", ["thread", "process"])
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["engine_args={gpu_memory_utilization: 0.35}"], 0.63),
        (["num_engines=2", "devices=[0, 0]", "engine_args={gpu_memory_utilization: 0.2}"], 0.58),
        (["devices=[1]"], None),
        (["executor=ray"], None),
        (["engine_args={gpu_memory_utilization: 0.35, enable_sleep_mode: true}"], None),
    ],
)
def test_a_trainer_leaves_vllm_its_part_of_a_gpu_also_while_that_starts_again(
    overrides: list[str], expected: float | None, executor: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits: list[tuple[float, str]] = []

    def in_the_process(_: object, role: Role, settings: ModelSettings, *__: object) -> None:
        process_backend._ModelHost().load_model(role, settings, None)

    monkeypatch.setattr(process_backend.ProcessTraining, "__init__", in_the_process)
    monkeypatch.setattr(process_backend, "gc", SimpleNamespace(collect=int, freeze=int))
    for module in (of_backend, process_backend):
        monkeypatch.setattr(module, "LocalBackend", lambda *_: "backend")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: limits.append(given))
    prefix = "generator.inference_engine."
    engine = [f"{prefix}backend=vllm", f"{prefix}device=cuda", *(prefix + override for override in overrides)]
    config = compose("quickstart", ["trainer.device=cuda", f"trainer.executor={executor}", *engine])
    of_backend.build_policy_backend(config, resolve(config, 32), "/model", tmp_path, None)
    assert limits == ([] if expected is None else [(pytest.approx(expected), "cuda:0")])
