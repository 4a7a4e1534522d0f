"""A loss, an environment, a weight transport, an engine and a staleness policy from outside the package: one file each."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

import skyrl_train
from skyrl_train.algorithms.losses import POLICY_LOSSES, TokenLosses
from skyrl_train.algorithms.tokens import PolicyTokens
from skyrl_train.config.schema import AlgorithmConfig
from skyrl_train.environments import registry as environment_registry
from skyrl_train.environments.registry import registered_environments
from skyrl_train.rollout.staleness.policies import STALENESS_POLICIES

TINY = {
    "trainer": {"policy_mini_batch_size": 2, "max_steps": 2, "trackers": [], "policy.model.build.hidden_size": 32},
    "generator.n_samples_per_prompt": 2,
    "generator.inference_engine.executor": "thread",
    "data.generate": 8,
}

LOSS = """
from pathlib import Path

from skyrl_train import register_policy_loss
from skyrl_train.algorithms.losses import TokenLosses

@register_policy_loss("plain_gradient")
def plain_gradient(tokens, config):
    Path(__file__).with_name("used").touch()
    ratio = (tokens.logprobs - tokens.proximal_logprobs).exp().detach()
    return TokenLosses(-tokens.advantages * tokens.logprobs, ratio, ratio > 2)
"""

ENVIRONMENT = """
from pathlib import Path

from skyrl_train import Environment, EnvironmentStep, register_environment

@register_environment("even_length")
class EvenLength(Environment):
    is_blocking = False

    def step(self, action):
        Path(__file__).with_name("used").touch()
        return EnvironmentStep(observations=[], reward=float(len(action) % 2 == 0), done=True)
"""

TRANSPORT = """
import numpy
import torch
from pathlib import Path

from skyrl_train.weight_sync.update import WeightTransport, WeightUpdate

class NumpyFiles(WeightTransport):
    name = f"{Path(__file__).resolve()}:open_update"  # an engine calls this function to read an update

    def gather(self, weights, version):
        arrays = {name: weight.detach().float().numpy() for name, weight in weights}
        location = str(Path(__file__).with_name(f"v{version}.npz"))
        numpy.savez(location, **arrays)
        return WeightUpdate(version, self.name, location, num_bytes=sum(a.nbytes for a in arrays.values()), tensors=())

    def close(self):
        pass

def open_update(update, device):
    Path(__file__).with_name("used").touch()
    with numpy.load(update.location) as arrays:
        return {name: torch.from_numpy(arrays[name]).to(device) for name in arrays}
"""

ENGINE = """
from pathlib import Path

from skyrl_train import EmbeddedEngine

class NoisyEngine(EmbeddedEngine):
    async def generate(self, engine_input):
        Path(__file__).with_name("used").touch()
        return await super().generate(engine_input)

    async def stream(self, engine_input):
        Path(__file__).with_name("used").touch()
        async for chunk in super().stream(engine_input):
            yield chunk

def make_engine(config, plan, model_path, index):
    return NoisyEngine(model_path, executor="thread", max_num_seqs=8, max_model_len=plan.max_model_len)
"""

POLICY = """
from pathlib import Path

from skyrl_train import StalenessPolicy, register_staleness_policy

@register_staleness_policy("half_depth")
class HalfDepth(StalenessPolicy):
    def depth(self, view, generate_ahead_steps, weight_sync_interval):
        Path(__file__).with_name("used").touch()
        return generate_ahead_steps / 2
"""


@pytest.fixture
def _registered_here_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a file registers is gone after the test."""
    for registry in (POLICY_LOSSES, STALENESS_POLICIES):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    registered_environments()  # imports the library's own
    monkeypatch.setattr(environment_registry, "_registry", dict(environment_registry._registry))


@pytest.mark.usefixtures("_registered_here_only")
@pytest.mark.parametrize(
    ("source", "setting", "name"),
    [
        (LOSS, "trainer.algorithm.policy_loss_type", "plain_gradient"),
        (ENVIRONMENT, "environment.env_class", "EvenLength"),
        (TRANSPORT, "generator.weight_transport", "NumpyFiles"),
        (ENGINE, "generator.inference_engine.backend", "make_engine"),
        (POLICY, "trainer.fully_async.staleness_policy", "HalfDepth"),
    ],
    ids=["loss", "environment", "transport", "engine", "staleness_policy"],
)
def test_one_file_outside_the_package_and_its_path_in_a_setting_are_enough(
    tmp_path: Path, source: str, setting: str, name: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"0{n}c=", "answer": "c" * n}) + "\n" for n in range(1, 9)))
    data = {"data": {"generate": 0, "train_data": [str(prompts)]}} if "environment" in setting else {}
    overrides = {**TINY, "trainer.run_dir": str(tmp_path / "run"), setting: f"{file}:{name}", **data}

    run = skyrl_train.train("quickstart", overrides=overrides, quiet=True)

    assert run.finished and run.summary.steps == 2
    assert (tmp_path / "used").exists()


@pytest.mark.usefixtures("_registered_here_only")
def test_a_name_that_a_notebook_has_registered_is_known_where_its_policy_trains(tmp_path: Path) -> None:
    used = threading.Event()  # a file would also be there if a child process had used the loss

    @skyrl_train.register_policy_loss("in_a_cell")
    def in_a_cell(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
        used.set()
        return TokenLosses(-tokens.advantages * tokens.logprobs, torch.ones_like(tokens.logprobs), tokens.logprobs > 0)

    overrides = {**TINY, "trainer.run_dir": str(tmp_path / "run"), "trainer.algorithm.policy_loss_type": "in_a_cell"}
    overrides["generator.inference_engine.executor"] = "process"  # by default the policy would then train in one too
    ended = threading.Event()
    beside = threading.Thread(target=ended.wait)  # a notebook has threads, so nothing is forked from it
    beside.start()
    try:
        assert skyrl_train.train("quickstart", overrides=overrides, quiet=True).finished
    finally:
        ended.set()
        beside.join()
    assert used.is_set()
