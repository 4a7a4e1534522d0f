"""One broadcast for all engines; one that dies, or comes late, is no other one's matter."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from skyrl_train.config.schema import BuildModelConfig
from skyrl_train.errors import EngineError
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.engines.embedded import EmbeddedEngine
from skyrl_train.inference.interface import InferenceEngineInput
from skyrl_train.inference.pool.fleet import FleetLimits
from skyrl_train.models.folder import load_model, load_tokenizer
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync import broadcast_receiver, process_group
from skyrl_train.weight_sync.broadcast_group import NCCL, BroadcastGroup
from skyrl_train.weight_sync.broadcast_receiver import BroadcastClient, BroadcastReceiver
from skyrl_train.weight_sync.process_group import GlooTransport
from skyrl_train.weight_sync.receiver import WeightReceiver
from skyrl_train.weight_sync.shared_area import machine
from skyrl_train.weight_sync.syncer import WeightSyncer, weights_of
from skyrl_train.weight_sync.update import WeightUpdate

pytestmark = pytest.mark.usefixtures("trainer_elsewhere")
CPU = torch.device("cpu")


def gloo(**options: object) -> GlooTransport:
    return GlooTransport(**{"address": "127.0.0.1", "verify": True, "timeout_s": 600.0, **options})


def members(transport: GlooTransport) -> int:
    """The workers of the group that the last version went to."""
    assert transport._server is not None and transport._server._kept is not None
    return sum(engine.receivers for engine in transport._server._kept[1])


@pytest.fixture
def staged() -> Iterator[tuple[GlooTransport, WeightUpdate]]:
    with closing(gloo(bucket_bytes=1000)) as transport:
        yield transport, transport.gather([("w", torch.arange(5000.0))], 0)


async def test_engines_in_other_processes_take_turns_with_death_and_late_arrival(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path / "model")
    build_model_folder(BuildModelConfig(), Path(folder), seed=0)
    model = load_model(folder, "float32", "cpu")
    engines = [EmbeddedEngine(folder, max_model_len=128) for _ in range(2)]
    client = InferenceEngineClient(engines, load_tokenizer(folder), folder, limits=FleetLimits(max_restarts=0))
    transport = gloo(bucket_bytes=10_000)
    syncer = WeightSyncer(client, transport, weights_of(model.named_parameters), PauseMode.KEEP)
    await client.start()
    await syncer.sync(0)
    assert members(transport) == 2
    monkeypatch.setattr(process_group, "JOIN_WAIT_S", 0.0)  # the dead one will not ask
    pid = engines[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    await syncer.sync(1)
    output = await client.generate(
        InferenceEngineInput(prompt_token_ids=[[5, 6, 7]], sampling_params={"max_tokens": 4, "ignore_eos": True})
    )
    assert output["response_versions"] == [[1] * 4]
    late = EmbeddedEngine(folder, max_model_len=128, executor="thread")
    await late.start()
    staged = await syncer.gather(2)
    await late.receive_weights(staged.update)
    await late.pause(PauseMode.KEEP)
    await late.load_weights(staged.update)
    assert members(transport) == 1
    assert await late.served_checksum() == staged.update.checksum
    syncer.close()
    await asyncio.gather(client.teardown(), late.teardown())


def test_the_bytes_arrive_with_any_bucket_size(staged: tuple[GlooTransport, WeightUpdate]) -> None:
    with closing(WeightReceiver(CPU)) as receiver:
        assert torch.equal(receiver.open_update(staged[1])["w"], torch.arange(5000.0))


def test_engines_on_the_trainers_machine_map_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "machine", machine)
    with closing(gloo()) as transport, closing(WeightReceiver(CPU)) as receiver:
        for version in range(3):
            update = transport.gather([("w", torch.full((5000,), float(version)))], version)
            weights = receiver.open_update(dataclasses.replace(update, receivers=1))["w"]
            assert weights[0] == version
        assert transport._server is not None and not transport._server._connections
        transport._areas.next().room(1).fill_(7)  # which the version before the last one was gathered into
        assert weights[0] == version
        transport._areas.next().room(1).fill_(0)
        assert torch.equal(weights, torch.zeros(5000)), "it is the same memory"


def test_one_group_serves_all_versions_while_nobody_leaves(staged: tuple[GlooTransport, WeightUpdate]) -> None:
    transport, update = staged
    groups = []
    with closing(WeightReceiver(CPU)) as one, closing(WeightReceiver(CPU)) as other, ThreadPoolExecutor(2) as threads:
        for version in range(3):
            if version:
                update = transport.gather([("w", torch.full((5000,), float(version)))], version)
            together = dataclasses.replace(update, receivers=2)
            for opened in threads.map(lambda receiver: receiver.open_update(together), (one, other)):  # noqa: B023
                assert opened["w"][-1] == (version or 4999.0)
            assert transport._server is not None and transport._server._kept is not None
            groups.append(transport._server._kept[0])
    assert groups[0] is groups[1] is groups[2] and members(transport) == 2


def test_a_worker_that_leaves_the_group_costs_the_others_one_more_broadcast(
    staged: tuple[GlooTransport, WeightUpdate],
) -> None:
    transport, update = staged
    together = dataclasses.replace(update, receivers=2)
    with closing(WeightReceiver(CPU)) as living, ThreadPoolExecutor(1) as thread:
        opened = thread.submit(living.open_update, together)
        dying, client = BroadcastReceiver(CPU), BroadcastClient()
        assignment = next(client.assignments(together, receivers=1))
        dying._join("gloo", json.loads(update.location), assignment, assignment["rank"])
        dying.close()
        client.close()
        assert torch.equal(opened.result()["w"], torch.arange(5000.0))
        assert members(transport) == 1
        following = transport.gather([("w", torch.ones(5000))], 1)
        assert living.open_update(following)["w"][0] == 1.0


def test_an_engine_is_told_at_once_that_it_has_the_bytes(staged: tuple[GlooTransport, WeightUpdate]) -> None:
    """A worker that hangs while it verifies a large model would otherwise hold up all engines beyond their time limit."""
    transport, update = staged
    together, location = dataclasses.replace(update, receivers=2), json.loads(update.location)
    with (
        closing(WeightReceiver(CPU)) as quick,
        closing(BroadcastReceiver(CPU)) as slow,
        closing(BroadcastClient()) as client,
        ThreadPoolExecutor(1) as thread,
    ):
        opened = thread.submit(quick.open_update, together)
        assignments = client.assignments(together, receivers=1)
        assignment = next(assignments)
        group = slow._join("gloo", location, assignment, assignment["rank"])
        group.broadcast(slow._room(update), location["bucket_bytes"])
        assert torch.equal(opened.result()["w"], torch.arange(5000.0))
        assert transport._server is not None and transport._server._kept is None, "the round has not ended"
        report = {"attempt": assignment["attempt"], "rank": assignment["rank"], "again": False}
        broadcast_receiver._report(location, report)
        assert next(assignments, None) is None
        assert members(transport) == 2


def test_a_round_that_ends_after_a_later_one_does_not_bring_its_group_back(
    staged: tuple[GlooTransport, WeightUpdate],
) -> None:
    transport, update = staged
    together, location = dataclasses.replace(update, receivers=2), json.loads(update.location)
    with (
        closing(WeightReceiver(CPU)) as quick,
        closing(BroadcastReceiver(CPU)) as slow,
        closing(BroadcastClient()) as client,
        ThreadPoolExecutor(1) as thread,
    ):
        opened = thread.submit(quick.open_update, together)
        assignments = client.assignments(together, receivers=1)
        assignment = next(assignments)
        group = slow._join("gloo", location, assignment, assignment["rank"])
        group.broadcast(slow._room(update), location["bucket_bytes"])
        opened.result()
        following = transport.gather([("w", torch.ones(5000))], 1)
        assert quick.open_update(following)["w"][0] == 1.0
        report = {"attempt": assignment["attempt"], "rank": assignment["rank"], "again": False}
        broadcast_receiver._report(location, report)
        assert next(assignments, None) is None
        assert members(transport) == 1


@pytest.mark.slow
def test_a_worker_that_hangs_is_left_out_in_time() -> None:
    with (
        closing(gloo(timeout_s=20.0)) as transport,
        closing(WeightReceiver(CPU)) as living,
        ThreadPoolExecutor(1) as thread,
    ):
        together = dataclasses.replace(transport.gather([("w", torch.arange(50.0))], 0), receivers=2)
        opened = thread.submit(living.open_update, together)
        client = BroadcastClient()
        assignments = client.assignments(together, receivers=1)
        next(assignments)  # which nobody follows
        assert torch.equal(opened.result()["w"], torch.arange(50.0))
        with pytest.raises(EngineError, match="did not report"):
            next(assignments)
        client.close()


def test_engines_that_do_not_come_in_time_are_not_waited_for(
    staged: tuple[GlooTransport, WeightUpdate], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "JOIN_WAIT_S", 0.0)
    together = dataclasses.replace(staged[1], receivers=3)
    with closing(WeightReceiver(CPU)) as one, closing(WeightReceiver(CPU)) as late:
        for receiver in (one, late):
            assert receiver.open_update(together)["w"][1] == 1.0
            assert members(staged[0]) == 1


def test_a_connection_that_cannot_be_taken_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, errors = socket.socket.accept, [OSError(errno.EMFILE, "too many open files")]

    def out_of_files_once(listening: socket.socket) -> tuple[socket.socket, object]:
        if errors:
            raise errors.pop()
        return accept(listening)

    monkeypatch.setattr(process_group, "ACCEPT_PAUSE_S", 0.0)
    monkeypatch.setattr(socket.socket, "accept", out_of_files_once)
    with closing(gloo()) as transport, closing(WeightReceiver(CPU)) as receiver:
        update = transport.gather([("w", torch.arange(50.0))], 0)
        assert torch.equal(receiver.open_update(update)["w"], torch.arange(50.0)) and not errors


def test_a_version_that_is_not_staged_any_more_is_refused_and_the_current_one_is_given(
    staged: tuple[GlooTransport, WeightUpdate],
) -> None:
    transport, first = staged
    with closing(WeightReceiver(CPU)) as receiver:
        for version in (1, 2):
            current = transport.gather([("w", torch.full((5000,), float(version)))], version)
        with pytest.raises(EngineError, match="not staged"):
            receiver.open_update(first)
        assert receiver.open_update(current)["w"][0] == 2.0


def test_a_client_without_the_token_gets_nothing(staged: tuple[GlooTransport, WeightUpdate]) -> None:
    location = json.loads(staged[1].location)
    for greeting in ({"token": "wrong"}, {"token": None}, {}):
        with socket.create_connection((location["host"], location["port"]), timeout=300) as stranger:
            stranger.sendall(json.dumps(greeting).encode() + b"\n")
            answer = stranger.makefile("rb").read()
            assert b"token" in answer and location["token"].encode() not in answer
    for line in (b"\xff no json\n", b"[1, 2]\n", b"7\n", b"[" * 60_000 + b"\n"):
        with socket.create_connection((location["host"], location["port"]), timeout=300) as stranger:
            stranger.sendall(line)
            assert stranger.makefile("rb").read() == b""
    with closing(WeightReceiver(CPU)) as receiver:
        assert receiver.open_update(staged[1])["w"][1] == 1.0, "others are served all the same"


def test_a_silent_stranger_holds_up_nobody(staged: tuple[GlooTransport, WeightUpdate]) -> None:
    location = json.loads(staged[1].location)
    with (
        socket.create_connection((location["host"], location["port"])),
        closing(WeightReceiver(CPU)) as receiver,
    ):
        assert receiver.open_update(staged[1])["w"][1] == 1.0


def test_no_conversation_outlives_the_transport(staged: tuple[GlooTransport, WeightUpdate]) -> None:
    """A process that ends while one of them takes its group apart is aborted, after a run that was fine."""
    transport, update = staged
    receivers = [WeightReceiver(CPU) for _ in range(2)]
    for receiver in receivers:
        receiver.open_update(update)
    assert sum(thread.name == "weight-server-listen" for thread in threading.enumerate()) >= 2
    for receiver in receivers:
        receiver.close()
    transport.close()
    assert not any(thread.name.startswith("weight-server") for thread in threading.enumerate())


def test_a_group_of_gpus_blocks_raises_and_ends_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As gloo's. Otherwise a lost engine would let NCCL's watchdog end the trainer, and engines would answer before the bytes
    are there."""
    variable = "TORCH_NCCL_BLOCKING_WAIT"
    made: list[tuple[str, timedelta, list[bool]]] = []

    class Nccl:
        Options = SimpleNamespace

        def __init__(self, store: dist.Store, rank: int, size: int, options: SimpleNamespace) -> None:
            here = [bool(store.check([f"here/{member}"])) for member in range(size)]
            made.append((os.environ[variable], options._timeout, here))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    for before in (None, "0"):
        if before is not None:
            monkeypatch.setenv(variable, before)
        store = dist.HashStore()
        store.set("group/here/1", "")
        device, timeout = torch.device("cpu"), timedelta(seconds=5)
        BroadcastGroup(NCCL, store, "group", 0, 2, "127.0.0.1", device, timeout.total_seconds())
        assert made.pop() == ("1", timeout, [True, True])
        assert os.environ.get(variable) == before
