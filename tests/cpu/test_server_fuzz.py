"""The endpoint under requests that its own OpenAPI schema suggests, right ones and wrong ones."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from endpoint_worlds import ADMIN_KEY, WatchedEngine, World, endpoint
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

schemathesis = pytest.importorskip("schemathesis")
checks = pytest.importorskip("schemathesis.checks")

EXAMPLES = [8, pytest.param(40, marks=pytest.mark.slow)]  # of each operation
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
    checks.negative_data_rejection,
]
# Of right requests: else each would end at its model, or at the context. Wrong ones are wrong by the endpoint's own schema,
# where 21 tokens are as good as 20.
FEW = {"type": "integer", "minimum": 1, "maximum": 20}
SMALL = {
    "model": {"enum": ["policy"]},
    "max_tokens": FEW,
    "max_completion_tokens": FEW,
    "max_output_tokens": FEW,
    "min_tokens": FEW,
}
OPERATIONS = [
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/responses",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /inference/v1/generate",
    "POST /tokenize",
    "POST /detokenize",
    "GET /v1/models",
    "GET /v1/models/{model}",
    "GET /v1/responses/{response_id}",
    "DELETE /v1/responses/{response_id}",
    "GET /health",
    "GET /metrics",
    "POST /v1/sessions",
    "GET /v1/sessions/{session_id}",
    "POST /v1/sessions/{session_id}/reward",
    "POST /v1/sessions/{session_id}/finish",
    "GET /v1/sessions/{session_id}/sequences",
    "DELETE /v1/sessions/{session_id}",
]


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """A small world on its own event loop: the fuzzer waits for the responses synchronously."""
    ready, urls, stops = threading.Event(), [], []

    async def serve() -> None:
        stop = asyncio.Event()
        async with endpoint(WatchedEngine(max_model_len=512, free_running=True)) as world:
            world.store.open("known")
            urls.append(url_of(world))
            stops.append((asyncio.get_running_loop(), stop))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(300)
    yield urls[0]
    [(loop, stop)] = stops
    loop.call_soon_threadsafe(stop.set)
    thread.join(60)
    assert not thread.is_alive()


def url_of(world: World) -> str:
    return str(world.http.base_url).rstrip("/")


def read_schema(served: str, limits: dict[str, Any]) -> Any:
    """Return the endpoint's schema, in which bodies have ``limits`` for their fields of these names."""
    document = httpx.get(f"{served}/openapi.json").json()
    for item in document["paths"].values():
        for operation in item.values():
            properties = body_schema(operation).get("properties", {})
            properties.update({name: limit for name, limit in limits.items() if name in properties})
    known = {"name": "session_id", "in": "path", "required": True, "schema": {"type": "string"}, "example": "known"}
    for path, item in document["paths"].items():
        if "{session_id}" in path:
            for operation in item.values():
                operation["parameters"] = [known]
    return schemathesis.openapi.from_dict(document)


def body_schema(operation: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = operation.get("requestBody", {}).get("content", {})
    return dict(content.get("application/json", {}).get("schema", {}))


def reduced(case: Any, kept: set[str], required: list[str]) -> Any:
    """The same with few optional fields: with all of them at once, one is always wrong for the others."""
    if isinstance(case.body, dict):
        case.body = {name: value for name, value in case.body.items() if name in kept or name in required}
    return case


def test_every_operation_is_fuzzed(served: str) -> None:
    found = {operation.ok().label for operation in read_schema(served, {}).get_all_operations()}
    assert found == set(OPERATIONS)


@pytest.fixture(scope="module")
def fuzz(served: str) -> Callable[[str, int], None]:
    """Sends requests to an operation and checks the answers; once, whichever test asks for it first."""
    right, wrong = read_schema(served, SMALL), read_schema(served, {})
    return functools.cache(lambda label, examples: send_requests(label, examples, served, right, wrong))


def send_requests(label: str, examples: int, served: str, right_schema: Any, wrong_schema: Any) -> None:
    method, path = label.split(" ")
    operation = right_schema[path][method]
    modes = schemathesis.GenerationMode
    cases = operation.as_strategy(generation_mode=modes.POSITIVE)
    if method == "POST":
        asked = body_schema(operation.definition.raw)
        few = st.sets(st.sampled_from(sorted(asked["properties"])), max_size=4)
        right = st.builds(reduced, cases, few, st.just(asked.get("required", [])))
        cases = right | right | cases | wrong_schema[path][method].as_strategy(generation_mode=modes.NEGATIVE)

    @settings(
        max_examples=examples,
        derandomize=True,  # the set of valid requests must not change from run to run
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def answered(case: Any) -> None:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        case.call_and_validate(base_url=served, headers=headers, checks=CHECKS, timeout=300)

    answered()


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("label", OPERATIONS)
def test_no_request_is_answered_wrongly(label: str, examples: int, fuzz: Callable[[str, int], None]) -> None:
    fuzz(label, examples)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_some_of_the_requests_were_right(served: str, examples: int, fuzz: Callable[[str, int], None]) -> None:
    for label in OPERATIONS[:7]:
        fuzz(label, examples)
    text = httpx.get(f"{served}/metrics", headers={"Authorization": f"Bearer {ADMIN_KEY}"}).text
    right = [
        label
        for label in OPERATIONS[:7]
        if f'skyrl_http_requests_total{{route="{label.split(" ")[1]}",status="200"}}' in text
    ]
    assert len(right) >= 4, f"only {right}: requests that are always rejected test little"
    assert "skyrl_http_requests_in_flight 1.0" in text.splitlines(), "this one"
