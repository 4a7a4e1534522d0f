"""Routes with plain JSON answers: models, tokenize, detokenize, health, metrics, stored responses and sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from skyrl_train.endpoint.dialects.responses import ResponseHistory
from skyrl_train.endpoint.server.gateway import METRICS_TYPE, Gateway, gateway_of
from skyrl_train.endpoint.server.openapi import ERRORS, body_docs, json_docs
from skyrl_train.endpoint.sessions.session import Session
from skyrl_train.inference.openai.body import JsonObject, NonEmpty, RequestBody, TokenId, Whole
from skyrl_train.inference.openai.completions import check_vocabulary, encode_text
from skyrl_train.inference.openai.errors import DialectError
from skyrl_train.inference.openai.messages import Messages, Tools, plain_messages, plain_tools
from skyrl_train.inference.pool.fleet import EngineState
from skyrl_train.inference.text_length import LONG_TEXT, check_characters

router = APIRouter()


class ModelBody(RequestBody):
    """A body that may name a model. The name is checked and has no other effect."""

    model: NonEmpty | None = Field(None, description="a name that GET /v1/models lists")


class TokenizeBody(ModelBody):
    """The body of ``POST /tokenize``."""

    prompt: str | None = Field(None, description="a text")
    messages: Messages | None = Field(None, description="or a conversation, rendered as for an answer")
    tools: Tools | None = Field(None, description="with messages")
    chat_template_kwargs: JsonObject | None = Field(None, description="with messages")
    add_special_tokens: bool | None = Field(None, description="with a prompt; default true")


class DetokenizeBody(ModelBody):
    """The body of ``POST /detokenize``."""

    tokens: list[TokenId] = Field(description="special ones are written out")


class OpenSessionBody(RequestBody):
    """The body that opens a session."""

    session_id: NonEmpty | None = Field(None, description="the session's name; default: a random one")


class RewardBody(RequestBody):
    """The body that sets a reward."""

    reward: float = Field(ge=-1e30, le=1e30, description="a number")
    turn: Annotated[int, Whole(0, 2**31 - 1)] | None = Field(None, description="of one turn; default: the session's")


class FinishSessionBody(RequestBody):
    """The body that finishes a session."""

    reward: float | None = Field(None, ge=-1e30, le=1e30, description="of the session")


B = TypeVar("B", bound=ModelBody)
_STATISTICS = ("id", "turns", "branches", "sampled_tokens", "finished")


# Models, tokens, state --------------------------------------------------------------------------------------------


@router.get("/v1/models", **json_docs("List the model names that requests may use.", ("object", "data")))
async def list_models(request: Request) -> Response:
    gateway = gateway_of(request)
    gateway.authenticate(request)
    return _json({"object": "list", "data": [_model(gateway, name) for name in gateway.model_names]})


@router.get("/v1/models/{model:path}", **json_docs("Describe one model.", ("id", "object")))
async def retrieve_model(request: Request, model: str) -> Response:
    if not model:  # /v1/models/
        return await list_models(request)
    gateway = gateway_of(request)
    gateway.authenticate(request)
    gateway.adapter(model)
    return _json(_model(gateway, model))


def _model(gateway: Gateway, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": gateway.started_at,
        "owned_by": "skyrl_train",
        "max_model_len": gateway.client.capabilities.max_model_len,
    }


@router.post("/tokenize", **body_docs(TokenizeBody, "Encode a text or a conversation.", ("tokens", "count")))
async def tokenize(request: Request) -> Response:
    gateway = gateway_of(request)
    body = await _read_tokenizer_body(gateway, request, TokenizeBody)
    limit = gateway.client.capabilities.max_model_len
    if body.messages is not None and body.prompt is None:
        tokens = await gateway.service.render(
            plain_messages(body.messages),
            tools=plain_tools(body.tools),
            template_kwargs=body.chat_template_kwargs or {},
        )
    elif body.prompt is not None and body.messages is None:
        check_characters(body.prompt, limit, "prompt")
        tokens = await encode_text(gateway.client, body.prompt, body.add_special_tokens is not False)
    else:
        raise DialectError("Give exactly one of prompt and messages.", "prompt", "invalid_value")
    return _json({"tokens": tokens, "count": len(tokens), "max_model_len": limit})


@router.post("/detokenize", **body_docs(DetokenizeBody, "Decode tokens.", ("prompt",)))
async def detokenize(request: Request) -> Response:
    gateway = gateway_of(request)
    tokens = (await _read_tokenizer_body(gateway, request, DetokenizeBody)).tokens
    check_vocabulary(gateway.client, tokens, "tokens")
    decode = partial(gateway.client.tokenizer.decode, tokens, skip_special_tokens=False)
    return _json({"prompt": await asyncio.to_thread(decode) if len(tokens) > LONG_TEXT else decode()})


async def _read_tokenizer_body(gateway: Gateway, request: Request, model: type[B]) -> B:
    gateway.authenticate(request)
    body = await (await gateway.read_body(request)).read_by(model.parse)
    if body.model is not None:
        gateway.adapter(body.model)
    return body


@router.get("/health", **json_docs("Report engine states; needs no key.", ("status", "policy_version", "engines")))
async def health(request: Request) -> Response:
    client = gateway_of(request).client
    states = {str(number): str(state) for number, state in client.engine_states.items()}
    # A load balancer should send requests here if at least one engine is healthy.
    serves = EngineState.HEALTHY in client.engine_states.values()
    status = "ok" if serves else "no engine"
    body = {"status": status, "policy_version": client.policy_version, "engines": states}
    return _json(body, 200 if serves else 503)


@router.get(
    "/metrics",
    summary="Return metrics in Prometheus' text format; administrator only.",
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **ERRORS},
    response_class=Response,
)
async def metrics(request: Request) -> Response:
    gateway = gateway_of(request)
    if not gateway.authenticate(request).is_admin:
        raise DialectError("Only the administrator reads metrics.", code="admin_only", status=403)
    return Response(gateway.metrics.text(gateway.client, len(gateway.store)), headers={"content-type": METRICS_TYPE})


# Stored responses -------------------------------------------------------------------------------------------------


@router.get(
    "/v1/responses/{response_id}",
    **json_docs("Return a stored response.", ("id", "object", "status", "output")),
)
async def get_response(request: Request, response_id: str) -> Response:
    if request.query_params.get("stream", "false").lower() != "false":
        raise DialectError("A stored response comes whole, not as a stream.", "stream", "unsupported_parameter")
    return _json(_responses(request).response(response_id))


@router.delete("/v1/responses/{response_id}", **json_docs("Delete a stored response.", ("id", "deleted")))
async def delete_response(request: Request, response_id: str) -> Response:
    _responses(request).delete(response_id)
    return _json({"id": response_id, "object": "response", "deleted": True})


def _responses(request: Request) -> ResponseHistory:
    gateway = gateway_of(request)
    return gateway.response_history(gateway.authenticate(request).session)


# Sessions: the administrator opens them; their own key uses, rewards, finishes and reads them --------------------
# A name may have slashes, like the name of a model.


@router.post(
    "/v1/sessions", **body_docs(OpenSessionBody, "Open a session; administrator only.", ("id", "api_key"), 201)
)
async def open_session(request: Request) -> Response:
    gateway = gateway_of(request)
    if not gateway.authenticate(request).is_admin:
        raise DialectError("Only the administrator opens sessions.", code="admin_only", status=403)
    # Checked here and not only in the store, because the status for a used name is 409.
    session_id = OpenSessionBody.parse((await gateway.read_body(request)).fields).session_id
    if session_id is not None and gateway.store.get(session_id) is not None:
        raise DialectError(
            f"There is a session {session_id!r:.100} already.", "session_id", "session_exists", status=409
        )
    opened = gateway.store.open(session_id)
    return _json({"id": opened.session.id, "object": "session", "api_key": opened.api_key}, 201)


@router.post("/v1/sessions/{session_id:path}/reward", **body_docs(RewardBody, "Set a reward.", _STATISTICS))
async def reward_session(request: Request, session_id: str) -> Response:
    session = _visible_session(request, session_id)
    body = RewardBody.parse((await gateway_of(request).read_body(request)).fields)
    session.set_reward(float(body.reward), body.turn)
    return _statistics(session)


@router.post("/v1/sessions/{session_id:path}/finish", **body_docs(FinishSessionBody, "Finish a session.", _STATISTICS))
async def finish_session(request: Request, session_id: str) -> Response:
    gateway, session = gateway_of(request), _visible_session(request, session_id)
    reward = FinishSessionBody.parse((await gateway.read_body(request)).fields).reward
    gateway.store.finish(session_id, None if reward is None else float(reward))
    return _statistics(session)


@router.get(
    "/v1/sessions/{session_id:path}/sequences",
    **json_docs("Return a finished session as training data.", ("id", "sequences")),
)
async def export_session(request: Request, session_id: str) -> Response:
    session = _visible_session(request, session_id)
    sequences = await session.export()
    body = await run_in_threadpool(
        # One sequence at a time: orjson holds the interpreter lock for a whole dump.
        lambda: b'{"id":%b,"sequences":[%b]}' % (orjson.dumps(session.id), b",".join(map(orjson.dumps, sequences)))
    )
    return Response(body, media_type="application/json")


# Behind the route of the sequences, whose path it matches too.
@router.get("/v1/sessions/{session_id:path}", **json_docs("Return a session's statistics.", _STATISTICS))
async def get_session(request: Request, session_id: str) -> Response:
    return _statistics(_visible_session(request, session_id))


@router.delete("/v1/sessions/{session_id:path}", **json_docs("Delete a session and its key.", ("id", "deleted")))
async def delete_session(request: Request, session_id: str) -> Response:
    session = _visible_session(request, session_id)
    gateway_of(request).store.close(session.id)
    return _json({"id": session.id, "object": "session.deleted", "deleted": True})


def _visible_session(request: Request, session_id: str) -> Session:
    """Return the session in the path.

    Raises:
        DialectError: 404 if it does not exist or belongs to another key; the response does not tell which.
    """
    gateway = gateway_of(request)
    principal = gateway.authenticate(request)
    session = gateway.store.get(session_id)
    # The answer is 404 for both cases: session names of others must not be guessable.
    owned = principal.session is not None and principal.session.id == session_id
    if session is None or not (principal.is_admin or owned):
        raise DialectError(f"There is no session {session_id!r:.100}.", code="session_not_found", status=404)
    return session


def _statistics(session: Session) -> Response:
    return _json({"id": session.id, "object": "session", **asdict(session.statistics())})


def _json(body: Mapping[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")
