"""Proximal log-probs from a replica of the policy, which has its own resources and receives the weight syncs."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from stage_worlds import RECORD, decode, group
from training_worlds import backend, weights

from skyrl_train import train
from skyrl_train.build.rollout import build_stages
from skyrl_train.config.compose import compose
from skyrl_train.config.schema import LoraConfig
from skyrl_train.config.validate import validate
from skyrl_train.errors import EngineError, StageError
from skyrl_train.rollout.stages.logprobs import ReplicaStage, backend_stages
from skyrl_train.training.reference import PolicyReplica, TokensToScore
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_train.weight_sync.syncer import WeightSyncer
from skyrl_train.weight_sync.update import WeightUpdate

TOKENS = [TokensToScore([3, 4], [5, 6, 7], [1, 0, 1]), TokensToScore([5], [6], [1])]
OPTIONS = {"dtype": "float32", "device": "cpu", "temperature": 1.0, "micro_batch_tokens": 64}
ARRIVAL = "trainer.algorithm.proximal_policy=arrival"
REPLICA = "rollout.stages.proximal.executor"


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["a whole model", "an adapter"])
def test_it_scores_as_the_policy_whose_weights_it_has_received(folder: str, lora: LoraConfig | None) -> None:
    policy = backend(folder, **({} if lora is None else {"policy__model__lora": lora}))
    with torch.no_grad():
        for _, weight in policy.named_weights():
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))
    transport, replica = SharedMemoryTransport(verify=True), PolicyReplica(folder, lora=lora, **OPTIONS)
    assert replica(policy.stage(transport, 4)) == 4
    expected = policy.forward_logprobs([tokens.training_sequence() for tokens in TOKENS])
    scores = replica(TOKENS)
    for tokens, row, exact in zip(TOKENS, scores, expected, strict=True):
        mask = torch.tensor(tokens.loss_mask)
        # Other tokens are scored with them, so sums have another order.
        assert row == pytest.approx((exact[len(tokens.prompt_token_ids) :] * mask).tolist(), abs=1e-5)
    replica.close()
    transport.close()


def test_it_scores_nothing_without_a_weight_sync_and_keeps_its_weights_where_one_does_not_fit(folder: str) -> None:
    policy, transport, replica = backend(folder), SharedMemoryTransport(verify=True), PolicyReplica(folder, **OPTIONS)
    with pytest.raises(EngineError, match="no weights"):
        replica(TOKENS)
    replica(policy.stage(transport, 0))
    scores = replica(TOKENS)
    partial = list(weights(policy).items())[1:]
    with pytest.raises(EngineError, match="misses 1 weights"):
        replica(transport.gather([(name, weight + 1) for name, weight in partial], 1))
    assert replica(TOKENS) == scores
    replica.close()
    transport.close()


class Engines:
    """Engines that serve whatever they are sent, at once."""

    serving = True

    async def wait_for_engine(self) -> None:
        return

    async def receive_weights(self, update: WeightUpdate) -> None:
        return

    async def load_weights(self, update: WeightUpdate, mode: PauseMode) -> float:
        return 0.0


async def test_engines_do_not_wait_for_the_replica_but_its_staging_copy_does(folder: str) -> None:
    policy, free, loaded = backend(folder), asyncio.Event(), list[int]()

    async def load(update: WeightUpdate) -> None:
        await free.wait()
        loaded.append(update.version)

    syncer = WeightSyncer(Engines(), SharedMemoryTransport(), policy.stage, PauseMode.KEEP, replica=load)
    await syncer.sync(0)
    gathering = asyncio.ensure_future(syncer.gather(1))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not loaded and not gathering.done()
    free.set()
    await syncer.send(await gathering)
    await syncer.gather(2)
    assert loaded == [0, 1]
    await syncer.stop()
    syncer.close()


async def test_a_version_that_the_replica_cannot_load_is_an_error_of_the_next_sync(folder: str) -> None:
    async def load(update: WeightUpdate) -> None:
        raise StageError("no memory")

    syncer = WeightSyncer(Engines(), SharedMemoryTransport(), backend(folder).stage, PauseMode.KEEP, replica=load)
    await syncer.sync(0)
    with pytest.raises(StageError, match="no memory"):
        await syncer.sync(1)
    await syncer.stop()
    syncer.close()


async def test_groups_get_their_proximal_log_probs_in_another_process(folder: str) -> None:
    config = compose("quickstart", [ARRIVAL, f"{REPLICA}=process"])
    (stage,) = build_stages(config, folder, decode, lambda group_index, reason: None)
    assert isinstance(stage, ReplicaStage)

    async def unused(sequences: Any) -> list[torch.Tensor]:
        raise AssertionError("the trainer computes no log-probs")

    assert backend_stages(config, unused, unused) == []
    policy, transport = backend(folder), SharedMemoryTransport()
    await stage.start()
    try:
        with pytest.raises(StageError, match="no weights"):
            await stage.run(group(), RECORD)
        await stage.load(policy.stage(transport, 0))
        scored = await stage.run(group(), RECORD)
        broken = dataclasses.replace(policy.stage(transport, 1), location="/nowhere")
        with pytest.raises(StageError, match="cannot load version 1"):
            await stage.load(broken)
        assert (await stage.run(group(), RECORD)).samples == scored.samples, "the old weights stay"
    finally:
        await stage.aclose()
        transport.close()
    for sample in scored.samples:
        for sequence in sample.sequences:
            tokens = TokensToScore(sequence.prompt_token_ids, sequence.response_ids, sequence.loss_mask)
            (exact,) = policy.forward_logprobs([tokens.training_sequence()])
            exact = exact[len(sequence.prompt_token_ids) :] * torch.tensor(sequence.loss_mask)
            assert sequence.proximal_logprobs == pytest.approx(exact.tolist(), abs=1e-5)  # likewise


@pytest.mark.parametrize("executor", [pytest.param("thread", marks=pytest.mark.slow), "process"])
def test_a_run_trains_with_a_replica(tmp_path: Path, executor: str) -> None:
    overrides = {
        "trainer.algorithm.proximal_policy": "arrival",
        "rollout.stages.proximal.executor": executor,
        "trainer.max_steps": 4,
        "trainer.runs_dir": str(tmp_path),
        "trainer.executor": "thread",
        "generator.inference_engine.executor": "thread",
        "generator.verify_weights": True,
    }
    run = train("quickstart", overrides=overrides, quiet=True)
    assert run.finished and run.metrics["stages/proximal/groups"].sum() >= 4 * 16
    events = run.events
    ready = {event["group"]: event["reward"] for event in events if event["kind"] == "buffered"}
    assert ready and None not in ready.values(), "its stages have ended"
    generated = [event for event in events if event["kind"] == "finished"]
    assert all(event["stages"] == 1 and event["reward"] is None for event in generated)


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ([f"{REPLICA}=ray", "generator.weight_transport=shared_memory"], "weight_transport=gloo"),
        ([f"{REPLICA}=process", "generator.weight_transport=cuda_ipc"], "weight_transport=gloo"),
        ([f"{REPLICA}=ray", "rollout.stages.proximal.device=cuda:1"], "device=cuda or cpu"),
        ([f"{REPLICA}=process", "trainer.device=cuda", "trainer.strategy=fsdp2"], "executor=ray"),
    ],
)
def test_what_a_replica_cannot_do_is_refused_with_the_remedy(settings: list[str], remedy: str) -> None:
    errors = validate(compose("quickstart", [ARRIVAL, *settings])).errors
    assert any("rollout.stages.proximal" in error and remedy in error for error in errors), errors
