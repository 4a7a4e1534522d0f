"""HTTP to one vLLM server: many requests at once, and what each failure means."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from skyrl_train.errors import ConfigError, EngineDeadError, EngineError, RequestError
from skyrl_train.inference.engines.vllm.remote_wire import GENERATE_PATH, error_message

IDLE_S = 4.0  # below the 5 s after which the server closes an idle connection
POOL_REQUESTS = 64  # a client's connection pool looks at all of its connections for every request
# A machine that vanished closes nothing; the kernel finds out: first probe after 20 s of silence, dead after 3 x 10 s more.
_KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), seconds)
        for name, seconds in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
        if hasattr(socket, name)
    ),
]


@dataclass
class _Pool:
    client: httpx.AsyncClient
    in_flight: int = 0


class Connection:
    """Requests share connections, without a limit to their number; each other call has a fresh one, which no idle timeout
    of the server can have closed meanwhile. Proxies that the environment names are not used.

    Args:
        base_url: such as ``http://host:8000``.
        api_key: sent as a bearer token.
        control_timeout_s: limit of every call but generation, which may take for ever.
    """

    def __init__(self, base_url: str, api_key: str | None, control_timeout_s: float) -> None:
        self._url = base_url.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._control_timeout_s = control_timeout_s
        self._patient = httpx.Timeout(control_timeout_s, read=None, write=None)
        self._certificates = ssl.create_default_context()
        self._control = self._client(kept=0)
        self._pools: list[_Pool] = []

    def _client(self, kept: int | None) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=kept, keepalive_expiry=IDLE_S)
        transport = httpx.AsyncHTTPTransport(verify=self._certificates, limits=limits, socket_options=_KEEPALIVE)
        return httpx.AsyncClient(
            base_url=self._url,
            headers=self._headers,
            transport=transport,
            timeout=self._control_timeout_s,
            trust_env=False,
        )

    @contextlib.contextmanager
    def _pool(self) -> Iterator[httpx.AsyncClient]:
        """A client with few enough requests in flight."""
        pool = next((pool for pool in self._pools if pool.in_flight < POOL_REQUESTS), None)
        if pool is None:
            pool = _Pool(self._client(kept=None))
            self._pools.append(pool)
        pool.in_flight += 1
        try:
            yield pool.client
        finally:
            pool.in_flight -= 1

    async def close(self) -> None:
        """Closes all connections, which aborts what they carry."""
        for client in (self._control, *(pool.client for pool in self._pools)):
            await client.aclose()

    async def get(self, path: str) -> Any:
        """The JSON at ``path``; errors as in :meth:`post`."""
        return await self._exchange(self._control, self._control.build_request("GET", path))

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, patient: bool = False) -> Any:
        """The server's JSON answer.

        Args:
            patient: waits for the answer without limit.

        Raises:
            RequestError: the server refuses what was asked.
            ConfigError: the key is wrong, or the server was started without what is needed here.
            EngineError: the server failed, or did not answer in time.
            EngineDeadError: nobody is there any more.
        """
        timeout = self._patient if patient else httpx.USE_CLIENT_DEFAULT
        return await self._exchange(
            self._control, self._control.build_request("POST", path, json=body, timeout=timeout)
        )

    async def generate(self, body: Mapping[str, Any]) -> Any:
        """The whole answer to a request; errors as in :meth:`post`."""
        with self._pool() as client:
            request = client.build_request("POST", GENERATE_PATH, json=body, timeout=self._patient)
            return await self._exchange(client, request)

    async def stream(self, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        """The events of a streamed answer; errors as in :meth:`post`."""
        try:
            with self._pool() as client:
                async with client.stream("POST", GENERATE_PATH, json=body, timeout=self._patient) as response:
                    if not response.is_success:
                        await response.aread()
                        self._check(response)
                    async for line in response.aiter_lines():
                        if line.startswith("data: ") and line != "data: [DONE]":
                            yield json.loads(line.removeprefix("data: "))
        except httpx.TransportError as error:
            raise self._failure(error) from error

    async def _exchange(self, client: httpx.AsyncClient, request: httpx.Request) -> Any:
        try:
            response = await client.send(request)
        except httpx.TransportError as error:
            raise self._failure(error) from error
        self._check(response)
        return response.json() if response.content else None

    def _failure(self, error: httpx.TransportError) -> EngineError:
        what = str(error) or type(error).__name__
        if isinstance(error, (httpx.ReadTimeout, httpx.WriteTimeout)):
            return EngineError(f"The vLLM server at {self._url} did not answer within {self._control_timeout_s:g} s.")
        return EngineDeadError(f"The vLLM server at {self._url} is gone: {what}.")

    def _check(self, response: httpx.Response) -> None:
        if response.is_success:
            return
        status, path = response.status_code, response.request.url.path
        try:
            message = error_message(response.json())
        except (ValueError, AttributeError):
            message = response.text[:200]
        match status:
            case httpx.codes.UNAUTHORIZED | httpx.codes.FORBIDDEN:
                raise ConfigError(
                    f"The vLLM server at {self._url} refuses the API key; give api_key what it was started with."
                )
            case httpx.codes.NOT_FOUND | httpx.codes.METHOD_NOT_ALLOWED if (
                "not found" in message.lower() or not message
            ):
                raise ConfigError(
                    f"The vLLM server at {self._url} has no {path}; start it as docs/tutorials/engines.md says."
                )
            case httpx.codes.BAD_REQUEST | httpx.codes.NOT_FOUND | httpx.codes.UNPROCESSABLE_ENTITY:
                raise RequestError(f"vLLM refuses the request: {message}")
            case _:
                raise EngineError(f"The vLLM server at {self._url} failed {path} with status {status}: {message}")
