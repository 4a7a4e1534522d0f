"""Training on GPUs beyond one plain backend: a rank that talks through NCCL, packed rows, compilation, and how fast it all is."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, Qwen3Config

from skyrl_train.config import derive
from skyrl_train.config.schema import BuildModelConfig, TrainerConfig, TrainingStrategy
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.training.backend import Minibatch, TrainingSequence
from skyrl_train.training.distributed.worker import TrainingWorker
from skyrl_train.training.local_backend import LocalBackend, LocalCritic
from skyrl_train.training.messages import ModelSettings, PackedSequences, Role

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

VOCABULARY = 13
# Dense bfloat16 operations per second that the makers state.
PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "small"
    build_model_folder(BuildModelConfig(), path, seed=0)
    return str(path)


def settings(dtype: str = "float32", **fsdp: object) -> TrainerConfig:
    config = TrainerConfig(device="cuda", strategy=TrainingStrategy.fsdp2)
    config.policy.dtype = dtype
    config.policy.optimizer_config.lr = 1e-3
    for name, value in {"num_workers": 1, **fsdp}.items():
        assert hasattr(config.fsdp, name)
        setattr(config.fsdp, name, value)
    return config


def minibatch(step: int, lengths: list[int], vocabulary: int = VOCABULARY) -> Minibatch:
    generator = torch.Generator().manual_seed(step)
    sequences = []
    for index, length in enumerate(lengths):
        mask = torch.arange(length) >= 4
        sequences.append(
            TrainingSequence(
                token_ids=torch.randint(0, vocabulary, (length,), generator=generator),
                loss_mask=mask,
                advantages=torch.randn(length, generator=generator) * mask,
                behaviour_logprobs=-2.5 * mask,
                versions=torch.where(mask, 0, -1),
                group_index=index // 8,
            )
        )
    return Minibatch(sequences, -(-len(lengths) // 8), step)


LENGTHS = [5 + 7 * i % 90 for i in range(32)]


@pytest.fixture
def rank() -> Iterator[TrainingWorker]:
    worker = TrainingWorker()
    yield worker
    worker.leave()


def join(worker: TrainingWorker, folder: str, config: TrainerConfig) -> None:
    meeting = worker.host_store("127.0.0.1", 1)
    worker.join(0, 1, meeting, config, "trainer.fsdp")
    worker.hold(Role.policy, ModelSettings(folder, config, 10, 1.0, 0))


@pytest.mark.parametrize("fsdp", [{}, {"cpu_offload": True}], ids=["on the GPU", "in main memory"])
def test_a_rank_on_a_gpu_trains_as_the_local_backend_and_resumes(
    folder: str, rank: TrainingWorker, fsdp: dict[str, object], tmp_path: Path
) -> None:
    join(rank, folder, settings(**fsdp))
    alone = LocalBackend(folder, settings(), total_steps=10, temperature=1.0, seed=0)
    for step in (1, 2, 3):
        batch = minibatch(step, LENGTHS)
        metrics = rank.update(Role.policy, PackedSequences.of(batch.sequences), batch)
        assert metrics == pytest.approx(alone.update(batch), rel=1e-3, abs=1e-4)
    for name, weight in alone.named_weights():
        torch.testing.assert_close(rank.weight(name), weight.cpu(), atol=1e-4, rtol=0, msg=name)
    where = {p.to_local().device.type for p in rank._policy.parameters()}  # type: ignore[attr-defined]
    assert where == {"cpu" if fsdp else "cuda"}
    rank.save(Role.policy, rank.snapshot(Role.policy), tmp_path)
    batch = minibatch(4, LENGTHS)
    after = rank.update(Role.policy, PackedSequences.of(batch.sequences), batch)
    rank.load(Role.policy, tmp_path)
    assert rank.update(Role.policy, PackedSequences.of(batch.sequences), batch) == pytest.approx(
        after, rel=1e-3, abs=1e-5
    )


@pytest.mark.parametrize("offload", [False, True], ids=["on the GPU", "in main memory"])
def test_a_critic_beside_the_policy_on_a_gpu_trains_as_the_local_one(
    folder: str, rank: TrainingWorker, offload: bool
) -> None:
    config = settings()
    config.algorithm.advantage_estimator = "gae"
    config.critic.placement, config.critic.optimizer_config.lr = "colocated", 1e-3
    config.critic.fsdp.cpu_offload = offload
    join(rank, folder, config)
    of_critic = derive.critic_trainer(config)
    rank.hold(Role.critic, ModelSettings(folder, of_critic, 10, 1.0, 0))
    alone, policy = LocalCritic(folder, of_critic, total_steps=10), LocalBackend(folder, config, 10, 1.0, 0)
    for step in (1, 2, 3):
        batch = minibatch(step, LENGTHS)
        targets = [torch.linspace(0, 1, len(s)) * s.loss_mask for s in batch.sequences]
        valued = [
            replace(s, values=0.5 * returns, returns=returns)
            for s, returns in zip(batch.sequences, targets, strict=True)
        ]
        packed, batch = PackedSequences.of(valued), replace(batch, sequences=valued)
        rank.accumulate(Role.policy, packed, batch)
        assert rank.update(Role.critic, packed, batch) == pytest.approx(alone.update(batch), rel=1e-3, abs=1e-4)
        assert rank.finish(Role.policy, step) == pytest.approx(policy.update(batch), rel=1e-3, abs=1e-4)
    for ours, expected in zip(rank.score(Role.critic, packed), alone.forward_values(valued), strict=True):
        torch.testing.assert_close(torch.from_numpy(ours), expected, atol=1e-4, rtol=0)
    where = {p.to_local().device.type for p in rank._held[Role.critic].worker.model.parameters()}  # type: ignore[attr-defined]
    assert where == {"cpu" if offload else "cuda"}


def local(folder: str, dtype: str, packing: bool | None, *, compiled: bool = False) -> LocalBackend:
    config = TrainerConfig(device="cuda", packing=packing, micro_batch_tokens=512)
    config.policy.dtype = dtype
    config.policy.compile = compiled
    return LocalBackend(folder, config, total_steps=10, temperature=1.0, seed=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 5e-2)])
def test_packed_rows_have_the_log_probs_of_padded_ones(folder: str, dtype: str, tolerance: float) -> None:
    sequences = minibatch(1, LENGTHS).sequences
    packed, padded = local(folder, dtype, True), local(folder, dtype, False)
    for ours, expected in zip(packed.forward_logprobs(sequences), padded.forward_logprobs(sequences), strict=True):
        torch.testing.assert_close(ours, expected, atol=tolerance, rtol=0)


def test_packed_rows_need_no_kernel_but_flash_attention(folder: str) -> None:
    packed = local(folder, "bfloat16", True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # raises where the inputs are not what that kernel takes
        packed.update(minibatch(1, LENGTHS))


def test_compiled_layers_compute_what_the_others_do(folder: str) -> None:
    compiled, plain = local(folder, "float32", True, compiled=True), local(folder, "float32", True)
    for step in (1, 2, 3):
        batch = minibatch(step, LENGTHS[step:])
        assert compiled.update(batch) == pytest.approx(plain.update(batch), rel=1e-3, abs=1e-4)


# How fast ------------------------------------------------------------------------------------------------------------


SHAPE = Qwen3Config(
    hidden_size=1024,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=3072,
    vocab_size=151_936,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)
TOKENS = 8192  # of a micro-batch, padding included
UPDATES = 4


def long_tailed(step: int) -> list[int]:
    """32 lengths, most of them far below the longest."""
    drawn = torch.empty(32).log_normal_(5.5, 0.8, generator=torch.Generator().manual_seed(step))
    return [max(16, min(int(length), 2048)) for length in drawn]


def test_a_model_of_600_million_parameters_trains_no_slower_than_a_plain_loop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(SHAPE, dtype=torch.bfloat16).save_pretrained(tmp_path)
    config = TrainerConfig(device="cuda", micro_batch_tokens=TOKENS)
    config.policy.dtype = "bfloat16"
    ours = LocalBackend(str(tmp_path), config, total_steps=10, temperature=1.0, seed=0)
    rate_ours = tokens_per_second(ours.update)
    parameters = sum(p.numel() for p in ours.model.parameters())
    del ours
    torch.cuda.empty_cache()
    rate_plain = tokens_per_second(PlainLoop(str(tmp_path)).update)
    name = torch.cuda.get_device_name()
    peak = next((operations for known, operations in PEAK.items() if known in name), None)
    used = "" if peak is None else f", {rate_ours * operations_per_token(parameters) / peak:.1%} of its peak"
    with capsys.disabled():
        sys.stdout.write(f"\n{name}: {rate_ours:,.0f} tokens/s, {rate_ours / rate_plain:.2f} of a plain loop{used}\n")
    assert rate_ours > rate_plain


def operations_per_token(parameters: int) -> float:
    """Forward and backward, without what is computed twice (arXiv 2204.02311, appendix B); half of attention is masked."""
    mean = sum(sum(long_tailed(step)) / 32 for step in range(1, UPDATES + 1)) / UPDATES
    heads = SHAPE.num_attention_heads * SHAPE.head_dim
    return 6 * parameters + 12 * SHAPE.num_hidden_layers * heads * mean / 2


def tokens_per_second(update) -> float:  # type: ignore[no-untyped-def]
    update(minibatch(99, long_tailed(99), SHAPE.vocab_size))  # warms up
    batches = [minibatch(step, long_tailed(step), SHAPE.vocab_size) for step in range(1, UPDATES + 1)]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for batch in batches:
        update(batch)
    torch.cuda.synchronize()
    return sum(len(s) for batch in batches for s in batch.sequences) / (time.perf_counter() - begin)


class PlainLoop:
    """What one writes with transformers alone: padded rows in the order given, float32 masters, a policy gradient."""

    def __init__(self, folder: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda().eval()
        self._masters = [torch.nn.Parameter(p.detach().float()) for p in self._model.parameters()]
        self._adamw = torch.optim.AdamW(self._masters, lr=1e-6, fused=True)

    def update(self, batch: Minibatch) -> None:
        trained = sum(int(s.loss_mask.sum()) for s in batch.sequences)
        rows = max(1, TOKENS // max(len(s) for s in batch.sequences))
        for start in range(0, len(batch.sequences), rows):
            self._backward(batch.sequences[start : start + rows], trained)
        for master, weight in zip(self._masters, self._model.parameters(), strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        with torch.no_grad():
            for master, weight in zip(self._masters, self._model.parameters(), strict=True):
                weight.copy_(master)

    def _backward(self, sequences: list[TrainingSequence], trained: int) -> None:
        def padded(tensors: list[torch.Tensor]) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True).cuda()

        ids = padded([s.token_ids for s in sequences])
        there = padded([torch.ones(len(s), dtype=torch.int64) for s in sequences])
        advantages = padded([s.advantages for s in sequences])[:, 1:]
        logits = self._model(input_ids=ids, attention_mask=there, use_cache=False).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
        (losses * advantages.flatten()).sum().div(trained).backward()
