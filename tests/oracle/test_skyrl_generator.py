"""SkyRL's own generator for skyrl-gym runs unchanged: its package, its environments, our client's tokens and versions."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

import oracles
import pytest

from skyrl_train.config.schema import EnvironmentConfig, GeneratorConfig
from skyrl_train.generators.construction import GeneratorSpec
from skyrl_train.generators.validation import to_samples
from skyrl_train.models.tiny import character_tokenizer
from skyrl_train.types import BatchMetadata, TrajectoryID

pytestmark = pytest.mark.oracle
TOKENIZER = character_tokenizer(string.printable)


class ScriptedClient:
    """The n-th answer is the n-th text, sampled by the policy of version n."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.requests: list[Mapping[str, Any]] = []

    async def generate(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.requests.append(request)
        turn = len(self.requests)
        tokens = [*TOKENIZER.encode(self.texts[turn - 1], add_special_tokens=False), TOKENIZER.eos_token_id]
        return {
            "responses": [""],
            "response_ids": [tokens],
            "stop_reasons": ["stop"],
            "response_logprobs": [[-float(turn)] * len(tokens)],
            "response_versions": [[turn] * len(tokens)],
        }


@pytest.mark.parametrize("batched", [False, True])
async def test_one_turn(batched: bool) -> None:
    output = await run(ScriptedClient("#### 4", "#### 5"), "gsm8k", 2, batched=batched)
    samples = to_samples(output, expected=2)
    # SkyRL's samples run at once: either may be the first request, which has the right answer.
    assert sorted(sum(sample.rewards) for sample in samples) == [0.0, 1.0]
    for sample, versions in zip(samples, output["rollout_versions"], strict=True):
        assert set(versions) == ({1} if sum(sample.rewards) else {2})


async def test_a_turn_after_an_observation_has_its_own_version() -> None:
    client = ScriptedClient("#### 5", "#### 4")
    output = await run(client, "gsm8k_multi_turn", 1, max_turns=2)
    (sample,) = to_samples(output, expected=1)
    (versions,), (mask,) = output["rollout_versions"], output["loss_masks"]
    assert {version for version, trained in zip(versions, mask, strict=True) if trained} == {1, 2}
    assert -1 in versions, "the environment's words lie between the turns"
    assert (
        client.requests[1]["prompt_token_ids"][0][: len(client.requests[0]["prompt_token_ids"][0])]
        == (client.requests[0]["prompt_token_ids"][0])
    )
    assert sum(sample.rewards) > 0


async def test_steps_as_rows() -> None:
    client = ScriptedClient("#### 5", "#### 4")
    output = await run(client, "gsm8k_multi_turn", 1, max_turns=2, step_wise_trajectories=True)
    (sample,) = to_samples(output, expected=1)
    assert output["is_last_step"] == [False, True] and len(sample.sequences) == 2
    assert [max(versions) for versions in output["rollout_versions"]] == [1, 2]


async def run(client: ScriptedClient, env_class: str, samples: int, max_turns: int = 1, **generator_cfg: Any) -> Any:
    oracles.load_skyrl_generator()
    config = GeneratorConfig(
        name="skyrl", max_turns=max_turns, max_input_length=4000, kwargs={"generator_cfg": generator_cfg}
    )
    generator = GeneratorSpec(config, EnvironmentConfig(env_class), "some/model").build(client, TOKENIZER)  # type: ignore[arg-type]
    return await generator.generate(
        {
            "prompts": [[{"role": "user", "content": "2 + 2?"}]] * samples,
            "env_classes": [env_class] * samples,
            "env_extras": [{"reward_spec": {"method": "rule", "ground_truth": "4"}, "extra_info": {}}] * samples,
            "sampling_params": {"max_tokens": 20},
            "trajectory_ids": [TrajectoryID("a", index) for index in range(samples)],
            "batch_metadata": BatchMetadata(1, "train", tuple(range(samples))),
        }
    )
