"""Models and adapters begin with random numbers of their own seed, whatever the process draws meanwhile."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_train.config.schema import BuildModelConfig, LoraConfig
from skyrl_train.models.folder import DISTINCT_WEIGHTS, build_empty, load_model
from skyrl_train.models.lora import add_adapter
from skyrl_train.models.seeded_draws import SeededDraws
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.training.critic_worker import put_value_head

SMALL = BuildModelConfig(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32)
DRAWS: list[Callable[[], torch.Tensor]] = [
    lambda: torch.rand(3),
    lambda: torch.randn(2, 2),
    lambda: torch.randint(5, (4,)),
    lambda: torch.randint(2, 9, (4,)),
    lambda: torch.randint_like(torch.ones(4), 3, 7),
    lambda: torch.randperm(5),
    lambda: torch.normal(torch.zeros(3), 1.0),
    lambda: torch.bernoulli(torch.full((4,), 0.5)),
    lambda: torch.multinomial(torch.ones(5), 2),
    lambda: torch.nn.functional.dropout(torch.ones(9)),
    lambda: torch.nn.init.trunc_normal_(torch.empty(5)),
    lambda: torch.nn.Linear(3, 4).weight.detach(),
]


class NoGlobalDraws(TorchDispatchMode):
    """Inside the context, it is an error to draw from torch's global generator in this thread."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags and named.get("generator") is None:
            on = named.get("device") or args[0].device  # without values, on the meta device, nothing is drawn
            assert torch.device(on).type == "meta", f"{func} draws from the global generator"
        return func(*args, **named)


class CountedDraws(TorchDispatchMode):
    """Counts the numbers that are drawn in place."""

    numbers = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.numbers += args[0].numel()
        return func(*args, **(kwargs or {}))


def test_the_numbers_are_those_of_the_seeded_global_generator_which_stays_as_it_is() -> None:
    torch.manual_seed(5)
    expected = [draw() for draw in DRAWS]
    before = torch.get_rng_state()
    with SeededDraws(5):
        drawn = [draw() for draw in DRAWS]
    assert all(torch.equal(a, b) for a, b in zip(drawn, expected, strict=True))
    assert torch.equal(torch.get_rng_state(), before)
    with SeededDraws(6):
        assert not torch.equal(torch.rand(3), expected[0])


def test_a_given_generator_is_used() -> None:
    expected = torch.rand(3, generator=torch.Generator().manual_seed(1))
    with SeededDraws(5):
        assert torch.equal(torch.rand(3, generator=torch.Generator().manual_seed(1)), expected)


def test_another_thread_draws_as_if_nothing_were_seeded() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    drawn: list[torch.Tensor] = []
    with SeededDraws(5):
        other = threading.Thread(target=lambda: drawn.append(torch.rand(3)))
        other.start()
        other.join()
    assert torch.equal(drawn[0], expected)


def test_a_large_tensor_repeats_the_numbers_that_are_drawn_for_it() -> None:
    with SeededDraws(5):
        expected = torch.empty(7).normal_(2.0, 0.5)
    with SeededDraws(5, distinct=7):
        drawn = torch.nn.init.normal_(torch.empty(8, 3, dtype=torch.float32), 2.0, 0.5)
    assert torch.equal(drawn.view(-1), expected.repeat(4)[:24])
    with SeededDraws(5, distinct=24):
        drawn = torch.nn.init.normal_(torch.empty(8, 3), 2.0, 0.5)
    with SeededDraws(5):
        assert torch.equal(drawn, torch.empty(24).normal_(2.0, 0.5).view(8, 3)), "as many as it has"


def test_a_model_without_weights_needs_few_draws(tmp_path: Path) -> None:
    path = str(tmp_path / "model")
    build_model_folder(dataclasses.replace(SMALL, hidden_size=512), Path(path), seed=0)
    counted = CountedDraws()
    with counted:
        model = build_empty(path, "bfloat16", "cpu")
    sizes = [parameter.numel() for parameter in model.parameters() if parameter.dim() > 1]
    assert max(sizes) > 2 * DISTINCT_WEIGHTS
    # By torch's layers, and again by transformers.
    assert counted.numbers <= 2 * sum(min(size, DISTINCT_WEIGHTS) for size in sizes)
    matrix = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    assert len({tuple(row.tolist()) for row in matrix}) == 512, "each row has numbers of its own"


def test_an_operation_without_a_generator_is_an_error() -> None:
    with SeededDraws(5), pytest.raises(NotImplementedError, match="native_dropout"):
        torch.native_dropout(torch.ones(9), 0.5, True)


def test_no_model_is_built_from_the_global_generator(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    path = str(tmp_path / "model")
    with NoGlobalDraws():
        with pytest.raises(AssertionError, match="global generator"):
            torch.nn.Linear(2, 2)
        build_model_folder(SMALL, Path(path), seed=0)
        for method in ("kaiming", "gaussian"):
            add_adapter(load_model(path, "float32", "cpu"), LoraConfig(rank=2, init_method=method), seed=1)
        put_value_head(load_model(path, "float32", "cpu"))
        with torch.device("meta"):
            build_empty(path, "float32", "meta")
        engines = [build_empty(path, "float32", "cpu") for _ in range(2)]
    weights = [model.state_dict() for model in engines]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
