"""A headless Chromium, driven by the DevTools protocol: opens pages, evaluates expressions in them, collects their complaints."""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One tab of a browser. ``complaints``: errors and warnings of the console, of scripts and of the network."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session = ""
        self._reader = asyncio.create_task(self._read())

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def size(self, width: int, height: int, *, dark: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=scheme)

    async def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, or of the promise that it is."""
        answer = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, (expression, answer, self.complaints)
        return answer["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until a JavaScript expression is true in the page, looked at before each frame; return its value."""
        watch = "new Promise(done => { const look = () => { let is; try { is = (EXPRESSION) } catch { is = null } "
        watch += "is ? done(is) : requestAnimationFrame(look) }; look() })"
        while True:
            try:
                return await self.value(watch.replace("EXPRESSION", expression))
            except NavigatedError:  # to another page, in which the expression may become true
                continue

    async def screenshot(self, path: Path) -> None:
        picture = await self.call("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(picture["data"]))

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": parameters}
        await self._socket.send_json(message | ({"sessionId": self._session} if self._session else {}))
        return await self._waiting[number]

    async def _begin(self) -> None:
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        self._session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def _read(self) -> None:
        async for message in self._socket:
            content = message.json()
            waiting = self._waiting.pop(content.get("id"), None)
            if waiting is not None and "error" in content:
                waiting.set_exception(NavigatedError(content["error"]["message"]))
            elif waiting is not None:
                waiting.set_result(content["result"])
            else:
                self._event(content.get("method"), content.get("params", {}))
        for waiting in self._waiting.values():
            waiting.set_exception(ConnectionError("the browser has ended"))

    def _event(self, method: str | None, said: dict[str, Any]) -> None:
        match method:
            case "Runtime.consoleAPICalled" if said["type"] in ("error", "warning", "assert"):
                self.complaints.append(
                    str([argument.get("value", argument.get("description")) for argument in said["args"]])
                )
            case "Runtime.exceptionThrown":
                self.complaints.append(str(said["exceptionDetails"]))
            case "Log.entryAdded" if said["entry"]["level"] in ("error", "warning"):
                self.complaints.append(f"{said['entry']['text']} {said['entry'].get('url', '')}")


class NavigatedError(Exception):
    """The page in which an expression ran is gone."""


@asynccontextmanager
async def browsing(profile: Path) -> AsyncIterator[Browser]:
    """Start a browser with its files in ``profile``, and end it."""
    assert CHROMIUM is not None
    options = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-background-networking"
    arguments = [*options.split(), "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
    process = await asyncio.create_subprocess_exec(CHROMIUM, *arguments, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        url = ""
        while not url:  # the line that tells the port
            line = (await process.stderr.readline()).decode()
            assert line, "Chromium has ended"
            url = line.partition("DevTools listening on ")[2].strip()
        drain = asyncio.create_task(process.stderr.read())
        async with aiohttp.ClientSession() as http, http.ws_connect(url, max_msg_size=0) as socket:
            browser = Browser(socket)
            await browser._begin()
            yield browser
            await browser.call("Page.close")
        drain.cancel()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
