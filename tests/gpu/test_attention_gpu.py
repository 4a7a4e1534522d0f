"""Attention of packed rows on a GPU: which kernels compute it, how exactly, and in how much memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen3Config

from skyrl_train.config import derive
from skyrl_train.config.schema import TrainerConfig
from skyrl_train.training.attention import Segments, segmented_attention
from skyrl_train.training.backend import Minibatch, TrainingSequence
from skyrl_train.training.local_backend import LocalBackend, LocalCritic
from skyrl_train.training.reference import FrozenPolicy, TokensToScore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

VOCABULARY = 13
FLASH_FORWARD = {"aten::_flash_attention_forward"}
FLASH = FLASH_FORWARD | {"aten::_flash_attention_backward"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose heads share keys and values; its second layer has a window."""
    path = tmp_path_factory.mktemp("models") / "small"
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        max_position_embeddings=512,
        use_sliding_window=True,
        sliding_window=16,
        max_window_layers=1,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


def settings(dtype: str = "bfloat16", *, packing: bool | None = True, **policy: object) -> TrainerConfig:
    config = TrainerConfig(device="cuda", packing=packing, micro_batch_tokens=512)
    config.policy.dtype, config.policy.optimizer_config.lr = dtype, 1e-3
    for name, value in policy.items():
        assert hasattr(config.policy, name)
        setattr(config.policy, name, value)
    return config


def backend(folder: str, dtype: str = "bfloat16", *, packing: bool | None = True, **policy: object) -> LocalBackend:
    return LocalBackend(folder, settings(dtype, packing=packing, **policy), total_steps=10, temperature=1.0, seed=0)


def minibatch(step: int) -> Minibatch:
    """Sequences of 2 to 200 tokens; other lengths at each step."""
    generator = torch.Generator().manual_seed(step)
    sequences = []
    for index in range(24):
        length = 2 + int(198 * torch.rand((), generator=generator) ** 3)
        mask = torch.arange(length) >= min(4, length - 1)
        sequences.append(
            TrainingSequence(
                token_ids=torch.randint(0, VOCABULARY, (length,), generator=generator),
                loss_mask=mask,
                advantages=torch.randn(length, generator=generator) * mask,
                behaviour_logprobs=-2.5 * mask,
                versions=torch.where(mask, 0, -1),
                group_index=index // 8,
            )
        )
    return Minibatch(sequences, 3, step)


# Numbers -------------------------------------------------------------------------------------------------------------


def attended(
    device: str, dtype: torch.dtype, heads: tuple[int, int], lengths: tuple[int, ...], window: int | None
) -> list[torch.Tensor]:
    """Outputs of attention and gradients of queries, keys and values, in float64. The inputs depend on sizes only."""
    generator = torch.Generator().manual_seed(1)
    drawn = [
        torch.randn(1, number, sum(lengths), 64, generator=generator).bfloat16()
        for number in (heads[0], *heads[1:] * 2)
    ]
    inputs = [states.to(device, dtype).requires_grad_() for states in drawn]
    segments = Segments.of(lengths).to(torch.device(device))
    module = torch.nn.Module()
    out, _ = segmented_attention(module, *inputs, None, scaling=0.125, sliding_window=window, segments=segments)
    seen = torch.randn(out.shape, generator=generator).bfloat16().to(device, dtype)
    gradients = torch.autograd.grad(out, inputs, seen)
    return [states.detach().cpu().double() for states in (out, *gradients)]


# The relative errors of bfloat16 are at most 1.4 * 2**-8 with CPU kernels that keep sums in float32, as flash attention does (2.9
# with those that share heads, which do not). float16 has 3 more bits. float32's kernel multiplies in three passes of TF32.
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2**-6), (torch.float16, 2**-9), (torch.float32, 2**-16)], ids=str
)
@pytest.mark.parametrize("lengths", [(300, 257, 128, 64, 5, 1, 1), (700,), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("window", [None, 64, 5, 1])
@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (8, 1)], ids=str)
def test_attention_on_the_gpu_has_the_values_and_gradients_of_exact_attention(
    heads: tuple[int, int], window: int | None, lengths: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    ours = attended("cuda", dtype, heads, lengths, window)
    exact = attended("cpu", torch.float64, heads, lengths, window)
    # Queries and keys have gradients of 0.67 to 0.9 of the values', or none where each token sees only itself.
    floor = 0.5 * exact[3].norm()
    for name, got, expected in zip(("out", "query", "key", "value"), ours, exact, strict=True):
        error = (got - expected).norm() / torch.maximum(expected.norm(), floor)
        assert error <= tolerance, (name, float(error))


class OnlyRank:
    """A rank that has a whole row, filled to a multiple of the ranks, to itself."""

    def all_tokens(self, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return parts

    def exchange(self, part: torch.Tensor) -> torch.Tensor:
        return part


def test_filling_behind_the_last_segment_gets_zeros_and_has_no_gradient() -> None:
    segments, module = Segments.of((40, 20)).to(torch.device("cuda")), torch.nn.Module()
    inputs = [torch.randn(1, heads, 64, 32, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)]
    alone, _ = segmented_attention(module, *(states[:, :, :60] for states in inputs), None, segments=segments)
    filled = [
        states.index_fill(2, torch.arange(60, 64, device="cuda"), torch.nan).requires_grad_() for states in inputs
    ]
    out, _ = segmented_attention(module, *filled, None, segments=replace(segments, ranks=OnlyRank()))  # type: ignore[arg-type]
    assert torch.equal(out[:, :60], alone)
    assert not out[:, 60:].any()
    for gradient_of_states in torch.autograd.grad(out.float().square().sum(), filled):
        assert gradient_of_states[:, :, :60].isfinite().all()
        assert not gradient_of_states[:, :, 60:].any()


def test_packed_rows_are_as_close_to_float32_as_padded_ones(folder: str) -> None:
    """The gradients of all weights, over several minibatches."""
    errors = {True: 0.0, False: 0.0}
    exact = backend(folder, "float32", packing=False)
    narrow = {packing: backend(folder, packing=packing) for packing in errors}
    for step in range(1, 5):
        expected = gradient(exact, minibatch(step))
        for packing in errors:
            difference = gradient(narrow[packing], minibatch(step)) - expected
            errors[packing] += float(difference.norm() / expected.norm())
    assert errors[True] <= 1.5 * errors[False]


def gradient(policy: LocalBackend, batch: Minibatch) -> torch.Tensor:
    policy.accumulate(batch)
    groups = policy.optimizer.adamw.param_groups
    flat = torch.cat([weight.grad.flatten().cpu() for group in groups for weight in group["params"]])
    policy.discard()
    return flat


# Kernels -------------------------------------------------------------------------------------------------------------


def attention_operators(work: Callable[[], object]) -> set[str]:
    """The operators of torch that computed attention."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        work()
    names = {event.key for event in profiled.key_averages()}
    return {name for name in names if name.startswith("aten::") and "attention" in name}


def train(policy: LocalBackend) -> None:
    for step in range(1, 4):
        policy.update(minibatch(step))


@pytest.mark.parametrize("change", [{}, {"gradient_checkpointing": True}, {"compile": True}], ids=str)
def test_updates_of_new_lengths_use_flash_attention_alone(folder: str, change: dict[str, object]) -> None:
    policy = backend(folder, **change)
    policy.update(minibatch(9))  # compiles
    assert attention_operators(lambda: train(policy)) == FLASH


def test_an_adapter_is_trained_through_flash_attention_alone(folder: str) -> None:
    config = settings()
    config.policy.model.lora.rank = 4
    policy = LocalBackend(folder, config, total_steps=10, temperature=1.0, seed=0)
    assert attention_operators(lambda: train(policy)) == FLASH


def test_a_critic_is_trained_through_flash_attention_alone(folder: str) -> None:
    config = settings()
    config.algorithm.advantage_estimator = "gae"
    config.critic.dtype, config.critic.optimizer_config.lr = "bfloat16", 1e-3
    critic = LocalCritic(folder, derive.critic_trainer(config), total_steps=10)
    batch = minibatch(1)
    returns = [torch.linspace(0, 1, len(s)) * s.loss_mask for s in batch.sequences]
    valued = [replace(s, values=0.5 * r, returns=r) for s, r in zip(batch.sequences, returns, strict=True)]
    assert attention_operators(lambda: critic.update(replace(batch, sequences=valued))) == FLASH


def test_log_probs_of_policy_and_reference_come_from_flash_attention_alone(folder: str) -> None:
    policy, sequences = backend(folder), minibatch(1).sequences
    assert attention_operators(lambda: policy.forward_logprobs(sequences)) == FLASH_FORWARD
    frozen = FrozenPolicy(folder, dtype="bfloat16", device="cuda", temperature=1.0, micro_batch_tokens=512)
    asked = [TokensToScore([], s.token_ids.tolist(), s.loss_mask.int().tolist()) for s in sequences]
    assert attention_operators(lambda: frozen(asked)) == FLASH_FORWARD


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_padded_rows_do_not_use_cudnn_either(folder: str, dtype: str) -> None:
    policy = backend(folder, dtype, packing=False)
    used = attention_operators(lambda: train(policy))
    assert used
    assert not {name for name in used if "cudnn" in name}


# Memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_memory_grows_with_the_length_of_a_segment_not_with_its_square(dtype: torch.dtype) -> None:
    def peak(width: int) -> int:
        inputs = [torch.randn(1, heads, width, 64, device="cuda", dtype=dtype) for heads in (8, 2, 2)]
        inputs = [states.requires_grad_() for states in inputs]
        segments = Segments.of([width]).to(torch.device("cuda"))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out, _ = segmented_attention(torch.nn.Module(), *inputs, None, scaling=0.125, segments=segments)
        out.sum().backward()
        return torch.cuda.max_memory_allocated() - before

    peak(64)  # workspaces
    assert peak(8192) < 2.5 * peak(4096)  # a matrix for each head: 4
