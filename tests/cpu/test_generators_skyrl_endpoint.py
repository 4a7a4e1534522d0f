"""A generator of SkyRL whose agents use ``get_endpoint_url`` with a key of no session runs unchanged."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from typing import Any

import openai
import pytest
from harness import TOKENIZER
from harness_worlds import batch
from scripted import ScriptedEngine, hashed_token, scripted_update, settle

from skyrl_train.build.checks import check_import_paths
from skyrl_train.config.compose import compose
from skyrl_train.config.schema import EnvironmentConfig, GeneratorConfig, SamplingConfig
from skyrl_train.endpoint.server.server import EndpointServer
from skyrl_train.endpoint.server.settings import ServerSettings
from skyrl_train.errors import ConfigError, RolloutError
from skyrl_train.generators.construction import GeneratorSpec
from skyrl_train.generators.skyrl import SkyRLClient
from skyrl_train.generators.skyrl_endpoint import AgentEndpoint, ServedResponses, _digest
from skyrl_train.generators.validation import to_samples
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.interface import SamplingParams
from skyrl_train.inference.requests import GenerationRequest
from skyrl_train.types import GeneratorOutput, GrammarSpan, PauseMode

MODEL = "some-org/some-model"
_world: list[InferenceEngineClient] = []  # of the running test


class OverHttp:
    """Written for SkyRL: two turns of OpenAI's client per sample, and the tokens that the endpoint returned."""

    def __init__(self, inference_engine_client: SkyRLClient, model_name: str, case: str) -> None:
        self.client, self.model, self.case = inference_engine_client, model_name, case
        self.url = None if case == "asks late" else self.client.get_endpoint_url()

    async def generate(self, input_batch: Any) -> dict[str, Any]:
        names = [trajectory.to_string() for trajectory in input_batch["trajectory_ids"]]
        rows = [await self.play(list(input_batch["prompts"][0]), name) for name in names]
        return {
            **{field: [row[field] for row in rows] for field in ("prompt_token_ids", "response_ids", "loss_masks")},
            "rewards": [float(self.case == "other rewards" and place) for place in range(len(rows))],
        }

    async def play(self, messages: list[Any], name: str) -> dict[str, list[int]]:
        if self.case == "asks nothing":
            return {"prompt_token_ids": [1], "response_ids": [2, 3], "loss_masks": [1, 1]}
        prompt, tokens, mask = [], [], []
        url = f"{self.url or self.client.get_endpoint_url()}/v1"
        headers = {"x-session-id": name} if self.case == "named samples" else {}
        async with openai.AsyncOpenAI(base_url=url, api_key="dummy", default_headers=headers) as sdk:
            for _ in range(2):
                answer: Any = await sdk.chat.completions.create(
                    model=self.model,
                    messages=messages,
                    temperature=0.3,
                    seed=1,
                    stream=self.case == "streams",
                    extra_body={"return_token_ids": True},
                )
                if self.case == "streams":
                    chunks = [chunk async for chunk in answer]
                    prompt_ids = next(ids for chunk in chunks if (ids := getattr(chunk, "prompt_token_ids", None)))
                    choices = [choice for chunk in chunks for choice in chunk.choices]
                    sampled = [token for choice in choices for token in getattr(choice, "token_ids", None) or ()]
                    content = "".join(choice.delta.content or "" for choice in choices)
                else:
                    (choice,), prompt_ids = answer.choices, answer.prompt_token_ids
                    sampled, content = choice.token_ids, choice.message.content
                prompt = prompt or list(prompt_ids)
                between = prompt_ids[len(prompt) + len(tokens) :]
                tokens += [*between, *sampled]
                mask += [0] * len(between) + [1] * len(sampled)
                messages += [{"role": "assistant", "content": content}]
                messages += [{"role": "user", "content": "more"}]
                await update(_world[0].policy_version + 1)
        if self.case != "named samples":
            await self.client.finish_session(name)
        match self.case:
            case "encoded again":
                tokens[1] += 1
            case "another template":
                prompt.append(5)
            case "added token":
                tokens, mask = [*tokens, 5], [*mask, 1]
            case "cut":
                tokens, mask = tokens[:-2], mask[:-2]
        return {"prompt_token_ids": prompt, "response_ids": tokens, "loss_masks": mask}


async def update(version: int) -> None:
    await _world[0].receive_weights(scripted_update(version))
    await _world[0].load_weights(scripted_update(version), PauseMode.KEEP)


async def play(case: str, samples: int) -> tuple[ScriptedEngine, GeneratorOutput]:
    """All policy versions sample the same tokens. The version rises after each turn."""
    engine = ScriptedEngine(lambda tokens, seed: 2 + hashed_token(tokens, 0, 40), free_running=True)
    client = InferenceEngineClient([engine], TOKENIZER, engine_wait_timeout_s=0.01)
    _world[:] = [client]
    config = GeneratorConfig(
        name="skyrl",
        sampling_params=SamplingConfig(max_tokens=6, temperature=0.7),
        kwargs={"cls": f"{__name__}:OverHttp", "case": case},
    )
    generator: Any = GeneratorSpec(config, EnvironmentConfig(), MODEL).build(client, TOKENIZER)
    await client.start()
    await update(0)
    await generator.start()
    try:
        output = await generator.generate(batch(samples))
        if case == "named samples":
            assert len(generator._endpoint._store) == 0, "closed with the call, if the generator does not"
        return engine, output
    finally:
        await generator.aclose()
        await client.teardown()


@pytest.mark.parametrize("case", ["ids", "streams", "asks late", "added token", "cut"])
async def test_versions_and_logprobs_are_those_of_the_responses_with_the_rows_tokens(case: str) -> None:
    engine, output = await play(case, 1)
    (sample,) = to_samples(output, expected=1)
    (row,) = sample.sequences
    versions = [version for version in row.versions if version >= 0]
    assert versions == [0] * 6 + [1] * (4 if case == "cut" else 6)
    assert row.versions[6] == -1, "the words between the turns"
    assert all((logprob < 0) == (version >= 0) for logprob, version in zip(row.logprobs, row.versions, strict=True))
    params = [SamplingParams.parse(request["sampling_params"]) for request in engine.requests]
    assert [(each.temperature, each.seed) for each in params] == [(0.7, None)] * 2, "the run's, not the agent's"


async def test_equal_responses_of_several_versions_are_told_apart_by_the_samples_name() -> None:
    with pytest.raises(RolloutError, match=r"p_0 has one of 2 equal responses.*x-session-id"):
        await play("other rewards", 2)
    _, equal = await play("ids", 2)
    _, output = await play("named samples", 2)
    assert equal["rollout_versions"] == output["rollout_versions"], "between equal rows it does not matter"
    assert [sorted(set(versions)) for versions in output["rollout_versions"] or ()] == [[-1, 0, 1], [-1, 2, 3]]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("asks nothing", "p_0 .* no request has reached"),
        ("encoded again", "p_0 returned 1 tokens .* encoded again"),
        ("another template", r"p_0 .* no response to the (\d+) tokens .* the same first \d+\."),
    ],
)
async def test_a_row_that_was_not_served_fails_its_sample_and_says_why(case: str, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        await play(case, 1)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(("temperature", "of_training"), [(0.7, 0.7), (0.0, 0.7), (1.0, 1.0)])
async def test_a_request_belongs_to_the_running_calls_whose_settings_it_asks_for(
    temperature: float, of_training: float, order: int
) -> None:
    client = InferenceEngineClient([ScriptedEngine(free_running=True)], TOKENIZER)
    await client.start()
    await client.load_weights(scripted_update(0), PauseMode.KEEP)
    endpoint = AgentEndpoint(client, ServerSettings(open=True))
    training, evaluation = (ServedResponses(SamplingParams(temperature=each), []) for each in (of_training, 0.0))
    endpoint.calls += [training, evaluation][::order]
    generation = await endpoint.complete(GenerationRequest([5], SamplingParams(max_tokens=4, temperature=temperature)))
    row = [5], generation.token_ids, [1] * len(generation.token_ids), 1.0
    right, wrong = (evaluation, training) if temperature == 0 else (training, evaluation)
    assert right.row("p_0", *row).logprobs == generation.logprobs
    with pytest.raises(RolloutError, match="no request has reached"):
        wrong.row("p_0", *row)
    # The same tokens under a grammar have other log-probs.
    span = GrammarSpan(0, 4, "regex", ".*")
    key = array("i", [5]).tobytes()
    right.add(key, _digest(key), None, replace(generation, grammar=span))
    right.row("p_0", *row)
    with pytest.raises(RolloutError, match="with and without a grammar"):
        right.check_shared()
    await client.teardown()


async def test_a_request_with_a_samples_name_gets_the_settings_of_its_call() -> None:
    engine = ScriptedEngine(free_running=True)
    client = InferenceEngineClient([engine], TOKENIZER)
    await client.start()
    await client.load_weights(scripted_update(0), PauseMode.KEEP)
    endpoint = AgentEndpoint(client, ServerSettings(open=True))
    endpoint.calls += [ServedResponses(SamplingParams(temperature=each), [f"at {each}"]) for each in (0.7, 0.0)]
    for temperature in (0.7, 0.0):
        await endpoint.complete(GenerationRequest([5], SamplingParams(max_tokens=4), session_id=f"at {temperature}"))
        assert SamplingParams.parse(engine.requests[-1]["sampling_params"]).temperature == temperature
    await client.teardown()


async def test_an_endpoint_that_cannot_serve_when_its_url_is_asked_for_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def start(self: EndpointServer) -> str:
        raise OSError("no file descriptors are left")

    monkeypatch.setattr(EndpointServer, "start", start)
    endpoint = AgentEndpoint(InferenceEngineClient([ScriptedEngine()], TOKENIZER), ServerSettings(open=True))
    await endpoint.start()
    await asyncio.to_thread(endpoint.url)
    await settle()
    await endpoint.aclose()
    assert "no file descriptors are left" in caplog.text


def test_a_wrong_setting_of_the_endpoint_is_told_before_models_are_loaded() -> None:
    with pytest.raises(ConfigError, match=r"generator\.kwargs\.endpoint\.prot is unknown"):
        check_import_paths(compose("base", ["generator.name=skyrl", "generator.kwargs.endpoint={prot: 1}"]))
