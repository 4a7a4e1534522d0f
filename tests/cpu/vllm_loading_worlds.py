"""vLLM models without an engine, in a process of their own, and updates that are loaded into them."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from vllm_forks import VLLMForks

from skyrl_train.inference.engines.vllm import weight_loader
from skyrl_train.inference.engines.vllm.weight_loader import WeightLoader
from skyrl_train.models.lora import served_weights
from skyrl_train.weight_sync.disk import DiskTransport

SIZES = {
    "vocab_size": 100,  # vLLM pads it
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "architectures": None,
}


def in_vllm_process(world: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Call ``world`` with each case in one process that has imported vLLM, and return the results."""
    context = VLLMForks()
    ours, theirs = context.Pipe()
    process = context.Process(target=_call_each, kwargs={"connection": theirs, "world": world, "cases": cases})
    process.start()
    theirs.close()
    try:
        failure, results = ours.recv()
    finally:
        process.join()
    assert not failure, failure
    return list(results)


def _call_each(connection: Connection, world: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    try:
        with tempfile.TemporaryDirectory() as folder:
            with set_current_vllm_config(VllmConfig()):
                init_distributed_environment(1, 0, f"file://{folder}/meeting", 0, "gloo")
                initialize_model_parallel()
            results = []
            for number, case in enumerate(cases):
                results.append(world(f"{folder}/{number}", *case))
        connection.send(("", results))
    except BaseException:  # the test shows it
        connection.send((traceback.format_exc(), None))


def trainer_model(kind: str, tied: bool, seed: int) -> PreTrainedModel:
    """A model of random weights. Biases are zero, as in a model that was never trained."""
    config = AutoConfig.for_model(kind, tie_word_embeddings=tied, **SIZES)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@contextmanager
def parameters_serve() -> Iterator[None]:
    """vLLM computes with its parameters, as on a GPU, and packs none."""
    from vllm import _custom_ops

    with (
        mock.patch.object(_custom_ops, "_supports_onednn", False),
        mock.patch.object(weight_loader, "PACKING_DEVICES", ()),
    ):
        yield


def vllm_loader(folder: str) -> WeightLoader:
    """The loader of a vLLM model that has random weights of its own."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    arguments = EngineArgs(folder, dtype="float32", load_format="dummy", enforce_eager=True, skip_tokenizer_init=True)
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        model = get_model(vllm_config=config)
    return WeightLoader(SimpleNamespace(get_model=lambda: model, lora_manager=None), config, torch.device("cpu"))


def served(loader: WeightLoader) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in loader._model.named_parameters()}


class Sender:
    """Sends versions of models to a loader, and counts vLLM's reloads."""

    def __init__(self, folder: str, loader: WeightLoader) -> None:
        self.transport = DiskTransport(Path(folder) / "updates")
        self.loader, self.version, self.reloads = loader, -1, 0
        load_weights = loader.load_weights

        def counted(weights: Mapping[str, torch.Tensor], in_place: bool) -> None:
            self.reloads += not in_place
            load_weights(weights, in_place)

        loader.load_weights = counted  # type: ignore[method-assign]

    def send(self, model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Return the parameters that vLLM has afterwards."""
        self.version += 1
        update = self.transport.gather(model.named_parameters(), self.version)
        assert self.loader.receive(update) is None
        self.loader.load(self.version)
        return served(self.loader)


def loads(folder: str, kind: str, tied: bool, packed: bool) -> dict[str, Any]:
    """Load three versions, the last one of which is loaded by vLLM's reload, too."""
    trainer_model(kind, tied, 0).config.save_pretrained(folder)
    models = [trainer_model(kind, tied, seed) for seed in (1, 2, 2)]
    with mock.patch.object(weight_loader, "PACKING_DEVICES", ("cpu",)) if packed else parameters_serve():
        sender = Sender(folder, vllm_loader(folder))
        first = sender.send(models[0])
        in_place, reloads = sender.loader.in_place, sender.reloads
        found = sender.send(models[1])
        later_reloads = sender.reloads - reloads
        sender.loader.in_place = False
        expected = sender.send(models[2])
    return {
        "in_place": in_place,
        "reloads": [reloads, later_reloads],
        "equal": [name for name in expected if torch.equal(found[name], expected[name])] == [*expected],
        "changed": [name for name in found if not torch.equal(found[name], first[name])],
    }


def scaled(folder: str, backend: str) -> dict[str, Any]:
    """Load a model whose layers have scales that are not trained, and return them beside what vLLM computes with.

    Args:
        backend: vllm | transformers, whose model vLLM serves.
    """
    kind, layers = "gemma4_text", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    sizes = {**SIZES, **layers, "head_dim": 16, "global_head_dim": 16, "hidden_size_per_layer_input": 0}
    config = AutoConfig.for_model(kind, **{**sizes, "architectures": ["Gemma4ForCausalLM"] * (backend == "vllm")})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for index, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(0.3 + 0.1 * index)
    config.save_pretrained(folder)
    with parameters_serve():
        loader = vllm_loader(folder)
        update = DiskTransport(Path(folder) / "updates").gather(served_weights(model), 0)
        why = loader.receive(update)
        if why is None:
            loader.load(0)
    found = [buffer.item() for name, buffer in loader._model.named_buffers() if name.endswith("layer_scalar")]
    return {"why": why, "sent": [layer.layer_scalar.item() for layer in model.model.layers], "found": found}


def fails(folder: str, kind: str, forgotten: str | None) -> dict[str, Any]:
    """In place, the model's loader passes over the weight ``forgotten``, or raises in the middle."""
    model = trainer_model(kind, False, 1)
    model.config.save_pretrained(folder)
    with parameters_serve():
        loader = vllm_loader(folder)
        load_weights = loader.load_weights

        def failing(weights: Mapping[str, torch.Tensor], in_place: bool) -> None:
            if in_place and forgotten is None:
                load_weights(dict([*weights.items()][: len(weights) // 2]), in_place)
                raise RuntimeError("half of it")
            load_weights({name: weights[name] for name in weights if not in_place or name != forgotten}, in_place)

        loader.load_weights = failing  # type: ignore[method-assign]
        sender = Sender(folder, loader)
        found = sender.send(model)
        in_place = loader.in_place
        expected = sender.send(model)
    return {
        "in_place": in_place,
        "reloads": sender.reloads,
        "equal": all(torch.equal(found[each], expected[each]) for each in expected),
    }
