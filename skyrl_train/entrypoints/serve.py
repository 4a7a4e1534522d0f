"""Serve a model folder: ``python -m skyrl_train.entrypoints.serve --model FOLDER [--port 8000] ...``.

The administrator's key is read from the environment variable SKYRL_ADMIN_KEY, because other users can read command lines.

Exit codes: 0 stopped by SIGTERM or Ctrl-C, after running requests had time to end; 2 invalid setting or input; 1 other errors.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from skyrl_train.errors import ConfigError, ModelError, SkyRLError
from skyrl_train.runtime.process import gc_tuned

if TYPE_CHECKING:
    from skyrl_train.endpoint.server.settings import ServerSettings
    from skyrl_train.inference.interface import InferenceEngineInterface

MODULE = "skyrl_train.entrypoints.serve"
KEY_VARIABLE = "SKYRL_ADMIN_KEY"
DEFAULT_CONTEXT = 4096  # tokens, if the model has more positions: each batch slot holds a KV cache of this length


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, serve until a signal, and return the exit code."""
    options = _parser().parse_args(argv)
    console = Console()
    try:
        asyncio.run(_serve(options, _settings(options), console))
    except SkyRLError as error:
        # The error names the setting of a training run; this command line has an option instead.
        text = f"{type(error).__name__}: {str(error).replace('trainer.policy.model.path', '--model')}"
        Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)
        return 2 if isinstance(error, ConfigError | ModelError) else 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description="Serves a model folder with the dialects of OpenAI and Anthropic.",
        epilog=f"The administrator's key is read from the environment variable {KEY_VARIABLE}.",
    )
    add = parser.add_argument
    add("--model", required=True, help="a folder (or hub name) with weights and a tokenizer")
    add("--name", action="append", help="model name in requests; may be repeated; default: policy")
    add("--host", default="127.0.0.1", help="the address to listen on; default: this machine only")
    add("--port", type=int, default=8000, help="0 takes a free one; default: 8000")
    add("--open", action="store_true", help="serve programs of this machine without keys")
    add("--docs", action="store_true", help="serve an API page at /docs")
    add("--backend", choices=("embedded", "vllm"), default="embedded", help="default: embedded")
    add("--num-engines", type=int, default=1, help="number of engines; default: 1")
    add("--max-num-seqs", type=int, default=128, help="concurrent requests per engine; default: 128")
    add("--max-model-len", type=int, help=f"tokens per request; default: the model's, at most {DEFAULT_CONTEXT}")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--device", default="cpu", help="device of embedded engines; default: cpu")
    add("--drain-s", type=float, default=10.0, help="seconds for running requests after a signal; default: 10")
    return parser


def _settings(options: argparse.Namespace) -> ServerSettings:
    from skyrl_train.endpoint.server.settings import ServerSettings

    admin_key = os.environ.get(KEY_VARIABLE)
    if admin_key is None and not options.open:
        raise ConfigError(f"set {KEY_VARIABLE} to the administrator's key, or serve without keys with --open")
    return ServerSettings(
        host=options.host,
        port=options.port,
        model_names=tuple(options.name or ("policy",)),
        admin_key=admin_key,
        open=options.open,
        docs=options.docs,
    )


async def _serve(options: argparse.Namespace, settings: ServerSettings, console: Console) -> None:
    from skyrl_train.endpoint.server.app import create_app
    from skyrl_train.endpoint.server.server import EndpointServer
    from skyrl_train.endpoint.sessions import SessionStore
    from skyrl_train.inference.chat.service import ChatService
    from skyrl_train.inference.client import InferenceEngineClient
    from skyrl_train.models.folder import load_model, load_tokenizer
    from skyrl_train.types import PauseMode
    from skyrl_train.weight_sync.shared_memory import SharedMemoryTransport
    from skyrl_train.weight_sync.syncer import WeightSyncer, weights_of

    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    tokenizer = await asyncio.to_thread(load_tokenizer, options.model)
    engines = [_engine(options, index) for index in range(options.num_engines)]
    client = InferenceEngineClient(engines, tokenizer, options.model)
    server = EndpointServer(
        create_app(ChatService(client, client.renderer), client, SessionStore(client.renderer), settings)
    )
    transport = SharedMemoryTransport(options.dtype)
    try:
        await client.start()
        # The folder's weights are version 0. They stay in shared memory for engines that restart.
        model = await asyncio.to_thread(load_model, options.model, options.dtype, "cpu")
        await WeightSyncer(client, transport, weights_of(model.named_parameters), PauseMode.ABORT).sync(version=0)
        # The engines have copies; the model would only take memory while the server runs.
        del model
        with gc_tuned():
            url = await server.start()
            console.print(f"serving {options.model} at {url}", markup=False, highlight=False, soft_wrap=True)
            await stopped.wait()
        await server.stop(options.drain_s)
    finally:
        # Also after an error; idempotent if the server has stopped already.
        await server.stop(drain_s=0)
        await client.teardown()
        transport.close()


def _engine(options: argparse.Namespace, index: int) -> InferenceEngineInterface:
    """Return engine number ``index``; each has another seed."""
    from skyrl_train.models.folder import load_config
    from skyrl_train.runtime.seeds import derive_seed

    positions = getattr(load_config(options.model).get_text_config(), "max_position_embeddings", DEFAULT_CONTEXT)
    shared = {
        "dtype": options.dtype,
        "max_num_seqs": options.max_num_seqs,
        "max_model_len": options.max_model_len or min(positions, DEFAULT_CONTEXT),
        "seed": derive_seed(index) % (1 << 32),
    }
    if options.backend == "embedded":
        from skyrl_train.inference.engines.embedded import EmbeddedEngine

        return EmbeddedEngine(options.model, device=options.device, **shared)
    from skyrl_train.inference.engines.vllm import VLLMEngine

    return VLLMEngine(options.model, load_format="dummy", **shared)


if __name__ == "__main__":
    sys.exit(main())
