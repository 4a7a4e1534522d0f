"""vLLM's tokens in, tokens out: its shapes, its client, and sessions."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from chat_models import chat_renderer, encode
from dialect_answers import context
from dialect_world import MODEL, serving
from endpoint_worlds import WatchedEngine, endpoint
from test_dialect_vllm_fields import vllm_fields

from skyrl_train.endpoint.dialects import generate as dialect
from skyrl_train.inference.interface import StopReason
from skyrl_train.inference.openai.errors import DialectError
from skyrl_train.inference.requests import Generation, GenerationChunk

PATH = "/inference/v1/generate"
ASK: dict[str, Any] = {"model": "policy", "token_ids": [3, 4, 5], "sampling_params": {"max_tokens": 6, "seed": 3}}


def generation(stop_string: str | None = None) -> Generation:
    return Generation(
        prompt_token_ids=[3, 4, 5],
        token_ids=[7, 8, 9],
        logprobs=[-0.5, -1.0, -1.5],
        versions=[2, 2, 4],
        stop_reason=StopReason.STOP,
        text="",
        top_logprobs=[[(6, -0.1), (7, -0.5)], [(8, -1.0), (6, -2.0)], [(6, -0.2), (5, -0.3)]],
        stop_string=stop_string,
        cached_tokens=2,
    )


def call(**sampling: Any) -> dialect.GenerateCall:
    return dialect.parse({**ASK, "sampling_params": {**ASK["sampling_params"], **sampling}})


def test_a_response_has_vllms_shape() -> None:
    body = call(logprobs=2, stop_token_ids=[9]).response([generation()], context())
    [choice] = body["choices"]
    protocol = "entrypoints/scale_out/token_in_token_out/protocol.py"
    assert body.keys() - {"output_mode", "choices"} <= vllm_fields(protocol, "GenerateResponseBase").keys()
    assert choice.keys() - {"logprobs"} <= vllm_fields(protocol, "GenerateChoiceBase").keys()
    entry = choice["logprobs"]["content"][0]
    assert entry.keys() - {"token", "top_logprobs"} == vllm_fields(protocol, "GenerateLogProb").keys()
    assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == ([7, 8, 9], "stop", 9)
    assert choice["weight_versions"] == [
        {"version": "2", "start": 0, "end": 2},
        {"version": "4", "start": 2, "end": 3},
    ]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-0.5, -1.0, -1.5]
    tops = [[top["token_id"] for top in entry["top_logprobs"]] for entry in choice["logprobs"]["content"]]
    assert tops == [[7, 6], [8, 6], [9, 6]], "the sampled token first, then the most likely others"
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert call(stop="x").response([generation("x")], context())["choices"][0]["stop_reason"] == "x"
    assert call().response([generation()], context())["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(("asked", "alternatives"), [(None, 0), (0, 0), (1, 0), (2, 2), (20, 20)])
def test_the_sampled_token_is_one_of_the_log_probs(asked: int | None, alternatives: int) -> None:
    assert call(logprobs=asked).params.top_logprobs == alternatives


def test_the_chunks_of_a_stream_are_the_whole_response() -> None:
    asked = {**ASK, "sampling_params": {"logprobs": 1}, "stream": True, "stream_options": {"include_usage": True}}
    parsed, done = dialect.parse({**asked, "return_token_ids": True, "request_id": "mine"}), generation()
    stream = parsed.stream(context())
    pieces = [
        GenerationChunk(done.token_ids[:2], done.logprobs[:2], done.versions[:2]),
        GenerationChunk(),
        GenerationChunk(done.token_ids[2:], done.logprobs[2:], done.versions[2:], generation=done),
    ]
    frames = [frame for piece in pieces for frame in stream.chunk(0, piece)] + stream.closed()
    whole = parsed.response([done], context())
    assert len(frames) == 4 and frames[-1].data == "[DONE]"
    assert {frame.data["request_id"] for frame in frames[:-1]} == {"mine"}
    first, last = (frame.data["choices"][0] for frame in frames[:2])
    assert first["token_ids"] + last["token_ids"] == whole["choices"][0]["token_ids"]
    content = first["logprobs"]["content"] + last["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == done.logprobs
    assert last["weight_versions"] == whole["choices"][0]["weight_versions"]
    assert frames[0].data["prompt_token_ids"] == [3, 4, 5] and "prompt_token_ids" not in frames[1].data
    assert frames[2].data["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids[0]"),
        ({"sampling_params": None}, "sampling_params"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"min_tokens": 9, "max_tokens": 8}}, "sampling_params.min_tokens"),
        ({"sampling_params": {"prompt_logprobs": 1}}, "sampling_params.prompt_logprobs"),
        ({"sampling_params": {"beams": 2}}, "sampling_params.beams"),
        ({"output_mode": "text"}, "output_mode"),
        ({"features": {}}, "features"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_an_error_names_the_field(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(DialectError) as caught:
        dialect.parse({**ASK, **changes})
    assert dialect.error_body(caught.value)["error"]["param"] == param


async def test_prompts_of_tokens_extend_each_other_in_a_session() -> None:
    async with endpoint() as world:
        opened = world.store.open("s")
        headers = {"authorization": f"Bearer {opened.api_key}"}
        first = (await world.http.post(PATH, json=ASK, headers=headers)).json()
        prompt = [*ASK["token_ids"], *first["choices"][0]["token_ids"], 7]
        second = await world.http.post(PATH, json={**ASK, "token_ids": prompt}, headers=headers)
        assert second.status_code == 200, second.text
        statistics = opened.session.statistics()
        assert (statistics.turns, statistics.branches, statistics.sampled_tokens) == (2, 1, 12)


async def test_without_max_tokens_a_response_may_fill_the_context() -> None:
    async with endpoint(WatchedEngine(max_model_len=24, free_running=True)) as world:
        asked = {"token_ids": [3, 4, 5], "sampling_params": {"ignore_eos": True}}
        [choice] = (await world.http.post(PATH, json=asked)).json()["choices"]
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (21, "length")
        for wrong, param in (
            ({"token_ids": [3] * 24}, "sampling_params.max_tokens"),
            ({"token_ids": [10**6]}, "token_ids"),
            ({"sampling_params": {"logprobs": 20, "max_tokens": 22}}, "sampling_params.max_tokens"),
            ({"sampling_params": {"structured_outputs": {"regex": "a"}}}, "sampling_params.structured_outputs"),
        ):
            answer = await world.http.post(PATH, json={**asked, **wrong})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_the_client_that_verifiers_trains_with_gets_its_tokens() -> None:
    client = pytest.importorskip("renderers.client")
    family = chat_renderer(MODEL)._family
    assert family is not None
    async with serving(["<think>\nHm.\n</think>\n\nIt rains."]) as world:
        http = httpx.AsyncClient(trust_env=False)
        async with openai.AsyncOpenAI(base_url=world.base_url, api_key=world.api_key, http_client=http) as sdk:
            result = await client.generate(
                client=sdk,
                renderer=family.renderer({}),
                messages=[{"role": "user", "content": "Rain?"}],
                model="policy",
                sampling_params={"max_tokens": 50, "temperature": 1.0},
            )
        assert (result["content"], result["reasoning_content"]) == ("It rains.", "Hm.")
        assert result["completion_ids"] == encode(MODEL, "<think>\nHm.\n</think>\n\nIt rains.<|im_end|>")
        assert len(result["completion_logprobs"]) == len(result["completion_ids"])
        world.session.finish()
        [sequence] = world.session.sequences()
        assert (sequence.prompt_token_ids, sequence.response_ids) == (result["prompt_ids"], result["completion_ids"])
