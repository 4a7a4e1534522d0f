"""``skyrl-train serve``: a model folder behind HTTP."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from skyrl_train.errors import ConfigError, SkyRLError

if TYPE_CHECKING:
    from rich.console import Console

    from skyrl_train.endpoint.server.settings import ServerSettings
    from skyrl_train.inference.interface import InferenceEngineInterface

KEY_VARIABLE = "SKYRL_ADMIN_KEY"
DEFAULT_CONTEXT = 4096  # tokens, if the model has more positions: each batch slot holds a KV cache of this length


def serve(
    model: Annotated[str, typer.Argument(help="A folder (or hub name) with weights and a tokenizer.")],
    name: Annotated[
        list[str] | None, typer.Option(help="Model name in requests; may be repeated; default: policy.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on; the default is this machine only.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    open: Annotated[bool, typer.Option("--open", help="Serve programs of this machine without keys.")] = False,
    docs: Annotated[bool, typer.Option("--docs", help="Serve an API page at /docs.")] = False,
    backend: Annotated[Literal["embedded", "vllm"], typer.Option(help="The engine.")] = "embedded",
    num_engines: Annotated[int, typer.Option(min=1, help="Number of engines.")] = 1,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Concurrent requests per engine.")] = 128,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help=f"Tokens per request; default: the model's, at most {DEFAULT_CONTEXT}.")
    ] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of weights and KV cache.")] = "float32",
    device: Annotated[str, typer.Option(help="Device of embedded engines.")] = "cpu",
    drain_s: Annotated[float, typer.Option(min=0, help="Seconds for running requests after a signal.")] = 10.0,
) -> int:
    """Serve a model with the dialects of OpenAI and Anthropic, until SIGTERM or Ctrl-C.

    The administrator's key is read from the environment variable SKYRL_ADMIN_KEY, because other users can read command lines.
    """
    import asyncio

    from rich.console import Console

    from skyrl_train.endpoint.server.settings import ServerSettings
    from skyrl_train.observability.screen import start_up
    from skyrl_train.runtime.listening import bind

    admin_key = os.environ.get(KEY_VARIABLE)
    if admin_key is None and not open:
        raise ConfigError(f"set {KEY_VARIABLE} to the administrator's key, or serve without keys with --open")
    settings = ServerSettings(
        host=host, port=port, model_names=tuple(name or ("policy",)), admin_key=admin_key, open=open, docs=docs
    )
    bind(host, port, "--port")[0].close()  # before the model is loaded
    console = Console()
    console.print("Starting: libraries, model, engines.", highlight=False)
    try:
        with start_up(console, "libraries"):
            engines = _engines(model, num_engines, backend, dtype, device, max_num_seqs, max_model_len)
        asyncio.run(_serve(model, engines, settings, dtype, drain_s, console))
    except SkyRLError as error:
        # The error names the setting of a training run; this command line has an argument instead.
        error.args = (str(error).replace("trainer.policy.model.path", "MODEL"),)
        raise
    return 0


async def _serve(
    model_path: str,
    engines: Sequence[InferenceEngineInterface],
    settings: ServerSettings,
    dtype: str,
    drain_s: float,
    console: Console,
) -> None:
    import asyncio

    from skyrl_train.endpoint.server.app import create_app
    from skyrl_train.endpoint.server.server import EndpointServer
    from skyrl_train.endpoint.sessions import SessionStore
    from skyrl_train.inference.chat.service import ChatService
    from skyrl_train.inference.client import InferenceEngineClient
    from skyrl_train.models.folder import load_model, load_tokenizer
    from skyrl_train.models.lora import served_weights
    from skyrl_train.observability.screen import start_up
    from skyrl_train.runtime.process import DaemonThreadPool, gc_tuned
    from skyrl_train.types import PauseMode
    from skyrl_train.weight_sync.shared_memory import SharedMemoryTransport
    from skyrl_train.weight_sync.syncer import WeightSyncer, weights_of

    asyncio.get_running_loop().set_default_executor(DaemonThreadPool())  # a signal does not wait for a model that loads
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    with start_up(console, "tokenizer"):
        tokenizer = await asyncio.to_thread(load_tokenizer, model_path)
    client = InferenceEngineClient(list(engines), tokenizer, model_path)
    server = EndpointServer(
        create_app(ChatService(client, client.renderer), client, SessionStore(client.renderer), settings)
    )
    transport = SharedMemoryTransport(dtype)

    async def start_engines() -> None:
        with start_up(console, "engines"):
            await client.start()
        # The folder's weights are version 0. They stay in shared memory for engines that restart.
        with start_up(console, "model"):
            model = await asyncio.to_thread(load_model, model_path, dtype, "cpu")
        with start_up(console, "first weight sync"):
            await WeightSyncer(client, transport, weights_of(partial(served_weights, model)), PauseMode.ABORT).sync(
                version=0
            )

    try:
        starting = [asyncio.create_task(start_engines()), asyncio.create_task(stopped.wait())]
        _, unfinished = await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)
        for task in unfinished:
            task.cancel()
        if stopped.is_set():  # engines can take minutes to start
            await asyncio.wait(starting)
            return
        await starting[0]
        with gc_tuned():
            url = await server.start()
            console.print(f"serving {model_path} at {url}", markup=False, highlight=False, soft_wrap=True)
            await stopped.wait()
        await server.stop(drain_s)
    finally:
        # Also after an error; idempotent if the server has stopped already.
        await server.stop(drain_s=0)
        await client.teardown()
        transport.close()


def _engines(
    model_path: str,
    number: int,
    backend: str,
    dtype: str,
    device: str,
    max_num_seqs: int,
    max_model_len: int | None,
) -> list[InferenceEngineInterface]:
    """Return engines of the model; each has another seed, and each vLLM another GPU."""
    import torch

    from skyrl_train.inference.engines.embedded import EmbeddedEngine
    from skyrl_train.inference.engines.proxy import ProcessEngine
    from skyrl_train.models.folder import load_config, resolve_device
    from skyrl_train.runtime.seeds import derive_seed

    if backend == "embedded":
        resolve_device(device)
    positions = getattr(load_config(model_path).get_text_config(), "max_position_embeddings", DEFAULT_CONTEXT)
    length = max_model_len or min(positions, DEFAULT_CONTEXT)
    engines: list[InferenceEngineInterface] = []
    for index in range(number):
        shared: dict[str, Any] = {
            "dtype": dtype,
            "max_num_seqs": max_num_seqs,
            "max_model_len": length,
            "seed": derive_seed(index) % (1 << 32),
        }
        if backend == "embedded":
            engines.append(EmbeddedEngine(model_path, device=device, **shared))
        else:
            devices = [index] if torch.cuda.device_count() else None  # else all would take the first GPU
            arguments = {"model_path": model_path, "load_format": "dummy", "devices": devices, **shared}
            engines.append(ProcessEngine("skyrl_train.inference.engines.vllm:VLLMEngine", arguments))
    return engines
