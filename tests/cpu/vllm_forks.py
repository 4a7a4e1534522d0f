"""vLLM's processes, forked from one that has imported vLLM. By itself vLLM starts Python anew for each: 15 s of imports.

Everything else is as vLLM does it: which processes there are, their arguments and environment, and how they end.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.inference.engines.vllm.arguments import environment
from skyrl_train.workers.process import ChildProcess, serve_parent

# What an engine process and a server import on their way. Not our own worker: it watches the process that started the engine.
IMPORTED_FIRST = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
)
# Read while vLLM is imported; as engines and servers set them.
WHILE_IMPORTING = {
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


class VLLMForks(ForkServerContext):
    """Forks processes that have the environment of their start, as a new Python would."""

    def Process(  # type: ignore[override]
        self, *, target: Callable[..., None], name: str | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> BaseProcess:
        return super().Process(target=_call, name=name, args=(dict(os.environ), target), kwargs=kwargs or {})


@contextmanager
def forking_vllm() -> Iterator[None]:
    """Engines that start meanwhile fork their processes. The imports begin at once, in the background."""
    multiprocessing.set_forkserver_preload([*IMPORTED_FIRST])
    with environment(WHILE_IMPORTING):
        forkserver.ensure_running()
    # The server passes over a module that it cannot import, and each process would then import everything again.
    assert all(map(find_spec, IMPORTED_FIRST))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.v1.engine.utils.get_mp_context", VLLMForks)
        yield


def fork_server_command(arguments: Sequence[str], variables: Mapping[str, str], log: Path) -> BaseProcess:
    """``vllm serve arguments``, in a session of its own, with its output in ``log``."""
    process = VLLMForks().Process(target=_serve, kwargs={"arguments": arguments, "variables": variables, "log": log})
    process.start()
    return process


def fork_child(_: ChildProcess, theirs: socket.socket, target: str, num_threads: int | None) -> BaseProcess:
    """Stands for ``ChildProcess._spawn``: the child has imported vLLM, and so have those that vLLM starts there."""
    process = VLLMForks().Process(target=_host, kwargs={"connection": theirs, "target": target, "threads": num_threads})
    process.start()
    return process


def _call(variables: Mapping[str, str], target: Callable[..., None], /, **arguments: Any) -> None:
    os.environ.clear()
    os.environ.update(variables)
    target(**arguments)


def _host(connection: socket.socket, target: str, threads: int | None) -> None:
    import vllm.v1.engine.utils

    os.setsid()
    os.environ["OMP_NUM_THREADS"] = str(threads or 1)
    # Its own children come from the server that it comes from, which runs as long as the tests.
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    vllm.v1.engine.utils.get_mp_context = VLLMForks
    serve_parent(connection, target)


def _serve(arguments: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
    import vllm.v1.engine.utils
    from vllm.entrypoints.launchers.api_server.entry import main

    os.setsid()
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update(variables)
    # Its engine process is of the same session: whoever kills the session kills both.
    vllm.v1.engine.utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    sys.argv = ["api_server", *arguments]
    main()
