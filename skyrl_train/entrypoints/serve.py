"""Serves a model folder: ``python -m skyrl_train.entrypoints.serve --model FOLDER [--port 8000] ...``.

The administrator's key comes from the environment variable SKYRL_ADMIN_KEY, because command lines can be read by others.

Exit codes: 0 stopped by SIGTERM or Ctrl-C after requests had time to end; 2 a setting or an input is wrong; 1 anything else.
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
from skyrl_train.garbage import settle_collector

if TYPE_CHECKING:
    from skyrl_train.inference.interface import InferenceEngineInterface
    from skyrl_train.inference.server.settings import ServerSettings

MODULE = "skyrl_train.entrypoints.serve"
KEY_VARIABLE = "SKYRL_ADMIN_KEY"
DEFAULT_CONTEXT = 4096  # tokens, where the model has more positions: every place in the batch holds so much cache


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, serves until a signal, and returns the exit code."""
    options = _parser().parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read as torch is imported; the engines have threads of their own
    console = Console()
    try:
        asyncio.run(_serve(options, _settings(options), console))
    except SkyRLError as error:
        # What the folder is called on this command line.
        told = str(error).replace("trainer.policy.model.path", "--model")
        text = f"{type(error).__name__}: {told}"
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
    add("--name", action="append", help="what requests call it; may be given several times; default: policy")
    add("--host", default="127.0.0.1", help="the address to listen on; default: this machine only")
    add("--port", type=int, default=8000, help="0 takes a free one; default: 8000")
    add("--open", action="store_true", help="serve this machine's programs without keys")
    add("--docs", action="store_true", help="a page about the API at /docs")
    add("--backend", choices=("embedded", "vllm"), default="embedded", help="default: embedded")
    add("--num-engines", type=int, default=1, help="engines that share the requests; default: 1")
    add("--max-num-seqs", type=int, default=128, help="requests decoded at once, per engine; default: 128")
    add("--max-model-len", type=int, help=f"tokens per request; default: the model's, at most {DEFAULT_CONTEXT}")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--device", default="cpu", help="of embedded engines; default: cpu")
    add("--drain-s", type=float, default=10.0, help="how long requests may go on after a signal; default: 10")
    return parser


def _settings(options: argparse.Namespace) -> ServerSettings:
    from skyrl_train.inference.server.settings import ServerSettings

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
    from skyrl_train.inference.chat_service import ChatService
    from skyrl_train.inference.client import InferenceEngineClient
    from skyrl_train.inference.interface import PauseMode
    from skyrl_train.inference.server.app import create_app
    from skyrl_train.inference.server.endpoint import EndpointServer
    from skyrl_train.inference.sessions import SessionStore
    from skyrl_train.models.folder import load_model, load_tokenizer
    from skyrl_train.publication.publisher import WeightPublisher, weights_of
    from skyrl_train.publication.shared_memory import SharedMemoryTransport

    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    tokenizer = await asyncio.to_thread(load_tokenizer, options.model)
    engines = [_engine(options, index) for index in range(options.num_engines)]
    client = InferenceEngineClient(engines, tokenizer, options.model)
    server = EndpointServer(
        create_app(ChatService(client, client.renderer), client, SessionStore(client.renderer), settings)
    )
    publisher = WeightPublisher(client, SharedMemoryTransport(options.dtype), PauseMode.ABORT)
    try:
        await client.start()
        # The folder's weights are version 0. They stay in shared memory, for engines that have to start again.
        model = await asyncio.to_thread(load_model, options.model, options.dtype, "cpu")
        await publisher.publish(weights_of(model.named_parameters()), version=0)
        del model
        settle_collector()
        url = await server.start()
        console.print(f"serving {options.model} at {url}", markup=False, highlight=False, soft_wrap=True)
        await stopped.wait()
        await server.stop(options.drain_s)
    finally:
        await server.stop(drain_s=0)
        await client.teardown()
        publisher.close()


def _engine(options: argparse.Namespace, index: int) -> InferenceEngineInterface:
    """Engine number ``index``, with a seed of its own."""
    from skyrl_train.inference.randomness import mix
    from skyrl_train.models.folder import load_config

    positions = getattr(load_config(options.model).get_text_config(), "max_position_embeddings", DEFAULT_CONTEXT)
    shared = {
        "dtype": options.dtype,
        "max_num_seqs": options.max_num_seqs,
        "max_model_len": options.max_model_len or min(positions, DEFAULT_CONTEXT),
        "seed": mix(index) % (1 << 32),
    }
    if options.backend == "embedded":
        from skyrl_train.inference.engines.embedded import EmbeddedEngine

        return EmbeddedEngine(options.model, device=options.device, **shared)
    from skyrl_train.inference.engines.vllm import VLLMEngine

    return VLLMEngine(options.model, load_format="dummy", **shared)


if __name__ == "__main__":
    sys.exit(main())
