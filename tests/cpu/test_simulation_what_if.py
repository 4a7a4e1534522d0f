"""``skyrl-train simulate``: faults, runs measured from their records, the comparison of modes, and the command."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pandas
import pytest
from scripted import scripted_update

from skyrl_train.config.compose import compose, to_yaml
from skyrl_train.entrypoints import simulate as command
from skyrl_train.entrypoints.command_line import main
from skyrl_train.errors import ConfigError, EngineDeadError
from skyrl_train.events.log import EVENTS, EventLog
from skyrl_train.inference.interface import InferenceEngineInput
from skyrl_train.observability.run_folder import CONFIG, METRICS
from skyrl_train.simulation.clock import VirtualTimeLoop, run_in_virtual_time
from skyrl_train.simulation.engine import EngineSpeed, ModelledEngine
from skyrl_train.simulation.faults import Faults
from skyrl_train.simulation.lengths import Lengths, constant, log_normal
from skyrl_train.simulation.measured import _decode_speed, measure_run
from skyrl_train.simulation.run import Outcome, Workload, simulate
from skyrl_train.simulation.training import TrainingSpeed
from skyrl_train.simulation.what_if import Scenario, Setup, coarsened, recommended
from skyrl_train.types import PauseMode

SMALL = Workload(
    lengths=log_normal(4 * 4 * 16, 20, 5, 0),
    batch_groups=4,
    steps=16,
    engine=EngineSpeed(16, step_s=0.02, step_per_request_s=0.001, transfer_s=0.3, load_s=0.1),
    training=TrainingSpeed(per_step_s=0.5, per_token_s=0.002, gather_s=0.05),
    samples=4,
)
ASYNC = ("trainer.mode=fully_async", "trainer.fully_async.generate_ahead_steps=null", "rollout.replay=false")


# Faults ----------------------------------------------------------------------------------------------------------------


async def serving(engine: ModelledEngine, version: int) -> None:
    await engine.receive_weights(scripted_update(version))
    await engine.pause(PauseMode.ABORT)
    await engine.load_weights(scripted_update(version))
    await engine.resume()


def ten_tokens() -> InferenceEngineInput:
    return InferenceEngineInput(prompt_token_ids=[[5]], sampling_params={"max_tokens": 10})


def test_a_dead_engine_returns_the_tokens_so_far_and_serves_again_with_new_weights() -> None:
    async def script(loop: VirtualTimeLoop) -> None:
        engine = ModelledEngine(EngineSpeed(slots=1, step_s=1.0, restart_s=7.0))
        await engine.start()
        await serving(engine, 0)
        answers = [asyncio.ensure_future(engine.generate(ten_tokens())) for _ in range(2)]
        await asyncio.sleep(4.5)
        await engine.die()
        samples = [await answer for answer in answers]
        assert [sample["response_versions"] for sample in samples] == [[[0] * 4], [[]]], "one waited for the slot"
        assert [sample["stop_reasons"] for sample in samples] == [["abort"], ["abort"]]
        for call in (engine.generate(ten_tokens()), engine.receive_weights(scripted_update(1)), engine.resume()):
            with pytest.raises(EngineDeadError):
                await call
        await engine.start()
        assert loop.time() == pytest.approx(4.5 + 7) and engine.policy_version == -1
        await serving(engine, 1)
        assert (await engine.generate(ten_tokens()))["response_versions"] == [[1] * 10]
        assert engine.busy_s() == pytest.approx(4.5 + 10)

    run_in_virtual_time(script)


def test_a_slower_engine_delays_the_requests_that_it_runs() -> None:
    async def script(loop: VirtualTimeLoop) -> None:
        engine = ModelledEngine(EngineSpeed(slots=1, step_s=1.0))
        await engine.start()
        await serving(engine, 0)
        tasks = Faults(slow_every_s=1e-9, slow_for_s=6.0, slow_by=3.0).begin(0, engine)  # slow from the first instant
        await asyncio.sleep(1e-6)
        answer = asyncio.ensure_future(engine.generate(ten_tokens()))
        await asyncio.sleep(4.0)
        for task in tasks:
            task.cancel()
        engine.change_speed(EngineSpeed(slots=1, step_s=1.0))
        await answer
        assert loop.time() == pytest.approx(4 + 10 - 4 / 3, abs=1e-3)

    run_in_virtual_time(script)


def test_a_run_with_faults_trains_every_group_within_the_bound_and_is_the_same_for_the_same_seed() -> None:
    def times(faults: Faults | None) -> list[float]:
        workload = replace(
            SMALL, steps=8, engines=3, samples=2, engine=replace(SMALL.engine, restart_s=3.0), faults=faults
        )
        outcome = simulate(workload, *ASYNC)
        assert [step.groups for step in outcome.trained] == [4] * 8 and outcome.max_trained_lag <= 4
        return [record.ended_s for record in outcome.records]

    dying = Faults(die_every_s=10.0, slow_every_s=5.0, slow_for_s=3.0, seed=1)
    assert times(dying) == times(dying)
    assert times(dying) != times(replace(dying, seed=2))
    assert times(dying)[-1] > times(None)[-1]


# A run from its record -------------------------------------------------------------------------------------------------


class VirtualEvents(EventLog):
    """Keeps events in memory. Unix time is the virtual time of the running loop."""

    def __init__(self) -> None:
        super().__init__(Path(), 10**6, clock=lambda: asyncio.get_running_loop().time())
        self.kept: list[dict[str, Any]] = []

    def put(self, kind: str, fields: dict[str, Any]) -> None:
        now = self.now()
        self.kept.append({"kind": kind, "t": now, "m": now, **fields})


def record_run(folder: Path, workload: Workload, *overrides: str) -> Outcome:
    """Simulate a run and write it as a real one is written."""
    events = VirtualEvents()
    outcome = simulate(workload, *overrides, edge=workload.steps // 4, events=events)
    settings = [
        f"trainer.policy_mini_batch_size={workload.batch_groups}",
        f"generator.n_samples_per_prompt={workload.samples}",
        f"generator.inference_engine.max_num_seqs={workload.engine.slots}",
        f"generator.inference_engine.num_engines={workload.engines}",
    ]
    folder.mkdir()
    (folder / CONFIG).write_text(to_yaml(compose("quickstart", [*settings, *overrides])))
    (folder / EVENTS).mkdir()
    (folder / EVENTS / "000001.jsonl").write_bytes(b"".join(orjson.dumps(e) + b"\n" for e in events.kept))
    groups = {event["step"]: event["groups"] for event in events.kept if event["kind"] == "trained"}
    rows = [{"step": r.step, "time": r.ended_s, "group_indices": groups[r.step], **r.metrics} for r in outcome.records]
    (folder / METRICS).write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return outcome


@pytest.mark.parametrize("overrides", [ASYNC, pytest.param(("trainer.mode=sync",), marks=pytest.mark.slow)])
def test_the_speeds_of_a_run_are_found_in_its_record(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """With more requests than slots, several turns, and updates in the middle of responses."""
    turns = [[(0.1, 1 + n // 3), (0.3, 1 + n - n // 3), (0.2, 0)] for n in SMALL.lengths.values.tolist()]
    lengths = Lengths("turns", SMALL.lengths.values + 2)
    workload = replace(SMALL, lengths=lengths, turns=turns, engine=replace(SMALL.engine, prefill_steps_per_token=2.0))
    outcome = record_run(tmp_path / "run", workload, *overrides)
    run = measure_run(tmp_path / "run", 16)
    found, given = run.workload, workload
    assert (run.step_s, run.mean_lag) == (pytest.approx(outcome.step_s), pytest.approx(outcome.mean_lag))
    assert run.tokens_per_s == pytest.approx(outcome.tokens_per_s)
    assert found.training.per_token_s == pytest.approx(given.training.per_token_s, rel=0.02)
    assert found.training.per_step_s == pytest.approx(given.training.per_step_s, rel=0.02)
    # The batch is nearly always full, so the record says little about how the two parts share its time.
    full = [e.step_s + SMALL.engine.slots * e.step_per_request_s for e in (found.engine, given.engine)]
    assert full[0] == pytest.approx(full[1], rel=0.1)
    assert found.lengths.values.tolist() == lengths.values.tolist()
    again = simulate(found, *run.settings, "rollout.replay=false", edge=run.edge)
    assert again.step_s == pytest.approx(outcome.step_s, rel=0.05)
    assert again.mean_lag == pytest.approx(outcome.mean_lag, abs=0.2)


def test_a_resumed_run_is_measured_like_one_that_was_never_killed(tmp_path: Path) -> None:
    """Before the kill, another process began the same groups; one of them is retried in the process that resumed."""

    def measured() -> tuple[list[list[tuple[float, int]]], EngineSpeed]:
        found = measure_run(tmp_path / "run", 16).workload
        assert found.turns is not None
        return [[(round(wait_s, 6), n) for wait_s, n in response] for response in found.turns], found.engine

    record_run(tmp_path / "run", SMALL, *ASYNC)
    whole, engine = measured()
    path = tmp_path / "run" / EVENTS / "000001.jsonl"
    events = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    lost = [
        event | {"t": event["t"] - 1000.0}
        for event in events
        if event["kind"] in ("run", "admitted") or (event["kind"] in ("request", "finished") and event["group"] < 12)
    ]
    (begin,) = (event for event in events if event["kind"] == "run")
    begin["kind"] = "resume"
    path.write_bytes(b"".join(orjson.dumps(event) + b"\n" for event in [*lost, *events]))
    turns, same = measured()
    assert turns == whole and same.step_s == pytest.approx(engine.step_s)

    place = next(index for index, event in enumerate(events) if event["kind"] == "finished" and event["group"] == 5)
    events.insert(place, events[place] | {"kind": "retried", "attempt": 1, "reason": "", "place": ""})
    path.write_bytes(b"".join(orjson.dumps(event) + b"\n" for event in events))
    tokens = [sum(n for _, n in response) for response in measured()[0]]
    assert tokens[20:24] == tokens[16:20] != [sum(n for _, n in response) for response in whole[20:24]], "as before it"


def test_a_run_that_took_turns_is_simulated_in_turns(tmp_path: Path) -> None:
    workload = replace(SMALL, steps=8, engine=replace(SMALL.engine, sleep_s=2.0))
    outcome = record_run(tmp_path / "run", workload, "trainer.mode=sync", "trainer.placement.colocate_all=true")
    run = measure_run(tmp_path / "run", 8)
    assert run.switch_s == pytest.approx(4.0) and run.devices == 1
    again = simulate(run.workload, *run.settings, "rollout.replay=false", edge=run.edge)
    assert again.step_s == pytest.approx(outcome.step_s, rel=0.05)


def test_an_engine_has_as_many_devices_as_ranks(tmp_path: Path) -> None:
    engine = "generator.inference_engine"
    of_two = [f"{engine}.backend=vllm", f"{engine}.device=cuda", f"{engine}.tensor_parallel_size=2"]
    record_run(tmp_path / "run", replace(SMALL, steps=8), *ASYNC, *of_two)
    run = measure_run(tmp_path / "run", 8)
    assert (run.engine_devices, run.trainers, run.devices) == (2, 1, 3)


def test_a_run_that_cannot_be_measured_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run folder"):
        measure_run(tmp_path, 16)
    record_run(tmp_path / "run", SMALL, "trainer.mode=sync")
    (tmp_path / "run" / EVENTS / "000001.jsonl").write_text("")
    with pytest.raises(ConfigError, match="recorded no requests"):
        measure_run(tmp_path / "run", 16)
    rows = (tmp_path / "run" / METRICS).read_text().splitlines()
    (tmp_path / "run" / METRICS).write_text("\n".join(rows[:3]) + "\n")
    with pytest.raises(ConfigError, match="has 3 finished steps"):
        measure_run(tmp_path / "run", 16)


# Modes, splits, S and D ------------------------------------------------------------------------------------------------


def test_tokens_take_time_also_where_short_responses_took_the_longest() -> None:
    # In turns, on one engine: 2, 4 and 6 tokens in 3, 2 and 1 seconds
    rows = [(0.0, 3.0, 2), (10.0, 12.0, 4), (20.0, 21.0, 6)]
    segments = pandas.DataFrame([dict(zip(("t0", "t1", "tokens"), row, strict=True)) for row in rows])
    segments = segments.assign(engine=0, seam="")
    a, b, _, _ = _decode_speed(segments, 4, 1.0, 0.0, 30.0)
    assert a + b == pytest.approx(
        (2 * 3 + 4 * 2 + 6 * 1) / (2**2 + 4**2 + 6**2)
    )  # least squares of seconds over tokens


def test_larger_tokens_change_no_time() -> None:
    workload = replace(SMALL, lengths=constant(1, 320), steps=6)
    coarse, unit = coarsened(workload)
    assert (unit, coarse.lengths.mean) == (10.0, 32.0) and coarsened(SMALL) == (SMALL, 1.0)
    fine, rough = (simulate(each, "trainer.mode=sync") for each in (workload, coarse))
    assert rough.total_s == pytest.approx(fine.total_s)
    assert rough.trained_tokens_per_s * unit == pytest.approx(fine.trained_tokens_per_s)


def test_the_devices_are_split_where_both_sides_are_about_equally_fast_or_shared_in_turns() -> None:
    engine, training = EngineSpeed(slots=10, step_s=0.1), TrainingSpeed(per_token_s=1 / 300)  # 100 and 300 tokens/s
    scenario = Scenario(replace(SMALL, engine=engine, training=training), trainers=1, devices=8, switch_s=None)
    assert [(s.engines, s.trainers) for s in scenario.splits(Setup("sync"))] == [(5, 3), (6, 2), (7, 1)]
    shared = replace(scenario, switch_s=4.0)
    assert shared.splits(Setup("sync")) == [Setup("sync", engines=8, trainers=None)]
    assert len(shared.splits(Setup("fully_async"))) == 3
    # Engines of two devices each: 100 tokens/s with two of them.
    paired = replace(scenario, engine_devices=2)
    assert [(s.engines, s.trainers) for s in paired.splits(Setup("sync"))] == [(2, 4), (3, 2)]
    assert [command.split_of(s) for s in paired.splits(Setup("sync"))] == ["2 x 2 + 4", "3 x 2 + 2"]
    (turns,) = replace(paired, switch_s=4.0).splits(Setup("sync"))
    assert (turns.engines, turns.trainers) == (4, None) and command.split_of(turns) == "4 x 2 in turns"


def test_in_turns_all_devices_generate_and_all_train_and_the_change_takes_its_time() -> None:
    workload = replace(SMALL, lengths=constant(1, 20), engine=EngineSpeed(slots=8, step_s=1.0), steps=8)
    workload = replace(workload, training=TrainingSpeed(per_token_s=0.1))
    scenario = Scenario(workload, trainers=1, devices=2, switch_s=3.0)
    outcome = scenario.simulate(Setup("sync", engines=2, trainers=None))
    assert isinstance(outcome, Outcome)
    assert outcome.step_s == pytest.approx(20 + 16 * 20 * 0.1 / 2 + 3)
    assert outcome.engines_idle == pytest.approx(19 / 39)
    assert outcome.training_idle == pytest.approx(23 / 39)
    assert outcome.samples_per_s == pytest.approx(16 / 39)


class FixedOutcome(Outcome):
    def __init__(self, rate: float, lag: float) -> None:
        object.__setattr__(self, "rate", rate)
        object.__setattr__(self, "lag", lag)

    trained_tokens_per_s = property(lambda self: self.rate)  # type: ignore[assignment]
    mean_lag = property(lambda self: self.lag)  # type: ignore[assignment]


def test_the_freshest_of_the_fast_ones_that_keep_their_bound_is_recommended() -> None:
    results: dict[Setup, Any] = {
        Setup("sync"): FixedOutcome(50, 0),
        Setup("fully_async", bound=4): FixedOutcome(99, 2),
        Setup("fully_async", bound=8): FixedOutcome(100, 3),
        Setup("fully_async", policy="accept"): FixedOutcome(120, 1),
        Setup("one_step_off"): ConfigError("stopped"),
    }
    assert recommended(results) == Setup("fully_async", bound=4)
    assert recommended({Setup("sync"): ConfigError("stopped")}) is None


def test_only_modes_with_a_bound_are_described_with_it() -> None:
    assert command.described(Setup("fully_async", bound=8)) == "fully_async, mask, 1 + 1 devices, S = 8"
    assert command.described(Setup("one_step_off")) == "one_step_off, 1 + 1 devices"


# The command -----------------------------------------------------------------------------------------------------------

TINY = ["simulate", "--groups", "2", "--samples", "2", "--steps", "8", "--tail", "2", "--devices", "2"]


@pytest.fixture
def one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "BOUNDS", (2,))
    monkeypatch.setattr(command, "DEPTHS", (None,))


@pytest.mark.usefixtures("one_bound")
def test_the_command_compares_all_modes_and_policies_and_draws_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "pictures" / "modes.svg"
    assert main([*TINY, "--max-staleness-steps", "2", "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    names = [line.split("  ")[0] for line in printed.splitlines()]
    policies = ("mask", "accept", "wait", "drop", "mask, streaming")
    assert {"sync", "partial_rollout, mask", "one_step_off", *(f"fully_async, {each}" for each in policies)} <= {*names}
    assert "Best: " in printed and "trainer.mode=" in printed and "2 in turns" in printed
    assert picture.read_text().startswith("<?xml")


@pytest.mark.usefixtures("one_bound")
def test_the_command_takes_a_run_and_says_how_well_it_reproduces_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_run(tmp_path / "run", replace(SMALL, steps=8, samples=2), *ASYNC)
    assert main(["simulate", str(tmp_path / "run"), "--steps", "8", "--die-every", "20", "--restart-s", "2"]) == 0
    printed = capsys.readouterr().out
    assert "check     the run took " in printed and "faults    an engine dies every 20 s" in printed
    assert "4 prompts x 2 responses" in printed and "1 + 1" in printed and "in turns" not in printed


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--alone", "100", "--full", "50"], "do not fit together"),
        (["--slots", "4", "--alone", "100", "--full", "500"], "do not fit together"),
        (["--plot", "modes.xyz"], "one of"),
        (["--tail", "1000", "--groups", "2"], "no tail"),
        (["nowhere"], "not a run folder"),
        (["--steps", "3"], "--steps"),
        (["--train", "inf"], "finite"),
        (["--seed", "-1"], "--seed"),
    ],
)
def test_what_cannot_be_simulated_is_an_error_before_anything_runs(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *arguments]) == 2
    assert told in capsys.readouterr().err
