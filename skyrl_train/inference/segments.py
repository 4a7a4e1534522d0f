"""One segment of a response on one engine: whole where nobody needs the pieces, streamed where somebody does."""

from __future__ import annotations

from collections.abc import Callable

from skyrl_train.inference.continuation import Continuation
from skyrl_train.inference.interface import InferenceEngineInput, InferenceEngineInterface, only_chunk

# Of a response that nobody reads in pieces, so many tokens at most are lost with an engine that dies.
KEPT_TOKENS = 64


async def run_segment(
    engine: InferenceEngineInterface,
    engine_input: InferenceEngineInput,
    response: Continuation,
    number: int,
    on_progress: Callable[[], None] | None,
) -> None:
    """Runs segment ``number`` of ``response`` to its end; ``on_progress`` is called after each piece.

    Raises:
        RequestError: the engine cannot serve it.
        EngineError: the engine failed or broke the contract.
    """
    if on_progress is None and not response.needs_stream:
        if not engine.capabilities.chunked_streaming:
            response.add(only_chunk(await engine.generate(engine_input)), number)
            return
        engine_input["chunk_tokens"] = KEPT_TOKENS
    stream = engine.stream(engine_input)
    try:
        async for chunk in stream:
            response.add(chunk, number)
            if on_progress is not None:
                on_progress()
            if response.stop_reason is not None:
                break
    finally:
        await stream.aclose()  # type: ignore[attr-defined]  # leaving early aborts the request in the engine
