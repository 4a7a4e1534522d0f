"""What runs on a GPU that is there on paper only; each function is called in a :class:`PaperProcess`."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from critic_worlds import critic, valued_minibatch
from embedded_models import EOS, tiny_model
from paper_cuda import RECORD, REGISTERED, PaperTensor, paper_cuda
from torch.nn.functional import scaled_dot_product_attention
from training_worlds import backend, config, minibatch
from transformers.integrations.sdpa_attention import repeat_kv

from skyrl_train.config.schema import LoraConfig
from skyrl_train.inference.engines.embedded.core import EmbeddedEngineCore
from skyrl_train.inference.interface import SamplingParams
from skyrl_train.training import attention, policy_worker, scorer
from skyrl_train.training.distributed.worker import Rendezvous, TrainingWorker
from skyrl_train.training.local_backend import LocalBackend, LocalCritic
from skyrl_train.training.messages import ModelSettings, PackedSequences, Role
from skyrl_train.training.reference import FrozenPolicy, TokensToScore
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.shared_memory import SharedMemoryReceiver, SharedMemoryTransport
from skyrl_train.weight_sync.staging import DeviceStaging, pack
from skyrl_train.workers.messages import Result


def figures() -> dict[str, Any]:
    """Return what was counted since the last call: kernel launches, waits of the host for the GPU, copies to the GPU, and
    who gave free memory back."""
    counted = {
        "launches": sum(RECORD.launches.values()),
        "waits": dict(RECORD.waits),
        "uploads": sum(RECORD.uploads.values()),
        "emptied": dict(RECORD.emptied),
    }
    RECORD.clear()
    return counted


def policy(folder: str, device: str, changes: dict[str, Any]) -> LocalBackend:
    lora = {"policy__model__lora": LoraConfig(rank=2)} if changes.get("lora") else {}
    return backend(folder, device=device, **lora, **{key: value for key, value in changes.items() if key != "lora"})


@contextlib.contextmanager
def flash_attention_on_paper() -> Iterator[None]:
    """Takes packed rows to ``varlen_attn`` where a GPU would, and computes what it does there, segment by segment."""

    def serves(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> bool:
        return query.is_cuda and query.dtype.itemsize == 2 and not dropout and query.shape[-1] % 8 == 0

    def varlen_attn(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, of_keys: torch.Tensor,
        longest: int, longest_key: int, *, scale: float | None, window_size: tuple[int, int],
    ) -> torch.Tensor:  # fmt: skip
        assert all(isinstance(each, PaperTensor) for each in (query, key, value, starts, of_keys))
        assert starts.dtype == torch.int32 and longest == longest_key and window_size == (-1, 0)
        bounds = starts.elem.tolist()  # the kernel reads them; the host does not
        parts = []
        for start, end in itertools.pairwise(bounds):
            assert end - start <= longest
            states = [each[start:end].transpose(0, 1)[None] for each in (query, key, value)]
            groups = states[0].shape[1] // states[1].shape[1]
            states[1:] = [repeat_kv(each, groups) for each in states[1:]]
            parts.append(scaled_dot_product_attention(*states, is_causal=True, scale=scale)[0].transpose(0, 1))
        return torch.cat(parts)

    with (
        mock.patch.object(attention, "varlen_serves", serves),
        mock.patch.object(attention, "_varlen_attn", varlen_attn),
    ):
        yield


def train(
    folder: str, device: str, changes: dict[str, Any], of_critic: bool = False, flash: bool = False
) -> dict[str, Any]:
    """Score and update a policy, or a critic."""
    batch = valued_minibatch() if of_critic else minibatch()
    if changes.get("algorithm__kl_loss_coef"):
        added = [replace(s, reference_logprobs=s.behaviour_logprobs + 0.1 * s.loss_mask) for s in batch.sequences]
        batch = replace(batch, sequences=added)
    with paper_cuda(), flash_attention_on_paper() if flash else contextlib.nullcontext():
        trained: LocalCritic | LocalBackend
        trained = critic(folder, device=device, **changes) if of_critic else policy(folder, device, changes)
        RECORD.clear()
        if isinstance(trained, LocalCritic):
            scores = trained.forward_values(batch.sequences)
        else:
            scores = trained.forward_logprobs(batch.sequences)
        scoring = figures()
        metrics = trained.update(batch)
        return {
            "scores": torch.cat(scores).tolist(),
            "metrics": metrics,
            "scoring": scoring,
            "update": figures(),
            "devices": sorted({weight.device.type for weight in trained.model.parameters()}),
        }


ON_CPU = torch.device("cpu")
FAULTS: dict[str, Callable[[], Any]] = {
    "segments stay on the CPU": lambda: mock.patch.object(attention.Segments, "to", lambda self, _: self),
    "the loss's inputs stay on the CPU": lambda: mock.patch.object(
        policy_worker, "compute_device", return_value=ON_CPU
    ),
    "the model's inputs stay on the CPU": lambda: mock.patch.object(scorer, "compute_device", return_value=ON_CPU),
}


def fault(folder: str, name: str) -> str:
    """Return the error of an update with a fault."""
    with FAULTS[name]():
        try:
            train(folder, "cuda", {})
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing was noticed"


def state(folder: str, parent: str, dtype: str) -> dict[str, Any]:
    """Stage, snapshot, save, load, take turns with an engine."""
    with paper_cuda():
        trained = policy(folder, "cuda", {"policy__dtype": dtype})
        trained.update(minibatch())
        transport, counted = SharedMemoryTransport(dtype), {}
        for version in range(3):  # the first two find the size, and register the two areas
            RECORD.clear()
            update = trained.stage(transport, version)
        counted["stage"] = figures()
        received = {name: weight.clone() for name, weight in SharedMemoryReceiver().open_update(update).items()}
        transport.close()
        own = {name: weight.cpu() for name, weight in trained.named_weights()}
        area = DeviceStaging(torch.device("cuda"))
        for _ in range(2):
            RECORD.clear()
            specs, staged = pack(trained.named_weights(), dtype, area)
        counted["stage on the device"] = figures()
        registered = set(REGISTERED)
        snapshot = trained.snapshot()
        trained.save(snapshot, Path(parent))
        kept = set(REGISTERED) - registered
        locked = dict(RECORD.locked)
        counted["snapshot"] = figures()
        trained.save(trained.snapshot(), Path(parent))
        locked_again = sum(RECORD.locked.values())
        on_gpu = [*trained.model.parameters(), *trained.optimizer.tensors()]
        before = trained.update(minibatch(1, step=2))
        trained.load(Path(parent))
        RECORD.clear()
        trained.offload_states()
        outside = {weight.device.type for weight in trained.model.parameters()}
        trained.reload_states()
        counted["turn"] = figures()
        again = trained.update(minibatch(1, step=2))
        trained.close()
        return {
            "counted": counted,
            "weights": received.keys() == own.keys() and all(torch.equal(received[name], own[name]) for name in own),
            "staged": (len(specs), staged.device.type),
            "outside": outside,
            "locked": (locked, locked_again),
            "state_bytes": sum(tensor.nbytes for tensor in {id(each): each for each in on_gpu}.values()),
            "again": again == before,
            "registered": (bool(kept), bool(kept & set(REGISTERED))),
        }


def reference(folder: str, device: str) -> list[list[float]]:
    """Score with a frozen policy."""
    tokens = [TokensToScore([3, 4], [5, 6, 7], [1, 0, 1]), TokensToScore([5], [6], [1])]
    with paper_cuda():
        return FrozenPolicy(folder, dtype="float32", device=device, temperature=0.8, micro_batch_tokens=64)(tokens)


def generate(device: str) -> dict[str, Any]:
    """Sample greedily with the embedded engine, with a weight sync under running requests."""
    with paper_cuda():
        model = copy.deepcopy(tiny_model()).to(device)
        core = EmbeddedEngineCore(model, eos_ids={EOS}, max_num_seqs=4, max_model_len=64)
        transport = SharedMemoryTransport("float32", verify=True)
        for version in range(2):
            update = transport.gather(tiny_model(seed=version).named_parameters(), version)
            core.receive(update)
            core.pause(PauseMode.KEEP)
            core.load(update)
            core.resume()
            if version == 0:
                for number in range(3):
                    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
                    core.add(number, [2 + number, 5, 7], params)
                core.step()
        RECORD.clear()
        core.step()
        counted, answers = figures(), []
        while core.runnable:
            answers += core.step()
        transport.close()
        core.close()
        results = {answer.id: answer.value for answer in answers if isinstance(answer, Result)}
        return {
            "tokens": [list(results[number].token_ids) for number in range(3)],
            "versions": [list(results[number].versions) for number in range(3)],
            "step": counted,
            "devices": sorted({weight.device.type for weight in model.parameters()}),
        }


# ---- a rank of several

_worker = TrainingWorker()


def host_store(num_ranks: int) -> Rendezvous:
    """Become the rank that serves the store."""
    return _worker.host_store("127.0.0.1", num_ranks)


def rank(
    number: int, num_ranks: int, meeting: Rendezvous, folder: str, parent: str, changes: dict[str, Any]
) -> dict[str, Any]:
    """Train a sharded policy on this rank's part of the minibatch; stage, save and load it, and take turns with an engine."""
    trainer = config(device="cuda", fsdp__num_workers=num_ranks, **changes)
    init, batch = dist.init_process_group, minibatch()

    def init_with_gloo(_: str, **how: Any) -> None:
        init("cpu:gloo,cuda:gloo", **how)

    def mine(step: int) -> PackedSequences:
        shared = trainer.fsdp.sequence_parallel_size  # so many neighbours have the same sequences
        return PackedSequences.of(minibatch(step - 1, step).sequences[number // shared :: num_ranks // shared])

    precision = torch.get_float32_matmul_precision()
    torch.backends.cuda.enable_cudnn_sdp(True)  # as in a new process
    with paper_cuda(), mock.patch.object(dist, "init_process_group", init_with_gloo):
        _worker.join(number, num_ranks, meeting, trainer, "trainer.fsdp")
        _worker.hold(Role.policy, ModelSettings(folder, trainer, 10, 1.0, 0))
        RECORD.clear()
        scores = _worker.score(Role.policy, mine(1))
        counted = {"scoring": figures()}
        metrics = _worker.update(Role.policy, mine(1), batch)
        counted["update"] = figures()
        chosen = torch.backends.cuda.cudnn_sdp_enabled(), torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        transport = SharedMemoryTransport(trainer.policy.dtype)
        for version in range(3):
            RECORD.clear()
            update = _worker.stage(0, transport, version)
        counted["stage"] = figures()
        snapshot = _worker.snapshot(Role.policy)
        _worker.save(Role.policy, snapshot, Path(parent))
        after = _worker.update(Role.policy, mine(2), minibatch(1, 2))
        _worker.load(Role.policy, Path(parent))
        again = _worker.update(Role.policy, mine(2), minibatch(1, 2))
        before = [row.tolist() for row in _worker.score(Role.policy, mine(1))]
        RECORD.clear()
        _worker.offload_states()
        counted["offload"] = figures()
        _worker.reload_states()
        turned = [row.tolist() for row in _worker.score(Role.policy, mine(1))] == before
        _worker.leave()
        return {
            "scores": [row.tolist() for row in scores],
            "metrics": metrics,
            "counted": counted,
            "staged": None if update is None else update.num_bytes,
            "again": after == again,
            "turned": turned,
            "cuDNN, float32": chosen,
        }
