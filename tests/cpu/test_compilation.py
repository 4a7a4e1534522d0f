"""Compiled layers compute what the others do, and are compiled for any number of tokens at once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from training_worlds import backend, build_small_model, minibatch, one_thread

from skyrl_train.errors import ConfigError
from skyrl_train.training.layers import compile_layers


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The functions compiled so far, by a compiler that returns them unchanged."""
    compiled: list[Any] = []

    def as_it_is(graph: Any, inputs: list[Any]) -> Any:
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=as_it_is))
    torch._dynamo.reset()
    with one_thread():
        yield compiled
    torch._dynamo.reset()


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_rows_of_other_lengths_and_segments_compile_nothing_again(
    checkpointing: bool, graphs: list[Any], tmp_path: Path
) -> None:
    folder = build_small_model(tmp_path)
    changes = {"policy__gradient_checkpointing": checkpointing, "policy__optimizer_config__lr": 1e-3}
    compiled, plain = backend(folder, policy__compile=True, **changes), backend(folder, **changes)
    numbers = []
    for step in range(1, 5):
        batch = minibatch(step, step, tuple((step * 7 + index * 5) % 17 + 2 for index in range(4 + step)))
        assert compiled.update(batch) == pytest.approx(plain.update(batch), rel=1e-5, abs=1e-5)
        numbers.append(len(graphs))
    assert numbers[0] > 0
    assert numbers[1:] == numbers[1:2] * 3


def test_a_model_without_layers_that_repeat_is_rejected() -> None:
    with pytest.raises(ConfigError, match="compile=true: Linear has no layers"):
        compile_layers(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
