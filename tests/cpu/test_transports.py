"""The contract of every transport: the same bits on the other side, the old weights until the load, nothing left behind."""

from __future__ import annotations

import fcntl
import functools
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from io import FileIO
from pathlib import Path

import pytest
import torch
from embedded_models import CONTEXT, EOS, empty_copy, tiny_model
from safetensors import safe_open
from transformers import PreTrainedModel

from skyrl_train.build.engines import build_transport
from skyrl_train.config.schema import RunConfig
from skyrl_train.config.validate import validate
from skyrl_train.errors import ConfigError, EngineError, WeightSyncError
from skyrl_train.inference.engines.embedded.core import EmbeddedEngineCore
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync import disk
from skyrl_train.weight_sync.delta import DeltaTransport
from skyrl_train.weight_sync.disk import DiskTransport, WeightFolder, write_weights
from skyrl_train.weight_sync.process_group import GlooTransport
from skyrl_train.weight_sync.receiver import WeightReceiver
from skyrl_train.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_train.weight_sync.update import WeightTransport, WeightUpdate

MakeTransport = Callable[..., WeightTransport]
CPU = torch.device("cpu")


@pytest.fixture(params=["shared_memory", "disk", "delta", "gloo"])
def make(request: pytest.FixtureRequest, tmp_path: Path, trainer_elsewhere: None) -> MakeTransport:
    """Makes transports of one kind, that check and cast to ``dtype``."""
    kinds: dict[str, MakeTransport] = {
        "shared_memory": SharedMemoryTransport,
        "disk": functools.partial(DiskTransport, str(tmp_path / "weights")),
        "delta": functools.partial(DeltaTransport, str(tmp_path / "weights")),
        "gloo": functools.partial(GlooTransport, bucket_bytes=5000, address="127.0.0.1", timeout_s=600),
    }
    return lambda dtype="float32", verify=True: kinds[request.param](dtype=dtype, verify=verify)


@pytest.fixture
def transport(make: MakeTransport) -> Iterator[WeightTransport]:
    with closing(make()) as transport:
        yield transport


def paused_core(model: PreTrainedModel) -> EmbeddedEngineCore:
    """An engine without weights, paused."""
    core = EmbeddedEngineCore(empty_copy(model), eos_ids=(EOS,), max_num_seqs=2, max_model_len=CONTEXT)
    core.pause(PauseMode.KEEP)
    return core


def load(core: EmbeddedEngineCore, update: WeightUpdate) -> None:
    core.receive(update)
    core.load(update)


def same_weights(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gathered_weights_are_served_bit_for_bit(make: MakeTransport, dtype: str) -> None:
    core = paused_core(tiny_model(dtype=getattr(torch, dtype)))
    with closing(make(dtype=dtype)) as transport, closing(core):
        for version in range(4):
            model = tiny_model(seed=version)
            update = transport.gather(model.named_parameters(), version)
            load(core, update)
            for own, given in zip(core.model.parameters(), model.parameters(), strict=True):
                assert torch.equal(own, given.to(getattr(torch, dtype)))
            assert core.served_checksum() == update.checksum


def test_an_update_that_was_received_changes_nothing_before_the_load(transport: WeightTransport) -> None:
    first, second = tiny_model(seed=0), tiny_model(seed=1)
    with closing(paused_core(first)) as core:
        load(core, transport.gather(first.named_parameters(), 0))
        update = transport.gather(second.named_parameters(), 1)
        core.receive(update)
        assert same_weights(core.model, first) and core.policy_version == 0
        core.load(update)
        assert same_weights(core.model, second)


def test_an_update_stays_valid_until_the_next_but_one_gather(transport: WeightTransport) -> None:
    models = [tiny_model(seed=seed) for seed in range(3)]
    with closing(paused_core(models[0])) as late:
        transport.gather(models[0].named_parameters(), 0)
        update = transport.gather(models[1].named_parameters(), 1)
        transport.gather(models[2].named_parameters(), 2)
        load(late, update)
        assert same_weights(late.model, models[1])


def test_an_engine_that_joins_late_or_missed_updates_gets_the_current_version(transport: WeightTransport) -> None:
    model = tiny_model()
    with closing(paused_core(model)) as early, closing(paused_core(model)) as late:
        for version in range(6):
            update = transport.gather(tiny_model(seed=version).named_parameters(), version)
            if version in (0, 1, 4):
                load(early, update)
        load(late, update)
        load(early, update)
        assert same_weights(late.model, tiny_model(seed=5)) and same_weights(early.model, tiny_model(seed=5))


def test_a_bad_update_is_refused_and_the_next_one_is_taken(transport: WeightTransport) -> None:
    model = tiny_model(seed=1)
    with closing(paused_core(model)) as core:
        load(core, transport.gather(model.named_parameters(), 0))
        with pytest.raises(EngineError, match="misses"):
            load(core, transport.gather(list(model.named_parameters())[:-1], 1))
        assert same_weights(core.model, model) and core.policy_version == 0
        load(core, transport.gather(tiny_model(seed=2).named_parameters(), 2))
        assert same_weights(core.model, tiny_model(seed=2))


def test_a_transport_can_be_sent_to_another_process_before_its_first_use(transport: WeightTransport) -> None:
    """Two copies, because a clone that named its files or ports like the original would be in its way."""
    clones: list[WeightTransport] = [pickle.loads(pickle.dumps(transport)) for _ in range(2)]
    with closing(paused_core(tiny_model())) as one, closing(paused_core(tiny_model())) as other:
        updates = [clone.gather(tiny_model(seed=n).named_parameters(), 0) for n, clone in enumerate(clones)]
        load(one, updates[0])
        load(other, updates[1])
        assert same_weights(one.model, tiny_model(seed=0)) and same_weights(other.model, tiny_model(seed=1))
    for clone in clones:
        clone.close()


def test_weights_are_let_go_one_by_one_while_they_are_gathered(transport: WeightTransport) -> None:
    """A sharded model is gathered weight by weight: as a whole it may fit nowhere."""
    alive = most = 0

    class Counted(torch.Tensor):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal alive, most
        for number in range(20):
            weight = torch.full((100,), float(number)).as_subclass(Counted)
            alive += 1
            most = max(most, alive)
            yield str(number), weight
            del weight

    with torch._C.DisableTorchFunctionSubclass():
        for version in range(2):
            transport.gather(weights(), version)
    assert alive == 0 and most <= 3


def test_after_close_nothing_is_left_and_nothing_is_gathered(make: MakeTransport, tmp_path: Path) -> None:
    transport = make()
    update = transport.gather(tiny_model().named_parameters(), 0)
    transport.close()
    transport.close()
    with closing(WeightReceiver(CPU)) as receiver, pytest.raises(EngineError, match="must still be open"):
        receiver.open_update(update)
    with pytest.raises(WeightSyncError, match="closed"):
        transport.gather(tiny_model().named_parameters(), 1)
    assert not list(tmp_path.rglob("skyrl*"))


# Disk -----------------------------------------------------------------------------------------------------------------


def test_a_file_is_plain_safetensors_and_only_two_are_kept(tmp_path: Path) -> None:
    with closing(DiskTransport(str(tmp_path), dtype="bfloat16")) as transport:
        for version in range(4):
            update = transport.gather([("a", torch.full((3, 5), float(version))), ("b", torch.ones(7))], version)
            with safe_open(update.location, "pt") as file:
                assert file.metadata() == {"version": str(version)}
                assert torch.equal(file.get_tensor("a"), torch.full((3, 5), float(version), dtype=torch.bfloat16))
                assert torch.equal(file.get_tensor("b"), torch.ones(7, dtype=torch.bfloat16))
        assert len(list(tmp_path.glob("skyrl*"))) == 2


@pytest.mark.parametrize("expected_offset", [0, 64, 4096])
def test_a_header_of_any_size_finds_its_place(tmp_path: Path, expected_offset: int) -> None:
    weights = {f"layer.{n}": torch.randn(n, 3) for n in range(20)}
    path = tmp_path / "w.safetensors"
    written = write_weights(path, weights.items(), "float32", metadata={}, expected_offset=expected_offset)
    assert written.data_offset >= expected_offset and written.data_offset % 64 == 0
    with safe_open(path, "pt") as file:
        assert all(torch.equal(file.get_tensor(name), weight) for name, weight in weights.items())
    assert [file.name for file in tmp_path.iterdir()] == ["w.safetensors"]


def test_bytes_that_changed_on_the_disk_are_found_by_the_checksum(tmp_path: Path) -> None:
    with closing(DiskTransport(str(tmp_path), verify=True)) as transport, closing(WeightReceiver(CPU)) as receiver:
        update = transport.gather([("w", torch.zeros(100))], 0)
        with Path(update.location).open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"x")
        with pytest.raises(EngineError, match="checksum"):
            receiver.open_update(update)


def test_weights_that_cannot_be_written_leave_no_file(tmp_path: Path) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.zeros(10)
        raise OSError(28, "No space left on device")

    with closing(DiskTransport(str(tmp_path))) as transport:
        with pytest.raises(WeightSyncError, match="weight_folder"):
            transport.gather(failing(), 0)
        assert not list(tmp_path.glob("*.safetensors*"))


@pytest.mark.parametrize("kind", [DiskTransport, DeltaTransport])
def test_files_of_a_killed_trainer_are_removed_and_nothing_else(
    tmp_path: Path, kind: type[DiskTransport | DeltaTransport]
) -> None:
    def gather(transport: DiskTransport | DeltaTransport) -> None:
        for version in (1, 2):
            transport.gather([("w", torch.full((100,), float(version)))], version)

    with closing(kind(str(tmp_path))) as alive:
        gather(alive)
        living = set(tmp_path.iterdir())
        child = os.fork()
        if child == 0:
            gather(kind(str(tmp_path)))
            (tmp_path / ".skyrl-weights-half.tmp").touch()  # nobody's
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        assert len(set(tmp_path.iterdir()) - living) >= 3
        with closing(kind(str(tmp_path))) as following:
            gather(following)
        assert set(tmp_path.iterdir()) - living == {tmp_path / ".skyrl-weights-half.tmp"}


def claimed(path: Path) -> WeightFolder:
    folder = WeightFolder(str(path))
    folder.claim()
    return folder


def in_a_child_that_is_killed(do: Callable[[], object]) -> None:
    child = os.fork()
    if child == 0:
        disk._labels_of_this_process.clear()  # a process of its own has no claims yet
        do()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_trainer_that_starts_at_the_same_time_is_not_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.lockf

    def late(file: FileIO, kind: int) -> None:
        monkeypatch.undo()
        in_a_child_that_is_killed(lambda: claimed(tmp_path))
        lock(file, kind)

    monkeypatch.setattr(fcntl, "lockf", late)
    folder = claimed(tmp_path)
    folder.path("1").touch()
    in_a_child_that_is_killed(lambda: claimed(tmp_path))
    assert folder.path("1").exists() and len(list(tmp_path.glob(f".*{folder.label}*"))) == 1
    folder.close()


def test_locks_of_another_machine_say_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_machine", lambda: b"another")
    in_a_child_that_is_killed(lambda: claimed(tmp_path).path("1").touch())
    monkeypatch.undo()
    claimed(tmp_path).close()
    assert len(list(tmp_path.glob("*-1.safetensors"))) == 1


# The choice -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"weight_transport": "disk"}, "weight_folder=/path"),
        ({"weight_transport": "cuda_ipc"}, "shared_memory"),
        ({"weight_transport": "dsk"}, "disk"),
    ],
)
def test_a_transport_that_cannot_work_is_refused_with_the_remedy(settings: dict[str, str], remedy: str) -> None:
    config = RunConfig()
    for key, value in settings.items():
        setattr(config.generator, key, value)
    found = validate(config, {"generator.weight_transport": ["disk", "shared_memory"]}).errors
    assert any(remedy in problem for problem in found), found


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"weight_transport": "shared_memory", "weight_folder": "/w"}, "Leave the folder out"),
    ],
)
def test_a_folder_that_the_transport_does_not_use_is_a_warning(settings: dict[str, str], remedy: str) -> None:
    config = RunConfig()
    for key, value in settings.items():
        setattr(config.generator, key, value)
    found = validate(config, {"generator.weight_transport": ["disk", "shared_memory"]})
    assert found.errors == [] and any(remedy in warning for warning in found.warnings), found


def test_a_named_folder_is_used_and_ones_own_transport_is_found_by_its_path(tmp_path: Path) -> None:
    config = RunConfig()
    assert isinstance(build_transport(config), SharedMemoryTransport)
    config.generator.weight_folder = str(tmp_path)
    config.generator.weight_transport_kwargs = {"sync": True}
    assert isinstance(build_transport(config), DiskTransport)
    config.generator.weight_transport = "skyrl_train.weight_sync.shared_memory:SharedMemoryTransport"
    with pytest.raises(ConfigError, match="weight_transport_kwargs"):
        build_transport(config)
    config.generator.weight_transport_kwargs = {}
    assert isinstance(build_transport(config), SharedMemoryTransport)


@pytest.mark.parametrize(("staged_on", "engine_on", "mapped"), [("a", "a", True), ("a", "b", False), ("", "", False)])
def test_engines_that_do_not_know_their_machine_receive_a_broadcast(
    staged_on: str, engine_on: str, mapped: bool
) -> None:
    assert WeightUpdate(0, "nccl", "", 0, (), machine=staged_on).is_mapped_on(engine_on) is mapped
