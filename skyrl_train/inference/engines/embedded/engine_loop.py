"""The loop around the engine core. It owns the model, in a thread or in the main thread of a child process.

consumes        calls from its channel: all that are there, between two decode steps
waits for       a call, when the core has nothing to do
unblocked by    the channel
produces        a batch of answers to the calls, before the step that they let begin, and one for the step

Weights are received in a thread beside it, one update at a time: sampling waits for the load only. Another thread loads the
tokenizer for stop strings and grammars.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from skyrl_train.errors import EngineError, RequestError, SkyRLError
from skyrl_train.inference.engines.embedded.core import EmbeddedEngineCore, build_core
from skyrl_train.inference.engines.embedded.engine import EngineSettings
from skyrl_train.inference.interface import EngineHealth
from skyrl_train.runtime.process import write_output_to
from skyrl_train.workers.connection import Channel
from skyrl_train.workers.messages import Call, Cancel, Failure, LastWords, Message, Result

logger = logging.getLogger(__name__)

_BESIDE = ("receive_weights", "load_tokenizer")  # methods that each run in their own thread


def serve(channel: Channel) -> None:
    """Serve an engine in a thread of the driver's process."""
    EngineLoop(channel, build_core).run()


def serve_in_process(channel: Channel) -> None:
    """Serve an engine in the main thread of a child process."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # a forked child has its parent's number

    def build(settings: EngineSettings) -> EmbeddedEngineCore:
        if settings.log_file is not None:
            write_output_to(Path(settings.log_file))
        started = time.monotonic()
        core = build_core(settings)
        logger.info("built %s for %s in %.1f s", settings.model_path, settings.device, time.monotonic() - started)
        # A full collection that walks all that was imported and built would stall every request for 100 ms.
        gc.collect()
        gc.freeze()
        return core

    EngineLoop(channel, build).run()


class EngineLoop:
    """Builds the core from the settings of the first call, ``start``, and serves it until the channel ends."""

    def __init__(self, channel: Channel, build: Callable[[EngineSettings], EmbeddedEngineCore]) -> None:
        self._channel = channel
        self._build = build
        self._sending = threading.Lock()
        self._threads = {method: ThreadPoolExecutor(1, method) for method in _BESIDE}

    def run(self) -> None:
        """Serve until the driver is gone. A failure of the engine as a whole is logged and told to the driver."""
        try:
            # The settings travel in the first call, so that a process can be started before they are known.
            start, *_ = self._channel.receive(block=True)
            assert isinstance(start, Call) and start.method == "start", "the driver starts the engine first"
            core = self._build(*start.arguments)
            service = EngineService(core)
            try:
                self._send([Result(start.id)])
                while True:
                    answers: list[Message] = []
                    # Block only without work: running requests must not wait for a call.
                    for message in self._channel.receive(block=not core.runnable):
                        if isinstance(message, Call) and message.method in _BESIDE:
                            self._threads[message.method].submit(self._run_beside, service, message)
                        else:
                            answers += service.handle(message)
                    self._send(answers)  # a caller that resumed the engine must not wait for its next step
                    self._send(service.step())
            finally:
                for thread in self._threads.values():
                    thread.shutdown(cancel_futures=True)
                core.close()
        except EOFError:
            return
        except Exception as error:  # the model's code can raise anything; pending calls must hear of it
            reason = str(error)
            if not isinstance(error, SkyRLError):
                logger.exception("The embedded engine failed.")
                reason = f"the engine failed: {type(error).__name__}: {error}"
            with contextlib.suppress(EOFError):
                self._send([LastWords(reason)])

    def _run_beside(self, service: EngineService, call: Call) -> None:
        try:
            answers = service.handle(call)
        except Exception as error:  # the caller must hear of it
            logger.exception("The embedded engine failed in %s.", call.method)
            reason = f"{call.method} failed: {type(error).__name__}: {error}"
            answers = [Failure.of(call.id, EngineError(reason))]
        with contextlib.suppress(EOFError):  # the driver is gone, which the loop notices by itself
            self._send(answers)

    def _send(self, messages: list[Message]) -> None:
        if messages:
            with self._sending:
                self._channel.send(messages)


class EngineService:
    """Answers calls with a core, between two of its steps. It has no loop, so that virtual time can drive it too."""

    def __init__(self, core: EmbeddedEngineCore) -> None:
        self._core = core
        self._pausing: list[int] = []  # calls of pause() that are not answered yet
        self._busy_s = 0.0

    def step(self) -> list[Message]:
        """Make one decode step, if there is something to do, and answer the pauses that need no further one."""
        answers: list[Message] = []
        if self._core.runnable:
            began = time.perf_counter()
            answers += self._core.step()
            self._busy_s += time.perf_counter() - began
        if self._core.paused and self._pausing:
            answers += [Result(call_id) for call_id in self._pausing]
            self._pausing.clear()
        return answers

    def handle(self, message: Message) -> list[Message]:
        """Run one call, or abort a request whose caller is gone."""
        core = self._core
        if isinstance(message, Cancel):
            return core.abort([message.id])
        assert isinstance(message, Call), "a driver sends nothing else"
        answers: list[Message] = []
        value: Any = None
        try:
            match message.method:
                case "generate":  # answered by the steps
                    core.add(message.id, *message.arguments)
                    return []
                case "pause":  # answered by the step after which nothing runs any more
                    answers = core.pause(*message.arguments)
                    self._pausing.append(message.id)
                    return answers
                case "resume":
                    core.resume()
                    late = EngineError("The engine was resumed before it was paused.")
                    answers = [Failure.of(pause, late) for pause in self._pausing]
                    self._pausing.clear()
                case "sleep":  # at any level, and wakes up with any tags: all of the model moves
                    core.sleep()
                case "wake_up":
                    core.wake_up()
                case "abort_generation":
                    answers = core.abort()
                case "receive_weights":
                    core.receive(*message.arguments)
                case "load_tokenizer":
                    core.load_tokenizer(*message.arguments)
                case "load_weights":
                    core.load(*message.arguments)
                    value = core.policy_version
                case "served_checksum":
                    value = core.served_checksum()
                case "health":
                    value = EngineHealth(
                        alive=True,
                        policy_version=core.policy_version,
                        running=core.running,
                        waiting=core.waiting,
                        paused=core.paused,
                        generated_tokens=core.generated_tokens,
                        prefill_tokens=core.prefill_tokens,
                        busy_s=self._busy_s,
                    )
                case method:
                    raise EngineError(f"The embedded engine has no method {method!r}.")
        except (RequestError, EngineError) as error:
            return [Failure.of(message.id, error)]
        return [*answers, Result(message.id, value)]
