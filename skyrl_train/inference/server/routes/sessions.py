"""Sessions from outside: opened by the administrator, used, rewarded, finished and looked at by their own key."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from skyrl_train.inference.dialects.errors import DialectError
from skyrl_train.inference.dialects.fields import Field, Integer, Number, Support, Text, read_fields
from skyrl_train.inference.server.auth import Caller
from skyrl_train.inference.server.gateway import Gateway, gateway_of
from skyrl_train.inference.server.openapi import body_docs, json_docs
from skyrl_train.inference.sessions.session import Session

router = APIRouter(prefix="/v1/sessions")

OPEN_FIELDS = (Field("session_id", Support.SUPPORTED, Text(min_length=1), "a name of your own; default: a random one"),)
_REWARD = Field("reward", Support.SUPPORTED, Number(minimum=-1e30, maximum=1e30), "a number", required=True)
REWARD_FIELDS = (
    _REWARD,
    Field("turn", Support.SUPPORTED, Integer(0, 2**31 - 1), "of one turn; default: the session's"),
)
FINISH_FIELDS = (Field("reward", Support.SUPPORTED, _REWARD.kind, "of the session"),)
_STATISTICS = ("id", "turns", "branches", "sampled_tokens", "finished")


@router.post("", **body_docs(OPEN_FIELDS, "Opens a session; for the administrator.", ("id", "api_key"), 201))
async def open_session(request: Request) -> Response:
    gateway = gateway_of(request)
    if not gateway.caller(request).is_admin:
        raise DialectError("Only the administrator opens sessions.", code="admin_only", status=403)
    values = await _read(gateway, request, OPEN_FIELDS)
    session_id = values.get("session_id")
    if session_id is not None and gateway.store.get(session_id) is not None:
        raise DialectError(
            f"There is a session {session_id!r:.100} already.", "session_id", "session_exists", status=409
        )
    opened = gateway.store.open(session_id)
    return _json({"id": opened.session.id, "object": "session", "api_key": opened.api_key}, 201)


@router.get("/{session_id}", **json_docs("What happened in a session.", _STATISTICS))
async def get_session(request: Request, session_id: str) -> Response:
    _, session = _session(request, session_id)
    return _json(_statistics(session))


@router.post("/{session_id}/reward", **body_docs(REWARD_FIELDS, "Sets a reward.", _STATISTICS))
async def reward_session(request: Request, session_id: str) -> Response:
    gateway, session = _session(request, session_id)
    values = await _read(gateway, request, REWARD_FIELDS)
    session.set_reward(values["reward"], values.get("turn"))
    return _json(_statistics(session))


@router.post("/{session_id}/finish", **body_docs(FINISH_FIELDS, "Ends a session.", _STATISTICS))
async def finish_session(request: Request, session_id: str) -> Response:
    gateway, session = _session(request, session_id)
    values = await _read(gateway, request, FINISH_FIELDS)
    gateway.store.finish(session_id, values.get("reward"))
    return _json(_statistics(session))


@router.get("/{session_id}/sequences", **json_docs("A finished session as training data.", ("id", "sequences")))
async def export_session(request: Request, session_id: str) -> Response:
    _, session = _session(request, session_id)
    sequences = await session.export()
    body = await run_in_threadpool(
        # One sequence at a time: a single large dump would hold the interpreter lock for all of it.
        lambda: b'{"id":%b,"sequences":[%b]}' % (orjson.dumps(session.id), b",".join(map(orjson.dumps, sequences)))
    )
    return Response(body, media_type="application/json")


@router.delete("/{session_id}", **json_docs("Forgets a session and its key.", ("id", "deleted")))
async def delete_session(request: Request, session_id: str) -> Response:
    gateway, session = _session(request, session_id)
    gateway.store.close(session.id)
    return _json({"id": session.id, "object": "session.deleted", "deleted": True})


def _session(request: Request, session_id: str) -> tuple[Gateway, Session]:
    """The session in the path, where its caller may see it; others learn nothing of it, not even that it exists."""
    gateway = gateway_of(request)
    caller: Caller = gateway.caller(request)
    session = gateway.store.get(session_id)
    if session is None or not caller.may_see(session_id):
        raise DialectError(f"There is no session {session_id!r:.100}.", code="session_not_found", status=404)
    return gateway, session


async def _read(gateway: Gateway, request: Request, fields: tuple[Field, ...]) -> dict[str, Any]:
    return read_fields(fields, (await gateway.body(request)).fields)


def _statistics(session: Session) -> dict[str, Any]:
    return {"id": session.id, "object": "session", **asdict(session.statistics())}


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")
