"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _End:
    error: Exception | None


async def merged(streams: Sequence[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T]]:
    """Yields the items of all streams as they come, each with the number of its stream.

    A slow reader holds the streams back: each waits with one item. The first failure is raised; it closes all streams,
    and so does closing this iterator.
    """
    ready: asyncio.Queue[tuple[int, T | _End]] = asyncio.Queue(maxsize=1)

    async def feed(number: int, stream: AsyncIterator[T]) -> None:
        error = None
        try:
            async for item in stream:
                await ready.put((number, item))
        except Exception as caught:
            error = caught
        finally:
            await stream.aclose()  # type: ignore[attr-defined]
        await ready.put((number, _End(error)))

    feeding = [asyncio.create_task(feed(number, stream)) for number, stream in enumerate(streams)]
    try:
        running = len(feeding)
        while running:
            number, item = await ready.get()
            if not isinstance(item, _End):
                yield number, item
            elif item.error is not None:
                raise item.error
            else:
                running -= 1
    finally:
        for task in feeding:
            task.cancel()
        await asyncio.gather(*feeding, return_exceptions=True)
