"""The page's HTTP side: static files, JSON about runs, and a stream that says which part of a run has changed. It only reads."""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar
from urllib.parse import urlencode

import numpy as np
import orjson
from numpy.typing import NDArray
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import Headers, QueryParams
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skyrl_train.errors import NoSuchRunError
from skyrl_train.events.log import EVENTS
from skyrl_train.observability.metrics import known_spec
from skyrl_train.observability.page.prometheus import MAX_RUNS, exposition
from skyrl_train.observability.readers.comparison import AXES, best_run, compared
from skyrl_train.observability.readers.encoding import to_json
from skyrl_train.observability.readers.folders import RunsFolder, fingerprint, read_settings
from skyrl_train.observability.readers.incidents import checkpoint_steps, incidents, log_end, log_files, run_advice
from skyrl_train.observability.readers.samples import prompt_rows, step_rows, whole_sequence
from skyrl_train.observability.readers.series import MetricTable, curves
from skyrl_train.observability.readers.settings import differing_settings, setting_of, settings_table
from skyrl_train.observability.readers.timeline import EventStore
from skyrl_train.observability.readers.verdict import RECORD_SEGMENTS, verdict
from skyrl_train.observability.run_folder import CONFIG, EVALUATIONS, LOGS, METRICS, SAMPLES, read_jsonl

_Reader = TypeVar("_Reader", MetricTable, EventStore)

STATIC = Path(__file__).parent / "static"
POLL_S = 0.5  # between two looks at the files of a run that somebody watches
_QUIET_S = 15.0  # after which a comment tells proxies that the stream is alive
_KEPT_RUNS = 16  # whose columns are in memory
MAX_COMPARED = 12

_HEADERS = {
    # No inline script or style, nothing from elsewhere, no frame around the page.
    b"content-security-policy": b"default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    b"frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-cache",
}


def create_page(root: Path, token: str | None = None) -> Starlette:
    """Return the application for a folder of runs, or one run.

    Args:
        token: required of each request, as ``?token=``, which becomes a cookie, or as a bearer token. None: no token is needed,
            and only requests that name this machine as ``localhost`` or by a loopback address are answered.
    """
    page = _Page(RunsFolder(root))
    answers: dict[str, Callable[[QueryParams], Any]] = {
        "runs": page.runs_list,
        "run": page.run,
        "verdict": page.verdict,
        "advice": page.advice,
        "metrics": page.metrics,
        "settings": page.settings,
        "evaluations": page.evaluations,
        "checkpoints": page.checkpoints,
        "compare": page.compare,
        "engines": page.engines,
        "incidents": page.incidents,
        "log": page.log,
        "timeline": page.timeline,
        "samples": page.samples,
        "sample": page.sample,
        "prompt": page.prompt,
    }
    return Starlette(
        routes=[
            Route("/", lambda _: FileResponse(STATIC / "index.html")),
            *(Route(f"/api/{name}", _endpoint(answer)) for name, answer in answers.items()),
            Route("/api/live", page.live),
            Route("/metrics", page.prometheus),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(_Guard, token=token), Middleware(GZipMiddleware, minimum_size=2000, compresslevel=3)],
    )


class _Page:
    def __init__(self, runs: RunsFolder) -> None:
        self._runs = runs
        self._tables: OrderedDict[Path, MetricTable] = OrderedDict()
        self._events: OrderedDict[Path, EventStore] = OrderedDict()
        self._exported: OrderedDict[Path, EventStore] = OrderedDict()
        self._lock = Lock()

    def runs_list(self, query: QueryParams) -> Any:
        return {"folder": str(self._runs.root), "runs": self._runs.rows()}

    def run(self, query: QueryParams) -> Any:
        """The header of a run, its metrics with their meanings, flat ones last, and the fingerprints for :meth:`live`."""
        name = _text(query, "run")
        parts = fingerprint(self._runs.path(name))
        columns = self._table(name).columns()
        bound = setting_of(read_settings(self._runs.file(name, CONFIG)), "trainer.fully_async.max_staleness_steps")
        return {
            **self._runs.row(name),
            "parts": parts,
            "bound": bound,
            "metrics": [
                {"name": metric, "unit": spec.unit, "meaning": spec.meaning}
                for metric in sorted(columns, key=lambda name: _is_flat(columns[name]))
                if metric not in ("step", "time", "elapsed_s")
                for spec in [known_spec(metric)]
            ],
        }

    def verdict(self, query: QueryParams) -> Any:
        name = _text(query, "run")
        found = incidents(self._store(name), RECORD_SEGMENTS)
        return verdict(self._runs.row(name), self._table(name).columns(), found)

    def advice(self, query: QueryParams) -> Any:
        name = _text(query, "run")
        settings = read_settings(self._runs.file(name, CONFIG))
        advice = run_advice(self._table(name).columns(), self._store(name), settings)
        return [asdict(each) | {"docs": each.docs} for each in advice]

    def metrics(self, query: QueryParams) -> Any:
        table = self._table(_text(query, "run"))
        return curves(table, query.getlist("name"), since=_number(query, "since"), every=_number(query, "every"))

    def settings(self, query: QueryParams) -> Any:
        return settings_table(read_settings(self._runs.file(_text(query, "run"), CONFIG)))

    def evaluations(self, query: QueryParams) -> Any:
        return list(read_jsonl(self._runs.file(_text(query, "run"), EVALUATIONS)))

    def checkpoints(self, query: QueryParams) -> Any:
        return checkpoint_steps(self._store(_text(query, "run")), RECORD_SEGMENTS)

    def compare(self, query: QueryParams) -> Any:
        names, axis = query.getlist("run")[:MAX_COMPARED], query.get("axis", "step")
        if axis not in AXES:
            raise _BadQueryError(f"The parameter 'axis' is one of {', '.join(AXES)}.")
        runs = [self._runs.row(name) for name in names]
        at = compared([self._table(name).columns() for name in names], axis)
        return {
            "runs": runs,
            "at": at,
            "said": best_run([run["title"] for run in runs], at, axis),
            "settings": differing_settings([read_settings(self._runs.file(name, CONFIG)) for name in names]),
        }

    def timeline(self, query: QueryParams) -> Any:
        """What happened between ``t0`` and ``t1`` (Unix times), around ``step``, or during the last steps."""
        name = _text(query, "run")
        t0, t1 = _time(query, "t0"), _time(query, "t1")
        step = _number(query, "step")
        columns = self._table(name).columns() if step else {}
        if "time" in columns and "time/step" in columns:
            end = int(np.searchsorted(columns["step"], step))
            if end < len(columns["step"]) and np.isfinite(columns["time"][end] + columns["time/step"][end]):
                t1, length = float(columns["time"][end]), float(columns["time/step"][end])
                t0, t1 = t1 - 2.5 * length, t1 + 0.5 * length
        return self._store(name).window(t0, t1)

    def engines(self, query: QueryParams) -> Any:
        return self._store(_text(query, "run")).engines()

    def incidents(self, query: QueryParams) -> Any:
        name = _text(query, "run")
        return {"events": incidents(self._store(name)), "logs": log_files(self._runs.file(name, LOGS))}

    def log(self, query: QueryParams) -> Any:
        return {"text": log_end(self._runs.file(_text(query, "run"), LOGS), _text(query, "file"))}

    def samples(self, query: QueryParams) -> Any:
        return step_rows(self._sampled(query), query.get("phase", "train"), _number(query, "step"))

    def sample(self, query: QueryParams) -> Any:
        found = whole_sequence(
            self._sampled(query), _text(query, "phase"), _number(query, "step"), _number(query, "row")
        )
        if found is None or found["phase"] != "train":
            return found
        facts = [found[name] for name in ("group_index", "sample", "generation_s", "time")]
        if None in facts:  # a file of another version
            return found
        return {**found, "turns": self._store(_text(query, "run")).turns(*facts)}

    def prompt(self, query: QueryParams) -> Any:
        return prompt_rows(self._sampled(query), _text(query, "uid"))

    def _sampled(self, query: QueryParams) -> Path:
        """Return the folder of a run whose samples are below the root."""
        name = _text(query, "run")
        return self._runs.file(name, SAMPLES).parent

    async def live(self, request: Request) -> Response:
        """Stream the fingerprints of the parts of a run that changed."""
        try:
            path = self._runs.path(_text(request.query_params, "run"))
        except (NoSuchRunError, _BadQueryError) as error:
            return _error(error)

        async def changes() -> AsyncIterator[bytes]:
            sent: dict[str, str] = {}
            quiet_s = 0.0
            while True:
                parts = await asyncio.to_thread(fingerprint, path)  # a network file system may block
                changed = {part: text for part, text in parts.items() if text != sent.get(part)}
                quiet_s += POLL_S
                if changed:
                    yield b"data: " + orjson.dumps(changed) + b"\n\n"
                elif quiet_s >= _QUIET_S:
                    yield b": still here\n\n"
                if changed or quiet_s >= _QUIET_S:
                    quiet_s = 0.0
                sent = parts
                await asyncio.sleep(POLL_S)

        return StreamingResponse(changes(), media_type="text/event-stream")

    def prometheus(self, _: Request) -> Response:
        return Response(exposition(self._runs, self._exported_store), media_type=CONTENT_TYPE_LATEST)

    def _table(self, name: str) -> MetricTable:
        return self._kept(self._tables, self._runs.file(name, METRICS), MetricTable)

    def _store(self, name: str) -> EventStore:
        return self._kept(self._events, self._runs.file(name, EVENTS), EventStore)

    def _exported_store(self, name: str) -> EventStore:
        # Not those of the views: these have whole segments in memory, so only a few are kept, and each run is asked for here.
        return self._kept(self._exported, self._runs.file(name, EVENTS), EventStore, MAX_RUNS)

    def _kept(
        self,
        kept: OrderedDict[Path, _Reader],
        path: Path,
        make: Callable[[Path], _Reader],
        most: int = _KEPT_RUNS,
    ) -> _Reader:
        with self._lock:
            reader = kept.setdefault(path, make(path))
            kept.move_to_end(path)
            if len(kept) > most:
                kept.popitem(last=False)
        return reader


# Requests and responses --------------------------------------------------------------------------------------------


class _BadQueryError(ValueError):
    """A parameter is missing or is no number."""


def _text(query: QueryParams, name: str) -> str:
    value = query.get(name)
    if value is None:
        raise _BadQueryError(f"The parameter {name!r} is missing.")
    return str(value)


def _is_flat(values: NDArray[np.float64]) -> bool:
    known = values[np.isfinite(values)]
    return not len(known) or bool(known.min() == known.max())


def _number(query: QueryParams, name: str) -> int:
    """Return a whole number that is not negative; 0 if the parameter is missing."""
    text = query.get(name, "0")
    if not (text.isdecimal() and text.isascii() and len(text) < 16):
        raise _BadQueryError(f"The parameter {name!r} is a whole number, not {text!r}.")
    return int(text)


def _time(query: QueryParams, name: str) -> float | None:
    text = query.get(name)
    try:
        value = None if text is None else float(text)
    except ValueError:
        value = math.nan
    if value is not None and not math.isfinite(value):
        raise _BadQueryError(f"The parameter {name!r} is a Unix time in seconds, not {text!r}.")
    return value


def _endpoint(answer: Callable[[QueryParams], Any]) -> Callable[[Request], Response]:
    def respond(request: Request) -> Response:  # not async: Starlette calls it in a thread
        began = time.thread_time()
        try:
            content = to_json(answer(request.query_params))
            # The page asks for what is expensive less often.
            headers = {"server-timing": f"cpu;dur={1000 * (time.thread_time() - began):.1f}"}
            return Response(content, headers=headers, media_type="application/json")
        except (NoSuchRunError, _BadQueryError, OSError) as error:
            return _error(error)

    return respond


def _error(error: NoSuchRunError | _BadQueryError | OSError) -> Response:
    # A file of a run that cannot be read is of another user, or on a file server that does not answer.
    status = 404 if isinstance(error, NoSuchRunError) else 403 if isinstance(error, OSError) else 400
    return Response(to_json({"error": str(error)}), status, media_type="application/json")


class _Guard:
    """Answers only requests with the token; without one, only those that address this machine by a loopback name.

    A page of another site can make a browser send requests here under that site's name (DNS rebinding); it cannot send a cookie
    of this page, or name it ``localhost``.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token or None  # an empty variable is none

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS.items()]
            await send(message)

        response = self._refusal(Request(scope))
        await (response or self._app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        if self._token is None:
            if _names_this_machine(Headers(scope=request.scope).get("host", "")):
                return None
            return PlainTextResponse(
                "This page was started for this machine only. Open it as http://localhost:PORT, or start it with a token "
                "(SKYRL_PAGE_TOKEN).\n",
                403,
            )
        # Cookies do not tell ports apart: two pages of one machine need two names.
        cookie = f"skyrl_page_{(request.scope.get('server') or ('', 0))[1]}"
        given = request.query_params.get("token")
        if given is not None and self._is_token(given):
            rest = [(key, value) for key, value in request.query_params.multi_items() if key != "token"]
            response = RedirectResponse(f"?{urlencode(rest)}" if rest else request.url.path, 303)
            response.set_cookie(cookie, self._token, httponly=True, samesite="strict", path="/")
            return response
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(request.cookies.get(cookie, "")) or self._is_token(bearer):
            return None
        return PlainTextResponse("Open the address with its token, as the command printed it.\n", 401)

    def _is_token(self, given: str) -> bool:
        assert self._token is not None
        return hmac.compare_digest(given.encode(errors="replace"), self._token.encode())


def _names_this_machine(host: str) -> bool:
    """Return whether a Host header names this machine by a name that no DNS server decides."""
    name = host[: host.rfind("]") + 1] if host.startswith("[") else host.partition(":")[0]
    return name.lower() in ("localhost", "127.0.0.1", "[::1]")
