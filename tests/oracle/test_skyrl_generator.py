"""SkyRL's own generator for skyrl-gym runs unchanged: its package, its environments, our client's tokens and versions."""

from __future__ import annotations

import string
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import openai
import oracles
import pytest
from scripted import ScriptedEngine, hashed_token, scripted_update

from skyrl_train.config.schema import EnvironmentConfig, GeneratorConfig
from skyrl_train.generators.construction import GeneratorSpec
from skyrl_train.generators.validation import to_samples
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.models.tiny import character_tokenizer
from skyrl_train.types import BatchMetadata, PauseMode, TrajectoryID

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


class AgentOverHttp:
    """As SkyRL's example for mini-swe-agent: OpenAI's client, and SkyRL's function for the tokens of the messages."""

    def __init__(self, inference_engine_client: Any, tokenizer: Any, model_name: str) -> None:
        self.url, self.tokenizer, self.model = inference_engine_client.get_endpoint_url(), tokenizer, model_name

    async def generate(self, input_batch: Any) -> dict[str, Any]:
        encode = import_module("skyrl.train.generators.utils").get_response_ids_and_loss_mask_from_messages
        output: dict[str, Any] = {name: [] for name in ("prompt_token_ids", "response_ids", "loss_masks", "rewards")}
        async with openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="dummy") as sdk:
            for prompt in input_batch["prompts"]:
                messages = list(prompt)
                for _ in range(2):
                    answer = await sdk.chat.completions.create(model=self.model, messages=messages)
                    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                    messages.append({"role": "user", "content": "Really?"})
                messages.pop()
                tokens, mask, _ = encode(messages[len(prompt) :], self.tokenizer)
                rendered = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=False, return_dict=False)
                for name, value in zip(output, (rendered, tokens, mask, 1.0), strict=True):
                    output[name].append(value)
        return output


async def test_agents_over_http_whose_messages_skyrl_encodes() -> None:
    oracles.load_skyrl_generator()
    engine = ScriptedEngine(lambda tokens, seed: 5 + hashed_token(tokens, 0, 40), free_running=True)
    client = InferenceEngineClient([engine], TOKENIZER)
    await client.start()
    await client.load_weights(scripted_update(3), PauseMode.KEEP)
    config = GeneratorConfig(name="skyrl", kwargs={"cls": f"{__name__}:AgentOverHttp"})
    generator = GeneratorSpec(config, EnvironmentConfig(), "some/model").build(client, TOKENIZER)
    await generator.start()
    try:
        output = await generator.generate(
            {
                "prompts": [[{"role": "user", "content": "2 + 2?"}]] * 2,
                "env_classes": ["agent"] * 2,
                "env_extras": [{}, {}],
                "sampling_params": {"max_tokens": 5},
                "trajectory_ids": [TrajectoryID("a", 0), TrajectoryID("a", 1)],
                "batch_metadata": BatchMetadata(1, "train", (0, 1)),
            }
        )
    finally:
        await generator.aclose()
        await client.teardown()
    for sample, versions in zip(to_samples(output, expected=2), output["rollout_versions"] or (), strict=True):
        assert versions.count(3) == sum(sample.sequences[0].loss_mask) == 10
