"""A generator of SkyRL runs unchanged. ``tests/oracle/test_skyrl_generator.py`` runs SkyRL's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from skyrl_train.config.schema import EnvironmentConfig, GeneratorConfig
from skyrl_train.errors import GeneratorOutputError, RolloutError
from skyrl_train.generators.construction import GeneratorSpec
from skyrl_train.generators.skyrl import SkyRLClient, _Response, _take
from skyrl_train.generators.validation import to_samples
from skyrl_train.types import BatchMetadata, GeneratorInput, TrajectoryID

EOS = 9
TOOL = 7  # a token that no policy samples


class ScriptedClient:
    """Answers the n-th request of a session with tokens n, n, EOS of version n; log-probs are -n."""

    def __init__(self) -> None:
        self.requests: list[Mapping[str, Any]] = []

    async def generate(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.requests.append(request)
        turn = sum(each["session_ids"] == request["session_ids"] for each in self.requests)
        return {
            "responses": [""],
            "response_ids": [[turn, turn, EOS]],
            "stop_reasons": ["stop"],
            "response_logprobs": [[-float(turn)] * 3],
            "response_versions": [[turn] * 3],
        }


class Tokenizer:
    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return " ".join(str(each) for each in ids if each != EOS or not skip_special_tokens)


class TwoTurns:
    """Written for SkyRL: its arguments, its session ids, its output without versions."""

    def __init__(self, inference_engine_client: SkyRLClient, tokenizer: object, ends: str = "kept") -> None:
        self.client, self.ends = inference_engine_client, ends

    async def generate(self, input_batch: Any) -> dict[str, Any]:
        output: dict[str, Any] = {name: [] for name in ("prompt_token_ids", "response_ids", "rewards", "loss_masks")}
        for prompt, trajectory in zip(input_batch["prompts"], input_batch["trajectory_ids"], strict=True):
            session, tokens, mask = trajectory.to_string(), [], []
            try:
                for _ in range(2):
                    got = await self.client.generate(
                        {"prompt_token_ids": [[1, *tokens]], "session_ids": [session]}, model=None
                    )
                    ids = got["response_ids"][0]
                    match self.ends:
                        case "dropped":
                            ids.pop()
                        case "encoded again":
                            ids[:] = [5, 5]
                    tokens += [*ids, TOOL]
                    mask += [1] * len(ids) + [0]
            finally:
                await self.client.finish_session(session)
            if self.ends == "added":
                tokens, mask = [*tokens, EOS], [*mask, 1]
            for name, value in zip(output, ([1], tokens, float(len(prompt)), mask), strict=True):
                output[name].append(value)
        metrics = {"environment/solved": 0.5, "generate/avg_num_tokens": 3.0}
        return {**output, "stop_reasons": ["stop", "length"], "rollout_metrics": metrics, "rollout_logprobs": None}


class TwoAnswersAtOnce(TwoTurns):
    async def generate(self, input_batch: Any) -> dict[str, Any]:
        session = input_batch["trajectory_ids"][0].to_string()
        got = await self.client.generate({"prompt_token_ids": [[1], [1]], "session_ids": [session, session]})
        return {
            "prompt_token_ids": [[1]],
            "response_ids": got["response_ids"][:1],
            "rewards": [0.0],
            "loss_masks": [[1] * 3],
        }


def group(seeds: tuple[int, ...] = (10, 11)) -> GeneratorInput:
    return {
        "prompts": [[{"role": "user", "content": "?"}]] * 2,
        "env_classes": ["skyrl_gym:gsm8k"] * 2,
        "env_extras": [{}, {}],
        "sampling_params": {"max_tokens": 8, "temperature": 0.5},
        "trajectory_ids": [TrajectoryID("a", 0), TrajectoryID("a", 1)],
        "batch_metadata": BatchMetadata(1, "train", seeds),
    }


def build(client: object, cls: str = "TwoTurns", **kwargs: Any) -> Any:
    config = GeneratorConfig(name="skyrl", kwargs={"cls": f"{__file__}:{cls}", **kwargs})
    return GeneratorSpec(config, EnvironmentConfig(), "some/model").build(client, Tokenizer())  # type: ignore[arg-type]


async def test_versions_and_logprobs_come_from_what_the_client_sampled() -> None:
    client = ScriptedClient()
    output = await build(client).generate(group())
    assert output["response_ids"] == [[1, 1, EOS, TOOL, 2, 2, EOS, TOOL]] * 2
    assert output["rollout_versions"] == [[1, 1, 1, -1, 2, 2, 2, -1]] * 2
    assert output["rollout_logprobs"] == [[-1.0, -1.0, -1.0, 0.0, -2.0, -2.0, -2.0, 0.0]] * 2
    assert output["rollout_metrics"] == {"environment/solved": 0.5}
    assert len(to_samples(output, expected=2)) == 2
    assert len({request["sampling_params"]["seed"] for request in client.requests}) == 4, "one per turn and sample"
    assert client.requests[0]["sampling_params"]["max_tokens"] == GeneratorConfig().sampling_params.max_tokens


async def test_requests_of_a_session_that_run_at_once_have_different_seeds() -> None:
    client = ScriptedClient()
    await build(client, "TwoAnswersAtOnce").generate(group())
    first, second = (request["sampling_params"]["seed"] for request in client.requests)
    assert first != second


async def test_a_dropped_last_token_and_a_token_that_was_added() -> None:
    dropped = await build(ScriptedClient(), ends="dropped").generate(group())
    assert dropped["rollout_versions"][0] == [1, 1, -1, 2, 2, -1]
    added = await build(ScriptedClient(), ends="added").generate(group())
    assert added["loss_masks"][0] == [1, 1, 1, 0, 1, 1, 1, 0, 0], (
        "no policy sampled the added token, so it does not train"
    )


def test_a_row_takes_the_longest_of_the_responses_that_it_begins_with() -> None:
    """Without names, the response of another sample may have ended first."""
    responses = [
        _Response(None, tokens, [-0.5] * len(tokens), [version] * len(tokens))
        for version, tokens in enumerate([[7, EOS], [7, 8, 9, EOS]])
    ]
    assert _take([7, 8, 9, EOS], [1] * 4, "s", responses).versions == [1] * 4
    assert _take([7, EOS], [1] * 2, "s", responses).versions == [0] * 2


async def test_text_that_was_encoded_again_is_an_error() -> None:
    with pytest.raises(GeneratorOutputError, match=r"a_0 .* came from client\.generate"):
        await build(ScriptedClient(), ends="encoded again").generate(group())


async def test_a_request_outside_of_a_group_is_told() -> None:
    generator = build(ScriptedClient())
    with pytest.raises(RolloutError, match="belong to no group"):
        await generator._generator.client.generate({"prompt_token_ids": [[1]]})
