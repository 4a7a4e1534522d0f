"""Keys and sessions over HTTP: permissions, recording, and no secrets in logs."""

from __future__ import annotations

import dataclasses
import gc
import logging
from typing import Any

import pytest
from endpoint_worlds import ADMIN_KEY, ASK, TOKENIZER, WatchedEngine, World, endpoint

from skyrl_train.endpoint.sessions import SessionLimits
from skyrl_train.inference.interface import EngineCapabilities

CHAT = "/v1/chat/completions"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def opened(world: World, session_id: str | None = None) -> tuple[str, str]:
    answer = await world.http.post("/v1/sessions", json={} if session_id is None else {"session_id": session_id})
    assert answer.status_code == 201, answer.text
    return answer.json()["id"], answer.json()["api_key"]


async def test_a_session_becomes_training_data() -> None:
    async with endpoint() as world:
        name, key = await opened(world)
        sdk = world.sdk(key)
        messages: list[Any] = list(ASK["messages"])
        for turn in range(2):
            done = await sdk.chat.completions.create(
                model="policy", messages=messages, max_tokens=6, seed=turn, extra_body={"return_token_ids": True}
            )
            messages += [
                done.choices[0].message.model_dump(include={"role", "content"}),
                {"role": "user", "content": "7"},
            ]
        assert done.model_extra["skyrl"]["reused_tokens"] == 4 + 6
        reward = await world.http.post(
            f"/v1/sessions/{name}/reward", json={"reward": 0.5, "turn": 1}, headers=bearer(key)
        )
        assert reward.json()["turns"] == 2
        finished = await world.http.post(f"/v1/sessions/{name}/finish", json={"reward": 1.0}, headers=bearer(key))
        assert finished.json()["finished"] and finished.json()["branches"] == 1
        exported = (await world.http.get(f"/v1/sessions/{name}/sequences", headers=bearer(key))).json()["sequences"]
        [sequence] = exported
        assert sum(sequence["loss_mask"]) == 12 and sum(sequence["rewards"]) == 1.5
        assert [v for v, m in zip(sequence["versions"], sequence["loss_mask"], strict=True) if m] == [0] * 12
        deleted = await world.http.delete(f"/v1/sessions/{name}", headers=bearer(key))
        assert deleted.json()["deleted"]
        assert (await world.http.get(f"/v1/sessions/{name}")).status_code == 404
        assert (await world.http.post(CHAT, json=ASK, headers=bearer(key))).status_code == 401


async def test_names_of_sessions_and_models_may_have_slashes() -> None:
    async with endpoint(model_names=["Qwen/Qwen3-0.6B"]) as world:
        asked = {**ASK, "model": "Qwen/Qwen3-0.6B", "max_tokens": 3}
        assert (await world.openai.models.retrieve(asked["model"])).id == asked["model"]
        assert (await world.http.get("/v1/models/")).json()["data"][0]["id"] == asked["model"]
        named = "math/train/17@3_0"
        assert (await world.http.post(CHAT, json=asked, headers={"x-session-id": named})).status_code == 200
        session = f"/v1/sessions/{named}"
        assert (await world.http.get(session)).json()["turns"] == 1
        assert (await world.http.post(f"{session}/reward", json={"reward": 1.0})).json()["id"] == named
        assert (await world.http.post(f"{session}/finish", json={})).json()["finished"]
        assert len((await world.http.get(f"{session}/sequences")).json()["sequences"]) == 1
        assert (await world.http.delete(session)).json()["deleted"] and len(world.store) == 0


async def test_a_prefill_is_continued_in_both_apis_and_recorded_as_prompt() -> None:
    conversation = [*ASK["messages"], {"role": "assistant", "content": "45"}]
    async with endpoint() as world:
        name, key = await opened(world)
        rendered = [*TOKENIZER("0123")["input_ids"], *TOKENIZER("45")["input_ids"]]
        body = {"model": "policy", "messages": conversation, "max_tokens": 6, "seed": 3, "return_token_ids": True}
        chat = {**body, "continue_final_message": True, "add_generation_prompt": False}
        openais = (await world.http.post(CHAT, json=chat, headers=bearer(key))).json()
        anthropics = (await world.http.post("/v1/messages", json=body, headers=bearer(key))).json()
        assert openais["prompt_token_ids"] == anthropics["skyrl"]["prompt_token_ids"] == rendered
        [choice] = openais["choices"]
        assert choice["token_ids"] == anthropics["skyrl"]["token_ids"]
        assert choice["message"]["content"] == anthropics["content"][0]["text"]
        count = {"model": "policy", "messages": conversation}
        counted = await world.http.post("/v1/messages/count_tokens", json=count, headers=bearer(key))
        assert counted.json() == {"input_tokens": 6}
        await world.http.post(f"/v1/sessions/{name}/finish", json={}, headers=bearer(key))
        exported = (await world.http.get(f"/v1/sessions/{name}/sequences", headers=bearer(key))).json()["sequences"]
        assert [sequence["prompt_token_ids"] for sequence in exported] == [rendered] * 2
        assert [sequence["loss_mask"] for sequence in exported] == [[1] * 6] * 2


async def test_the_header_names_a_session_for_the_administrator_alone() -> None:
    async with endpoint() as world:
        named = {"x-session-id": "mine"}
        for _ in range(2):
            assert (await world.http.post(CHAT, json={**ASK, "max_tokens": 2}, headers=named)).status_code == 200
        assert (await world.http.get("/v1/sessions/mine")).json()["turns"] == 2
        _, key = await opened(world, "other")
        await world.http.post(CHAT, json={**ASK, "max_tokens": 2}, headers={**named, **bearer(key)})
        assert (await world.http.get("/v1/sessions/mine")).json()["turns"] == 2
        assert (await world.http.get("/v1/sessions/other")).json()["turns"] == 1, "its own key decides"


@pytest.mark.parametrize("open_to_all", [False, True])
async def test_a_sessions_key_counts_beside_a_token_that_means_nothing_here(open_to_all: bool) -> None:
    """Clients of Anthropic's API may send ANTHROPIC_AUTH_TOKEN of their environment beside the key that they were given."""
    async with endpoint(open=open_to_all) as world:
        name, key = await opened(world)
        for headers in ({**bearer("of another service"), "x-api-key": key}, {**bearer(key), "x-api-key": "another"}):
            assert (await world.http.post(CHAT, json={**ASK, "max_tokens": 2}, headers=headers)).status_code == 200
        assert (await world.http.get(f"/v1/sessions/{name}")).json()["turns"] == 2


async def test_only_a_generation_opens_the_session_that_the_header_names() -> None:
    async with endpoint() as world:
        named = {"x-session-id": "mine"}
        for method, path in (("GET", "/v1/models"), ("GET", "/v1/sessions/mine"), ("POST", "/tokenize")):
            await world.http.request(method, path, json={"prompt": "0"} if method == "POST" else None, headers=named)
        assert len(world.store) == 0


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("limits", "fields", "words"),
    [
        ({"max_turns": 2}, {"n": 3, "max_tokens": 4}, "max_turns"),
        ({"max_tokens": 50}, {"n": 2, "max_tokens": 40}, "max_tokens"),
    ],
)
async def test_all_choices_of_a_request_count_against_the_limits(
    limits: dict[str, int], fields: dict[str, int], words: str, streamed: bool
) -> None:
    async with endpoint(limits=SessionLimits(**limits)) as world:
        _, key = await opened(world)
        for path, body in ((CHAT, ASK), ("/v1/completions", {"model": "policy", "prompt": "0123"})):
            answer = await world.http.post(path, json={**body, **fields, "stream": streamed}, headers=bearer(key))
            assert answer.status_code == 400 and answer.json()["error"]["code"] == "session_error"
            assert words in answer.json()["error"]["message"]
        assert world.engine.requests == []
        answer = await world.http.post(CHAT, json={**ASK, **fields, "n": 1, "stream": streamed}, headers=bearer(key))
        assert answer.status_code == 200


class AdaptingEngine(WatchedEngine):
    """Takes LoRA adapters."""

    @property
    def capabilities(self) -> EngineCapabilities:
        return dataclasses.replace(super().capabilities, adapters=True)

    async def load_adapter(self, name: str, path: str) -> None: ...


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_an_adapter_samples_is_no_data_of_the_policy(streamed: bool) -> None:
    async with endpoint(AdaptingEngine(free_running=True)) as world:
        await world.client.load_adapter("judge", "/judge")
        name, key = await opened(world)
        prompts = {CHAT: ASK, "/v1/completions": {"prompt": "0123"}}
        for path, asked in prompts.items():
            for model in ("policy", "judge"):
                body = {**asked, "model": model, "max_tokens": 3, "stream": streamed}
                assert (await world.http.post(path, json=body, headers=bearer(key))).status_code == 200
        asked_of = [request.get("adapter") for request in world.engine.requests]
        assert asked_of == [None, "judge", None, "judge"]
        assert all(request["session_ids"] == [name] for request in world.engine.requests), "they stay on one engine"
        statistics = (await world.http.get(f"/v1/sessions/{name}", headers=bearer(key))).json()
        assert (statistics["turns"], statistics["sampled_tokens"]) == (2, 6)


async def test_completions_are_recorded_and_extend_by_tokens() -> None:
    async with endpoint() as world:
        name, key = await opened(world)
        create, prompt = world.sdk(key).completions.create, [5, 6]
        for seed in range(2):
            done = await create(
                model="policy",
                prompt=prompt,
                max_tokens=4,
                seed=seed,
                stream=False,
                extra_body={"return_token_ids": True},
            )
            prompt = prompt + done.choices[0].model_extra["skyrl"]["token_ids"] + [7]
        statistics = (await world.http.get(f"/v1/sessions/{name}")).json()
        assert (statistics["turns"], statistics["branches"]) == (2, 1)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", CHAT),
        ("POST", "/v1/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/inference/v1/generate"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/policy"),
        ("GET", "/metrics"),
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/sessions"),
        ("GET", "/v1/sessions/victim"),
        ("POST", "/v1/sessions/victim/reward"),
        ("POST", "/v1/sessions/victim/finish"),
        ("GET", "/v1/sessions/victim/sequences"),
        ("DELETE", "/v1/sessions/victim"),
    ],
)
async def test_nothing_is_served_without_a_key(method: str, path: str) -> None:
    async with endpoint() as world:
        await opened(world, "victim")
        for headers in ({"authorization": ""}, bearer("sk-wrong"), {"authorization": "Basic x"}, bearer("\xff" * 8)):
            raw = {name: value.encode("latin-1") for name, value in headers.items()}
            answer = await world.http.request(method, path, json={} if method == "POST" else None, headers=raw)
            assert answer.status_code == 401, answer.text
            assert answer.headers["www-authenticate"] == "Bearer"
        assert world.engine.requests == []


def test_every_route_is_in_the_list_above() -> None:
    from fastapi.routing import APIRoute

    from skyrl_train.endpoint.server.app import ROUTERS

    [listed] = [mark.args[1] for mark in test_nothing_is_served_without_a_key.pytestmark if mark.name == "parametrize"]
    guarded = {
        (
            method,
            path.replace("victim", "{session_id}").replace("/policy", "/{model}").replace("resp_1", "{response_id}"),
        )
        for method, path in listed
    }
    routes = {
        (method, route.path_format)
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    assert routes - guarded == {("GET", "/health")}


async def test_a_response_history_is_dropped_with_its_session() -> None:
    async with endpoint() as world:
        session_id, key = await opened(world, "teller")
        body = {"model": "policy", "input": "0123", "max_output_tokens": 3}
        for _ in range(2):
            answer = await world.http.post("/v1/responses", json=body, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200, answer.text
        assert [len(history) for history in world.gateway.response_histories.values()] == [2]
        await world.http.delete(f"/v1/sessions/{session_id}")
        gc.collect()
        assert len(world.gateway.response_histories) == 0


async def test_a_session_sees_only_itself() -> None:
    async with endpoint() as world:
        await opened(world, "victim")
        _, key = await opened(world, "thief")
        for method, path, body in (
            ("GET", "", None),
            ("POST", "/reward", {"reward": 1}),
            ("POST", "/finish", {}),
            ("GET", "/sequences", None),
            ("DELETE", "", None),
        ):
            theirs = await world.http.request(method, f"/v1/sessions/victim{path}", json=body, headers=bearer(key))
            nobodys = await world.http.request(method, f"/v1/sessions/nobody{path}", json=body, headers=bearer(key))
            assert theirs.status_code == nobodys.status_code == 404
            assert theirs.json()["error"]["code"] == nobodys.json()["error"]["code"]
        assert (await world.http.post("/v1/sessions", json={}, headers=bearer(key))).status_code == 403
        assert (await world.http.get("/metrics", headers=bearer(key))).status_code == 403
        assert (await world.http.get("/v1/sessions/victim")).json()["finished"] is False


async def test_a_finished_session_takes_no_requests() -> None:
    async with endpoint() as world:
        name, key = await opened(world)
        await world.http.post(f"/v1/sessions/{name}/finish", json={})
        answer = await world.http.post(CHAT, json=ASK, headers=bearer(key))
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "session_error"
        assert (await world.http.post("/v1/sessions", json={"session_id": name})).status_code == 409
        assert (await world.http.get(f"/v1/sessions/{name}/sequences")).status_code == 400, "nothing was sampled"
        assert (await world.http.post("/v1/sessions", json={"session_id": "two words"})).status_code == 400


async def test_a_full_store_and_a_spent_staleness_budget_give_429() -> None:
    async with endpoint(limits=SessionLimits(max_sessions=1, retry_after_s=2.5)) as world:
        await opened(world)
        answer = await world.http.post("/v1/sessions", json={})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
        by_header = await world.http.post(CHAT, json=ASK, headers={"x-session-id": "new"})
        assert (by_header.status_code, by_header.json()["error"]["type"]) == (429, "rate_limit_error")
    async with endpoint(admission=lambda: 7.0) as world:
        answer = await world.http.post("/v1/sessions", json={})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")


async def test_an_open_endpoint_serves_this_machine_only() -> None:
    async with endpoint(open=True, admin_key=None) as world:
        anyone = world.sdk("whatever")
        assert (await anyone.chat.completions.create(**ASK, max_tokens=2)).choices
        lured = await world.http.post(CHAT, json=ASK, headers={"host": "evil.example", "authorization": ""})
        assert lured.status_code == 401, "a page in a browser that goes by another name"
        simple = await world.http.post(CHAT, content=b"{}", headers={"content-type": "text/plain", "authorization": ""})
        assert simple.status_code == 415, "a request that a web page may send without a preflight"


async def test_no_key_can_be_read_from_a_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.DEBUG)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio", "fastapi", "skyrl_train"):
        caplog.set_level(logging.DEBUG, name)
    async with endpoint(WatchedEngine(free_running=True)) as world:
        _, key = await opened(world)
        caplog.clear()  # the HTTP client of the test logs for itself
        monkeypatch.setattr(logging.getLogger("httpx"), "disabled", True)
        monkeypatch.setattr(logging.getLogger("httpcore"), "disabled", True)
        ask = {**ASK, "max_tokens": 3}
        for secret in (key, ADMIN_KEY, "sk-a-wrong-one"):
            for headers in (bearer(secret), {"x-api-key": secret, "authorization": ""}):
                for body in (ask, {**ask, "model": "x"}, {**ask, "stream": True}, {**ask, secret: 1}):
                    answer = await world.http.post(CHAT, json=body, headers=headers)
                    if secret not in body:
                        assert secret not in answer.text
                    await world.http.get("/v1/models", headers=headers)

        def broken(*_: Any, **__: Any) -> Any:
            raise ZeroDivisionError

        monkeypatch.setattr(world.client.renderer, "render", broken)
        assert (await world.http.post(CHAT, json=ASK, headers=bearer(ADMIN_KEY))).status_code == 500
        assert ADMIN_KEY not in repr(world.gateway.settings)
    assert "ZeroDivisionError" in caplog.text
    for secret in (key, ADMIN_KEY, "sk-a-wrong-one"):
        assert secret not in caplog.text and secret[-12:] not in caplog.text
