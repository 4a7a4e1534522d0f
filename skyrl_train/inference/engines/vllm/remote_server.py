"""Middleware for ``vllm serve``: it asks for the API key on every path, and tells a trainer about the engine.

vLLM's own key guards the paths of its public API; without more, any client that reaches the port can pause the engine or
load weights. :class:`EngineRoutes` asks for the same key everywhere but on ``/health``, and adds two paths:

| path | answer |
|---|---|
| ``GET /skyrl/engine`` | the engine's settings, its machine, and its present state |
| ``GET /skyrl/requests`` | per unfinished request: tokens sampled, and at which token each weight version began |

The module is imported by the server and imports no vLLM.
"""

from __future__ import annotations

import hashlib
import json
import os
import pkgutil
import secrets
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from skyrl_train.inference.engines.vllm.arguments import SCHEDULER, WORKER_EXTENSION
from skyrl_train.inference.grammar import end_token_ids
from skyrl_train.weight_sync.shared_area import machine

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MIDDLEWARE = "skyrl_train.inference.engines.vllm.remote_server.EngineRoutes"
KEY_VARIABLE = "VLLM_API_KEY"
ENGINE_PATH, REQUESTS_PATH = "/skyrl/engine", "/skyrl/requests"
_OPEN_PATHS = frozenset({"/health"})


class EngineRoutes:
    """ASGI middleware around vLLM's application; one per server process, to which it gives an identity."""

    def __init__(self, app: App) -> None:
        self._app = app
        # A server that was restarted under the same address has other weights: the trainer tells the two apart by this.
        self._instance = uuid.uuid4().hex

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer our paths, and pass on requests for others that have the key."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        path, state = scope["path"], scope["app"].state
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"), None)
        keys = [key for key in (getattr(state.args, "api_key", None) or [os.environ.get(KEY_VARIABLE)]) if key]
        if path not in _OPEN_PATHS and not authorized(given, keys):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                await _answer(send, 401, {"error": {"message": "The API key is missing or wrong."}})
        elif path == ENGINE_PATH:
            await _answer(send, 200, await self._engine(state))
        elif path == REQUESTS_PATH:
            await _answer(send, 200, unfinished(state.engine_client))
        else:
            await self._app(scope, receive, send)

    async def _engine(self, state: Any) -> dict[str, Any]:
        engine, config = state.engine_client, state.vllm_config
        has_tokenizer = not config.model_config.skip_tokenizer_init
        grammars = has_tokenizer and config.scheduler_config.scheduler_cls == SCHEDULER
        facts = {
            "instance": self._instance,
            "machine": machine(),
            "dead": bool(engine.errored),
            "max_model_len": int(config.model_config.max_model_len),
            "logprobs_mode": str(
                getattr(config.model_config.logprobs_mode, "value", config.model_config.logprobs_mode)
            ),
            "max_logprobs": int(config.model_config.max_logprobs),
            "priorities": config.scheduler_config.policy == "priority",
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "structured_output": grammars,
            "stop_strings": has_tokenizer and not getattr(state.args, "tokens_only", False),
            "end_token_ids": end_token_ids(engine.get_tokenizer(), config.model_config.hf_config) if grammars else [],
            "token_endpoint": bool(getattr(state.args, "enable_scale_out", False)),
            "speculative_decoding": config.speculative_config is not None,
            "server_processes": int(getattr(state.args, "api_server_count", None) or 1),
            "data_parallel_size": int(config.parallel_config.data_parallel_size),
            "weight_reception": receives_weights(config.parallel_config.worker_extension_cls),
        }
        # A dead engine answers no call, and without our extension its workers lack the method.
        if facts["dead"] or not facts["weight_reception"]:
            return facts
        held = max(await engine.collective_rpc("skyrl_held_requests"))
        kv_cache_usage = max(await engine.collective_rpc("skyrl_kv_cache_usage"))
        return facts | {
            "weight_version": await engine.get_weight_version(),
            "paused": bool(await engine.is_paused()),
            "unfinished": int(engine.output_processor.get_num_unfinished_requests()),
            "held": int(held),
            "kv_cache_usage": float(kv_cache_usage),
        }


def receives_weights(extension: str) -> bool:
    """Return whether vLLM's ``worker_extension_cls`` names our extension, or a subclass of it."""
    try:
        return extension == WORKER_EXTENSION or (
            bool(extension) and issubclass(pkgutil.resolve_name(extension), pkgutil.resolve_name(WORKER_EXTENSION))
        )
    except (ImportError, AttributeError, ValueError, TypeError):  # not a class that this process can import
        return False


def authorized(authorization: str | None, keys: list[str]) -> bool:
    """Return whether an Authorization header carries one of ``keys``, always True without keys. Takes constant time."""
    if not keys:
        return True
    scheme, _, given = (authorization or "").partition(" ")
    # Digests have one length and are ASCII, as a comparison in constant time needs; all keys are compared for the same reason.
    digest = hashlib.sha256(given.encode()).digest()
    matches = [secrets.compare_digest(digest, hashlib.sha256(key.encode()).digest()) for key in keys]
    return scheme.lower() == "bearer" and any(matches)


def unfinished(engine: Any) -> dict[str, Any]:
    """Return, by the caller's request id, the tokens sampled so far and ``[version, first token]`` of each weight version."""
    return {
        state.external_req_id: {
            "sampled": int(state.detokenizer.num_output_tokens()),
            "versions": [[version, start] for version, start in state.weight_version_starts],
        }
        for state in engine.output_processor.request_states.values()
    }


async def _answer(send: Send, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
