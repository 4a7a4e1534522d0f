"""Learning in virtual time: runs are functions of their seeds; tokens, log-probs and versions are real."""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from skyrl_train.config.compose import compose
from skyrl_train.config.plan import resolve
from skyrl_train.errors import EngineError
from skyrl_train.inference.interface import InferenceEngineInput
from skyrl_train.models.folder import load_model
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.simulation.clock import VirtualTimeLoop, run_in_virtual_time
from skyrl_train.simulation.engine import EngineSpeed
from skyrl_train.simulation.learning import LearningOutcome, LearningTask, TimedBackend, TimedEngine, learn
from skyrl_train.simulation.lengths import log_normal
from skyrl_train.simulation.training import TrainingSpeed
from skyrl_train.training.backend import Minibatch, TrainingSequence
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_train.weight_sync.update import WeightTransport, WeightUpdate

STEPS, SLOTS = 6, 4
SMALL = (
    "trainer.policy_mini_batch_size=2",
    "generator.n_samples_per_prompt=2",
    f"trainer.max_steps={STEPS}",
    "trainer.policy.model.build.num_layers=1",
    "trainer.policy.model.build.hidden_size=32",
    "trainer.policy.optimizer_config.lr=2e-2",
    "data.generate=64",
)
SPEED = EngineSpeed(SLOTS, step_s=1.0, transfer_s=0.5, load_s=0.25)
TASK = LearningTask("quickstart", SMALL, SPEED, TrainingSpeed(per_token_s=0.05))
TURNS = replace(TASK, recipe="guess_number", tools_s=log_normal(64, 20, 4, seed=0))


@functools.cache
def trained(policy: str) -> LearningOutcome:
    return learn(TURNS, *asynchrony(policy, 1))


def asynchrony(policy: str, bound: int) -> tuple[str, ...]:
    settings = {"staleness_policy": policy, "max_staleness_steps": bound, "generate_ahead_steps": bound}
    return tuple(f"trainer.fully_async.{name}={value}" for name, value in settings.items())


# Whole runs -------------------------------------------------------------------------------------------------------


def story(outcome: LearningOutcome) -> list[tuple[float, tuple[int, ...], float]]:
    return [(record.ended_s, record.lags, record.metrics["loss/policy"]) for record in outcome.records]


def test_a_run_is_a_function_of_its_seed() -> None:
    again, other = (learn(TURNS, *asynchrony("accept", 1), f"trainer.seed={seed}") for seed in (0, 1))
    assert story(again) == story(trained("accept"))
    assert story(other) != story(again)


def test_a_workload_that_is_late_exceeds_the_bound_under_accept_and_under_no_other_policy() -> None:
    runs = {policy: trained(policy) for policy in ("accept", "wait", "mask", "drop")}
    assert runs["accept"].max_trained_lag > 1
    assert runs["accept"].share_over(1) > 0
    assert [runs[policy].max_trained_lag <= 1 for policy in ("wait", "mask", "drop")] == [True] * 3
    assert runs["mask"].masked_share > 0
    assert runs["drop"].dropped_share > 0
    assert runs["wait"].share_over(1) == runs["wait"].masked_share == runs["wait"].dropped_share == 0
    assert runs["wait"].total_s > runs["accept"].total_s


def test_the_reward_of_the_last_steps_is_the_mean_over_their_groups() -> None:
    outcome = trained("accept")
    assert outcome.last_reward(0.25) == pytest.approx(sum(outcome.rewards[-2:]) / 2)
    assert outcome.last_reward(0.01) == outcome.rewards[-1]


def test_every_token_has_the_version_and_the_log_prob_of_the_weights_that_sampled_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    published: dict[int, dict[str, torch.Tensor]] = {}
    sequences: list[TrainingSequence] = []
    models: list[PreTrainedModel] = []
    stage, update = TimedBackend.stage, TimedBackend.update

    def remember_weights(self: TimedBackend, transport: WeightTransport, version: int) -> WeightUpdate:
        published[version] = {name: weight.clone() for name, weight in self.named_weights()}
        if not models:
            models.append(copy.deepcopy(self.model))
        return stage(self, transport, version)

    def remember_sequences(self: TimedBackend, minibatch: Minibatch) -> dict[str, float]:
        sequences.extend(minibatch.sequences)
        return update(self, minibatch)

    monkeypatch.setattr(TimedBackend, "stage", remember_weights)
    monkeypatch.setattr(TimedBackend, "update", remember_sequences)
    # Under "keep", what was cached before a swap would be of older weights than the log-prob's version.
    learn(TASK, *asynchrony("accept", 2), "generator.pause_mode=recompute")

    assert any(len(set(s.versions[s.versions >= 0].tolist())) > 1 for s in sequences), "no swap was in flight"
    assert len({v for s in sequences for v in s.versions.tolist()}) > STEPS // 2
    for version, weights in published.items():
        with torch.no_grad():
            for name, parameter in models[0].named_parameters():
                parameter.copy_(weights[name])
            for sequence in sequences:
                own = sequence.versions == version
                if own.any():
                    logits = models[0](sequence.token_ids[None]).logits[0, :-1]
                    expected = logits.log_softmax(-1).gather(-1, sequence.token_ids[1:, None])[:, 0]
                    torch.testing.assert_close(
                        sequence.behaviour_logprobs[1:][own[1:]], expected[own[1:]], atol=1e-5, rtol=0
                    )


# The engine -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learning") / "model"
    build_model_folder(compose("quickstart", list(SMALL)).trainer.policy.model.build, folder, 0)
    return folder


def engine_of(model_path: Path, speed: EngineSpeed = SPEED) -> TimedEngine:
    config = compose("quickstart", [*SMALL, f"generator.inference_engine.max_num_seqs={SLOTS}"])
    return TimedEngine(config, resolve(config, 64), str(model_path), speed)


def request(tokens: int) -> InferenceEngineInput:
    return InferenceEngineInput(prompt_token_ids=[[4, 5]], sampling_params={"max_tokens": tokens, "ignore_eos": True})


async def load(engine: TimedEngine, transport: SharedMemoryTransport, model_path: Path, version: int) -> None:
    weights = load_model(str(model_path), "float32", "cpu").named_parameters()
    update = transport.gather([(name, weight.detach()) for name, weight in weights], version)
    await engine.receive_weights(update)
    await engine.pause(PauseMode.KEEP)
    await engine.load_weights(update)
    await engine.resume()


def test_updates_and_decode_steps_take_their_seconds_and_a_pause_waits_for_the_step_that_runs(model_path: Path) -> None:
    speed = replace(SPEED, step_per_request_s=0.5)

    async def main(loop: VirtualTimeLoop) -> tuple[list[float], list[list[int]]]:
        engine, transport, times = engine_of(model_path, speed), SharedMemoryTransport(), [0.0]

        def lap() -> None:
            times.append(loop.time())

        await engine.start()
        await load(engine, transport, model_path, version=0)
        lap()
        await engine.generate(request(4))  # a prefill's token comes with the first step
        lap()
        pair = [asyncio.create_task(engine.generate(request(4))) for _ in range(2)]
        await asyncio.sleep(0.5)
        await load(engine, transport, model_path, version=1)
        lap()
        outputs = [output["response_versions"][0] for output in await asyncio.gather(*pair)]
        lap()
        await engine.teardown()
        transport.close()
        return [after - before for before, after in itertools.pairwise(times)], outputs

    laps, versions = run_in_virtual_time(main)
    assert laps[0] == pytest.approx(0.5 + 0.25)
    assert laps[1] == pytest.approx(3 * 1.5)
    # The transfer is answered between the first step and the second, for the end of which the pause waits.
    assert laps[2] == pytest.approx(2 * 2.0 + 0.25)
    assert laps[3] == pytest.approx(2.0)
    assert versions == [[0, 0, 0, 1]] * 2


def test_times_that_are_not_modelled_are_refused(model_path: Path) -> None:
    for speed in (
        replace(SPEED, slots=SLOTS + 1),
        replace(SPEED, prefill_steps_per_token=0.1),
        replace(SPEED, sleep_s=1.0),
    ):
        with pytest.raises(EngineError, match="max_num_seqs"):
            engine_of(model_path, speed)
