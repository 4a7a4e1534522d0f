"""HTTP to one vLLM server: the link of the remote engine.

    submit ──POST /inference/v1/generate──> server     a task per request reads its answer into a queue
    pause, resume, workers' methods ──POST──> server   (its middleware: remote_server.py)

The server says which weight version sampled which tokens; that is exact because versions change only while it is paused.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import ssl
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import aiohttp
import orjson

from skyrl_train.errors import ConfigError, EngineDeadError, EngineError, RequestError, SkyRLError
from skyrl_train.inference.engines.vllm.remote_server import ENGINE_PATH, REQUESTS_PATH
from skyrl_train.inference.engines.vllm.remote_wire import (
    GENERATE_PATH,
    ResponsePart,
    ServerInfo,
    error_message,
    parse_part,
    parse_version,
    request_body,
)
from skyrl_train.inference.engines.vllm.requests import (
    VLLM_PAUSE_MODES,
    EngineRequest,
    InFlightRequest,
    Spans,
    VLLMLink,
    interrupted,
    token_versions,
)
from skyrl_train.inference.interface import TokenChunk
from skyrl_train.types import PauseMode

logger = logging.getLogger(__name__)
IDLE_S = 4.0  # below the 5 s after which the server closes an idle connection
RETRY_S = 0.5  # between looks for a server that is still starting; nothing announces it
ARRIVAL_S = 0.02  # for a request that was sent before an abort and arrives after it: then it is aborted again
VERIFY_ROUNDS = 3
RESTARTED = "it was started again and holds no synced weights"
_JSON = {"Content-Type": "application/json"}
# A machine that vanished closes nothing; the kernel finds out: first probe after 20 s of silence, dead after 3 x 10 s more.
_KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), seconds)
        for name, seconds in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
        if hasattr(socket, name)
    ),
]


def _keepalive_socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    for option in _KEEPALIVE:
        made.setsockopt(*option)
    return made


def _succeeded(response: aiohttp.ClientResponse) -> bool:
    return 200 <= response.status < 300


class Connection:
    """HTTP calls to one server, and what each failure means. Create it on a running event loop.

    Generation requests share connections, without a limit to their number; each other call has a fresh one, which no idle
    timeout of the server can have closed meanwhile. Proxies that the environment names are not used.

    Args:
        base_url: such as ``http://host:8000``.
        api_key: sent as a bearer token.
        control_timeout_s: limit of every call but generation, which has none.
    """

    def __init__(self, base_url: str, api_key: str | None, control_timeout_s: float) -> None:
        self.url = base_url
        self._base = base_url.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._control_timeout_s = control_timeout_s
        self._patient = aiohttp.ClientTimeout(total=None, sock_connect=control_timeout_s)
        self._certificates = ssl.create_default_context()
        # Control calls keep no connection, so none is lost to the server's idle timeout.
        self._control = self._session(force_close=True)
        self._generation = self._session(keepalive_timeout=IDLE_S)

    def _session(self, **options: Any) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, ssl=self._certificates, socket_factory=_keepalive_socket, **options)
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._control_timeout_s, sock_read=self._control_timeout_s
        )
        return aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            timeout=timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            json_serialize_bytes=orjson.dumps,
        )

    async def close(self) -> None:
        """Close all connections, which aborts the requests on them."""
        try:
            await self._control.close()
        finally:
            await self._generation.close()

    async def get(self, path: str) -> Any:
        """Return the JSON at ``path``; errors as in :meth:`post`."""
        return await self._exchange(self._control, "GET", path)

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, patient: bool = False) -> Any:
        """Return the server's JSON answer.

        Args:
            patient: wait for the answer without a time limit.

        Raises:
            RequestError: the server rejects the request.
            ConfigError: the key is wrong, or the server was started without what is needed here.
            EngineError: the server failed, or did not answer in time.
            EngineDeadError: the server is gone.
        """
        options = {"timeout": self._patient} if patient else {}
        return await self._exchange(self._control, "POST", path, json=body, **options)

    async def generate(self, body: bytes) -> Any:
        """Return the whole answer to a request, whose body is JSON; errors as in :meth:`post`."""
        return await self._exchange(
            self._generation, "POST", GENERATE_PATH, data=body, headers=_JSON, timeout=self._patient
        )

    async def stream(self, body: bytes) -> AsyncIterator[Any]:
        """Yield the events of a streamed answer; errors as in :meth:`post`."""
        try:
            async with self._generation.post(
                self._base + GENERATE_PATH, data=body, headers=_JSON, timeout=self._patient, allow_redirects=False
            ) as response:
                if not _succeeded(response):
                    self._check(response, await response.read())
                rest = b""
                async for piece in response.content.iter_any():
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        if line.startswith(b"data: ") and line.rstrip() != b"data: [DONE]":
                            yield orjson.loads(line.removeprefix(b"data: "))
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(error) from error

    async def _exchange(self, session: aiohttp.ClientSession, method: str, path: str, **options: Any) -> Any:
        try:
            async with session.request(method, self._base + path, allow_redirects=False, **options) as response:
                content = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(error) from error
        self._check(response, content)
        try:
            return orjson.loads(content) if content else None
        except orjson.JSONDecodeError as error:
            raise EngineError(
                f"The vLLM server at {self.url} answers {path} with no JSON: {content[:200]!r}"
            ) from error

    def _lost(self, error: aiohttp.ClientError | OSError) -> EngineError:
        """Return what an error on the way to the server means."""
        if isinstance(error, aiohttp.SocketTimeoutError):
            return EngineError(f"The vLLM server at {self.url} did not answer within {self._control_timeout_s:g} s.")
        return EngineDeadError(f"The vLLM server at {self.url} is gone: {str(error) or type(error).__name__}.")

    def _check(self, response: aiohttp.ClientResponse, content: bytes) -> None:
        if _succeeded(response):
            return
        status, path = response.status, response.url.path
        try:
            message = error_message(orjson.loads(content))
        except (ValueError, AttributeError):
            message = content.decode(errors="replace")[:200]
        match status:
            case HTTPStatus.UNAUTHORIZED | HTTPStatus.FORBIDDEN:
                raise ConfigError(
                    f"The vLLM server at {self.url} rejects the API key; set api_key to the key that it was started with."
                )
            case HTTPStatus.NOT_FOUND | HTTPStatus.METHOD_NOT_ALLOWED if "not found" in message.lower() or not message:
                raise ConfigError(
                    f"The vLLM server at {self.url} has no {path}; start it as docs/tutorials/engines.md says."
                )
            case HTTPStatus.BAD_REQUEST | HTTPStatus.NOT_FOUND | HTTPStatus.UNPROCESSABLE_ENTITY:
                raise RequestError(f"vLLM rejects the request: {message}")
            case _:
                raise EngineError(f"The vLLM server at {self.url} failed {path} with status {status}: {message}")


# Asks the server for the spans that a request has now: None when it has ended (its last part then brings them).
AskSpans = Callable[[str], Awaitable[Spans | None]]


@dataclass(eq=False, slots=True)
class RemoteRequest(InFlightRequest):
    """A request to a server. ``outputs`` is a list of ``ResponsePart`` values, and of the error that ended it.

    There are thousands at once, so that it has no :class:`asyncio.Queue`, which takes 3 KiB.

    Attributes:
        arrival: of an output, for the one who waits for it.
        version: what the server held when it was sent.
        loads: updates that the server had loaded by then; later, how many of them ``spans`` covers.
        suspect: the server may have prefilled it from what earlier weights had cached.
        held: parts whose versions are not known yet.
        reader: the task that reads its answer.
    """

    version: int = -1
    loads: int = 0
    suspect: bool = False
    held: list[ResponsePart] = field(default_factory=list)
    reader: asyncio.Task[None] | None = None
    arrival: asyncio.Future[None] | None = None

    def put(self, output: ResponsePart | Exception) -> None:
        """Add an output."""
        self.outputs.append(output)
        if self.arrival is not None and not self.arrival.done():
            self.arrival.set_result(None)

    async def get(self) -> ResponsePart | Exception:
        """Take the next output, once there is one. One caller at a time."""
        while not self.outputs:
            self.arrival = asyncio.get_running_loop().create_future()
            await self.arrival
        output: ResponsePart | Exception = self.outputs.pop(0)
        return output

    async def label(self, part: ResponsePart, loads: int, version: int, ask: AskSpans) -> TokenChunk | None:
        """Return the next tokens with their versions; None while the server has not said which ones these are.

        Args:
            loads: updates that the server has loaded so far.
            version: of the last one.
        """
        self.held.append(part)
        if part.spans is not None or part.stop_reason is not None:
            self.spans = part.spans or []  # of the whole request; vLLM sends them at its end
        elif self.loads != loads:
            # An update came between: these tokens can be of either version, and the server knows.
            spans = await ask(self.key)
            if spans is None:
                return None
            self.spans = spans
            if spans and spans[-1][0] == version:
                self.loads = loads
        # The versions of all held parts are known now; hand them out as one chunk.
        parts, self.held = self.held, []
        token_ids = [token for part in parts for token in part.token_ids]
        logprobs = [logprob for part in parts for logprob in part.logprobs]
        versions = token_versions(self.spans, self.delivered, len(token_ids))
        self.delivered += len(token_ids)
        top = None
        if self.request.params.top_logprobs:
            top = [alternatives for part in parts for alternatives in part.top_logprobs or ()]
        cached = max(part.cached_tokens for part in parts)
        return TokenChunk(token_ids, logprobs, versions, parts[-1].stop_reason, top, cached)


class ServerLink(VLLMLink):
    """One vLLM server, for as long as it is the same process: ``instance`` of its :class:`ServerInfo`.

    Args:
        version: of the weights that the server holds.
    """

    def __init__(self, connection: Connection, instance: str, version: int, on_death: Callable[[str], None]) -> None:
        super().__init__("The remote vLLM engine", on_death)
        self.instance = instance
        self._connection = connection
        self._version = version
        self._loads = 0
        # The server may have other clients. A UUID for each request would be a system call for each.
        self._request_ids = map(f"{uuid.uuid4().hex}-{{}}".format, itertools.count())
        self._readers: set[asyncio.Task[None]] = set()
        self._pausing: asyncio.Future[Any] | None = None
        self._info_now = SharedLook(lambda: connection.get(ENGINE_PATH))
        self._requests_now = SharedLook(lambda: connection.get(REQUESTS_PATH))

    def failure(self, error: Exception) -> Exception:
        """See :class:`VLLMLink`."""
        if isinstance(error, EngineDeadError):
            self.die(str(error))
            return self._dead()
        return error

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, patient: bool = False) -> Any:
        """See :meth:`Connection.post`."""
        return await self.answer(self._connection.post(path, body, patient=patient))

    async def look(self) -> ServerInfo:
        """Return what the server is now.

        Raises:
            EngineDeadError: it does not answer, its engine is dead, or it is another process than before.
        """
        try:
            # Any failure counts as death: an engine whose state is unknown must not serve.
            info = ServerInfo.parse(await self.answer(self._info_now.get()))
        except SkyRLError as error:
            self.die(str(error))
            raise self._dead() from error
        if info.instance != self.instance:
            self.die(RESTARTED)
        elif info.dead:
            self.die("its engine process is dead")
        self.raise_if_dead()
        return info

    async def unfinished_requests(self) -> Mapping[str, Any]:
        """Return the server's unfinished requests by key; see :func:`remote_server.unfinished`."""
        found: Mapping[str, Any] = await self.answer(self._requests_now.get())
        return found

    async def on_workers(self, method: str, *arguments: Any, patient: bool = False) -> list[Any]:
        """See :class:`VLLMLink`. ``patient``: wait without a time limit."""
        answer = await self.post("/collective_rpc", {"method": method, "args": arguments}, patient=patient)
        results: list[Any] = answer["results"]
        return results

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*self._readers, return_exceptions=True)
        await self._connection.close()

    # Requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest, salt: str, version: int) -> RemoteRequest:
        """See :class:`VLLMLink`."""
        self.raise_if_dead()
        request_id = next(self._request_ids)
        in_flight = RemoteRequest(
            request,
            key=f"generate-tokens-{request_id}",  # the server's own name for it
            outputs=[],
            spans=[(version, 0)],
            version=version,
            loads=self._loads,
        )
        # The task reads as fast as the server writes: a slow caller must not stop the server's stream.
        reader = asyncio.create_task(self._read(in_flight, request_id, salt), name="remote-vllm-request")
        in_flight.reader = reader
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        self.prefill_tokens += len(request.prompt)  # less what the answer says that the server had cached
        return in_flight

    async def _read(self, in_flight: RemoteRequest, request_id: str, salt: str) -> None:
        num_top = in_flight.request.params.top_logprobs
        # Whatever goes wrong here ends up in the outputs: otherwise next_chunk() would wait for ever.
        try:
            # Copied: what orjson returns keeps its working buffer (16 KiB in 3.13) for as long as the request takes.
            body = memoryview(orjson.dumps(request_body(request_id, in_flight.request, salt))).tobytes()
            if in_flight.request.stream:
                ended = False
                async for event in self._connection.stream(body):
                    part = parse_part(event, num_top)
                    in_flight.put(part)
                    ended = part.stop_reason is not None
                if not ended:
                    raise EngineError("The vLLM server did not finish its answer to a request.")
            else:
                in_flight.put(parse_part(await self._connection.generate(body), num_top))
        except SkyRLError as error:
            in_flight.put(error)
        except Exception as error:
            in_flight.put(EngineError(f"The vLLM server's answer to a request is unreadable: {error!r}"))

    async def next_chunk(self, in_flight: InFlightRequest) -> TokenChunk:
        """See :class:`VLLMLink`."""
        assert isinstance(in_flight, RemoteRequest), "requests come from submit()"
        first = in_flight.delivered == 0
        chunk = None
        while chunk is None:
            part = await in_flight.get()
            if isinstance(part, EngineError):
                await self.look()  # raises if the server is gone
                if not isinstance(part, EngineDeadError):
                    raise part
                logger.info("a connection was lost: %s", part)
                return interrupted(in_flight.request)
            if isinstance(part, Exception):
                raise part
            chunk = await in_flight.label(part, self._loads, self._version, self._spans_now)
        self.prefill_tokens -= chunk.cached_tokens
        if in_flight.version >= 0 and -1 in chunk.versions:
            self.die(RESTARTED)
            self.raise_if_dead()
        if first and in_flight.suspect and chunk.versions and chunk.versions[0] == self._version:
            # It reached the server after the update, with the salt of before it.
            in_flight.restart, in_flight.delivered = True, 0
            return TokenChunk([], [], [])
        return chunk

    async def _spans_now(self, key: str) -> Spans | None:
        found = (await self.unfinished_requests()).get(key)
        return None if found is None else [(parse_version(label), start) for label, start in found["versions"]]

    async def finish(self, in_flight: InFlightRequest, ended: bool) -> None:
        """See :class:`VLLMLink`. A connection that is closed early aborts its request in the server."""
        assert isinstance(in_flight, RemoteRequest) and in_flight.reader is not None, "requests come from submit()"
        in_flight.reader.cancel()

    def fail(self, in_flight: InFlightRequest, error: EngineDeadError) -> None:
        """See :class:`VLLMLink`."""
        assert isinstance(in_flight, RemoteRequest) and in_flight.reader is not None, "requests come from submit()"
        in_flight.put(error)
        in_flight.reader.cancel()

    async def abort(self, requests: Sequence[InFlightRequest]) -> None:
        """See :class:`VLLMLink`; returns when the server has answered all of these."""
        keys = [in_flight.key for in_flight in requests]
        readers = (one.reader for one in requests if isinstance(one, RemoteRequest))
        waiting = {reader for reader in readers if reader is not None and not reader.done()}
        while waiting:
            await self.post("/abort_requests", {"request_ids": keys})
            # One that was sent before the abort may arrive after it, and needs another.
            _, waiting = await asyncio.wait(waiting, timeout=ARRIVAL_S)

    async def abort_all(self, requests: Sequence[InFlightRequest]) -> None:
        """See :class:`VLLMLink`."""
        await self.abort(requests)

    async def verify_empty(self, requests: Sequence[InFlightRequest]) -> None:
        """See :class:`VLLMLink`. A request that its caller gave up may have arrived after the pause; it is aborted."""
        await self.abort(requests)
        left = 0
        for _ in range(VERIFY_ROUNDS):
            info = await self.look()
            left = max(info.unfinished, info.held)
            if not left:
                return
            if keys := list(await self.unfinished_requests()):
                await self.post("/abort_requests", {"request_ids": keys})
        raise EngineError(f"The vLLM server still holds {left} requests after it reported them aborted.")

    async def any_begun(self, requests: Sequence[InFlightRequest]) -> bool:
        """See :class:`VLLMLink`."""
        found, keys = await self.unfinished_requests(), {in_flight.key for in_flight in requests}
        return any(state["sampled"] for key, state in found.items() if key in keys)

    # Scheduling and weights ---------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """See :class:`VLLMLink`."""
        # A cache that is emptied cannot serve a request that is still on its way and carries the old salt.
        clear = "false" if mode is PauseMode.KEEP else "true"
        path = f"/pause?mode={VLLM_PAUSE_MODES[mode]}&clear_cache={clear}"
        # The server pauses even if the caller of this gives up, so the call is kept and resume() looks at it.
        self._pausing = asyncio.ensure_future(self.post(path, patient=mode is PauseMode.WAIT))
        self._pausing.add_done_callback(lambda call: call.cancelled() or call.exception())  # seen without a waiter
        await asyncio.shield(self._pausing)
        if not (await self.look()).paused:
            raise EngineError(f"The vLLM server still runs after a pause with {mode.value!r}.")

    async def resume(self) -> None:
        """See :class:`VLLMLink`."""
        while not (self._pausing is None or self._pausing.done() or (await self.look()).paused):
            pass  # a pause that is on its way must not arrive after the resume; each look is a round trip
        await self.post("/resume")
        if (await self.look()).paused:
            raise EngineError("The vLLM server is still paused after resume().")

    async def reset_prefix_cache(self) -> None:
        """See :class:`VLLMLink`."""
        await self.post("/reset_prefix_cache")

    async def load_weights(self, version: int) -> float:
        """See :class:`VLLMLink`. From here on the server labels tokens with ``version``."""
        # Load first, then the label: a load that fails must not leave the new label on old weights.
        seconds: list[float] = await self.on_workers("skyrl_load", version, patient=True)
        await self.post("/update_weight_version", {"new_version": str(version)})
        return max(seconds)

    async def weights_changed(
        self, requests: Sequence[InFlightRequest], version: int, mode: PauseMode
    ) -> list[InFlightRequest]:
        """See :class:`VLLMLink`. The other modes have emptied the cache, so that only ``keep`` has requests to submit again."""
        self._version = version
        self._loads += 1
        if mode is not PauseMode.KEEP:
            return []
        found = await self.unfinished_requests()
        without_tokens = []
        for in_flight in requests:
            state = found.get(in_flight.key)
            if state is None and isinstance(in_flight, RemoteRequest):
                in_flight.suspect = True  # on its way there, or its answer on its way here: its first token will tell
            elif state is not None and state["sampled"] == 0:
                without_tokens.append(in_flight)
        return without_tokens


class SharedLook:
    """Shares one HTTP call among callers. A caller never gets an answer that was asked for before it called."""

    def __init__(self, look: Callable[[], Awaitable[Any]]) -> None:
        self._look = look
        self._running: asyncio.Future[Any] | None = None
        self._next: asyncio.Future[Any] | None = None

    async def get(self) -> Any:
        """Return the answer to a call that begins after this one."""
        # A call that runs already may have left before what the caller wants to see; the next one has not.
        if self._next is None:
            self._next = asyncio.ensure_future(self._after(self._running))
            # Its exception counts as seen, even if no caller waits for it.
            self._next.add_done_callback(lambda call: call.cancelled() or call.exception())
        return await asyncio.shield(self._next)

    async def _after(self, running: asyncio.Future[Any] | None) -> Any:
        if running is not None:
            await asyncio.wait({running})
        self._running, self._next = self._next, None
        return await self._look()


async def wait_for_server(connection: Connection, timeout_s: float) -> ServerInfo:
    """Return what the server is, once it is up and its engine lives.

    Raises:
        ConfigError: it rejects the key, or lacks the middleware.
        EngineDeadError: it is not up in time.
    """
    reason = "it did not answer"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    info = ServerInfo.parse(await connection.get(ENGINE_PATH))
                except EngineError as error:
                    reason = str(error)
                else:
                    if not info.dead:
                        return info
                    reason = "its engine process is dead"
                await asyncio.sleep(RETRY_S)
    except TimeoutError:
        raise EngineDeadError(
            f"No vLLM server at {connection.url} within start_timeout_s={timeout_s:g}: {reason}"
        ) from None
