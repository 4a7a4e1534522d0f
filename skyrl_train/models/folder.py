"""Loading of a model folder (or hub name), with errors that name the missing part."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging as transformers_logging

from skyrl_train.errors import ConfigError, ModelError, first_line
from skyrl_train.models.place import check_hub, check_place, is_local
from skyrl_train.models.seeded_draws import SeededDraws

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Errors of transformers and safetensors for a folder or hub name that they cannot use.
_UNUSABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError, SafetensorError)
_SETTING = "trainer.policy.model.path"
# transformers switches globals while it builds a model, torch's default dtype among them. Two threads that build layers at once
# can leave the globals in a state in which later models are not initialised, or in another dtype, or their embeddings not tied.
BUILDING = threading.Lock()
DISTINCT_WEIGHTS = 100_003  # of a model without weights; a prime, so that the rows of its matrices differ


def load_config(path: str, setting: str = _SETTING) -> PreTrainedConfig:
    """Read ``config.json``.

    Args:
        setting: name of the setting that has the path, for messages.

    Raises:
        ModelError: the file is missing, or transformers does not know the architecture.
    """
    check_place(path, setting)
    if not is_local(path):
        check_hub(path, setting)
    try:
        with quiet_transformers():
            config: PreTrainedConfig = AutoConfig.from_pretrained(path)
    except _UNUSABLE as error:
        if (Path(path) / "config.yaml").is_file():  # of a run
            raise ModelError(
                f"{path!r} is the folder of a run, not a model. Point {setting} at {Path(path) / 'policy'}, its trained policy, "
                f"or at a folder that `skyrl-train export {path} FOLDER` writes."
            ) from error
        if checkpoint := re.match(r"(.+)/checkpoints/global_step_(\d+)", str(Path(path).absolute())):
            raise ModelError(
                f"{path!r} is a checkpoint of a run, not a model. Point {setting} at a folder that `skyrl-train export "
                f"{checkpoint[1]}:{checkpoint[2]} FOLDER` writes."
            ) from error
        if is_local(path):
            raise ModelError(
                f"{path!r} is not a model: {first_line(error).rstrip('.')}. Point {setting} at a folder with a config.json."
            ) from error
        raise ModelError(
            f"{path!r} on the hub is not a model that can be used: {first_line(error).rstrip('.')}. Point {setting} at another "
            "model."
        ) from error
    return config


def load_tokenizer(path: str, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """Read the tokenizer.

    Args:
        chat_template: a file with a Jinja template, which replaces the tokenizer's.

    Raises:
        ConfigError: ``chat_template`` cannot be read.
        ModelError: the folder has no tokenizer, it has no end-of-sequence token, or it knows more tokens than the model.
    """
    vocab_size = load_config(path).get_text_config().vocab_size
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(path)
    except _UNUSABLE as error:
        raise ModelError(
            f"{path!r} has no usable tokenizer: {first_line(error).rstrip('.')}. Save one there with tokenizer.save_pretrained()."
        ) from error
    # Without tokenizer files, transformers returns an empty tokenizer of the model's type instead of an error.
    files = set(tokenizer.vocab_files_names.values())
    if is_local(path) and files and not any((Path(path) / file).exists() for file in files):
        raise ModelError(f"{path!r} has no tokenizer. Save one there with tokenizer.save_pretrained().")
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"The tokenizer in {path!r} has no eos_token; a response could never end. Set one and save it again."
        )
    if len(tokenizer) > vocab_size:
        raise ModelError(
            f"The tokenizer in {path!r} knows {len(tokenizer)} tokens but the model only {vocab_size}. Save the "
            "tokenizer that belongs to the model, or resize_token_embeddings(len(tokenizer)) and save it again."
        )
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"generator.chat_template={chat_template}: {first_line(error)}. Name a file with a Jinja template."
            ) from error
    return tokenizer


def build_empty(path: str, dtype: str, device: str) -> PreTrainedModel:
    """Build the architecture without reading weights, for an engine that receives them in the first weight sync.

    It has the generation settings of the folder, the end-of-sequence ids among them. The random weights are the same in each
    call, so trial runs on them give the same result. Large tensors repeat theirs.

    Raises:
        ConfigError: an unknown dtype or a device that this machine does not have.
        ModelError: torch cannot build the architecture.
    """
    torch_dtype, torch_device = resolve_dtype(dtype), resolve_device(device)
    config = load_config(path)
    try:
        with BUILDING, SeededDraws(0, DISTINCT_WEIGHTS), quiet_transformers():
            built: Any = AutoModelForCausalLM.from_config(config, dtype=torch_dtype)
    except _UNUSABLE as error:
        raise ModelError(
            f"{path!r} is not a causal language model that can be built: {first_line(error).rstrip('.')}."
        ) from error
    model: PreTrainedModel = built.to(torch_device).eval()
    with suppress(OSError), quiet_transformers():  # not every model has the file; else they follow from config.json
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def load_model(path: str, dtype: str, device: str) -> PreTrainedModel:
    """Load architecture and weights.

    Raises:
        ConfigError: an unknown dtype or a device that this machine does not have.
        ModelError: the folder has no weights, some are missing, broken, or have other shapes.
    """
    torch_dtype, torch_device = resolve_dtype(dtype), resolve_device(device)
    load_config(path)
    try:
        with BUILDING, quiet_transformers():
            # Mismatched shapes are allowed here so that the error below can name them.
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch_dtype, output_loading_info=True, ignore_mismatched_sizes=True
            )
    except _UNUSABLE as error:
        raise ModelError(
            f"{path!r} has no usable weights: {first_line(error).rstrip('.')}. Save the model there with model.save_pretrained()."
        ) from error
    info: dict[str, Any] = loaded[1]
    mismatched = sorted(tuple(entry) for entry in info["mismatched_keys"])
    if mismatched:
        name, saved, expected = mismatched[0]
        raise ModelError(
            f"{len(mismatched)} weights in {path!r} do not have the shapes that config.json asks for, the first is "
            f"{name!r}: {tuple(saved)}, not {tuple(expected)}. Save both together with model.save_pretrained()."
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"The weights in {path!r} miss {len(missing)} tensors, the first is {missing[0]!r}. Save the model again."
        )
    model: PreTrainedModel = loaded[0].to(torch_device)
    return model


def resolve_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a setting.

    Raises:
        ConfigError: not one of :data:`DTYPES`.
    """
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is unknown; known: {', '.join(DTYPES)}.")
    return DTYPES[name]


def known_device(name: str, setting: str) -> torch.device:
    """Return the torch device of a setting; this machine need not have it.

    Raises:
        ConfigError: torch does not know the name; the message names ``setting``.
    """
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{setting}={name} is unknown. Use cpu, cuda or cuda:N.") from error


def resolve_device(name: str) -> torch.device:
    """Return the torch device of a setting, on which this process is about to compute.

    For CUDA, it takes cuDNN's attention out of the choice of ``scaled_dot_product_attention`` in this process: cuDNN comes first
    on recent GPUs, and builds a plan for each new shape, which takes longer than the pass that needs it.

    Raises:
        ConfigError: torch does not know the name, or this machine lacks the device.
    """
    device = known_device(name, "device")
    if device.type != "cuda":
        return device
    if (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r} is not there: torch sees {torch.cuda.device_count()} GPUs. Use device cpu.")
    torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def use_tf32(device: torch.device) -> None:
    """Let products of float32 matrices on a GPU use TF32 in this process. On a CPU it does nothing."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and warnings inside the context; errors are still raised."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
