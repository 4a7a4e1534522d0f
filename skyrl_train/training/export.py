"""A policy as a folder that transformers opens. The policy is a live model, or a checkpoint that any number of ranks wrote."""

from __future__ import annotations

import os
import shutil
import socket
import warnings
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from skyrl_train.errors import CheckpointError, first_line
from skyrl_train.models.folder import build_empty, load_tokenizer, quiet_transformers
from skyrl_train.models.lora import (
    adapter_of,
    base_fingerprint,
    checkpoint_buffers,
    merged_weights,
    policy_weights,
    write_adapter,
)
from skyrl_train.training.state import POLICY_FILE, check_base, check_weights

SHARDED_POLICY = "policy."  # before the names of weights in a sharded checkpoint


def export_hf(model: PreTrainedModel, model_path: str, folder: Path) -> None:
    """Write weights, configuration, generation settings and tokenizer.

    An adapter is merged, and also written to ``folder/adapter`` for peft.

    Args:
        model_path: the folder or hub name that the model came from.
        folder: replaced as a whole.

    Raises:
        CheckpointError: the folder cannot be written; its previous content stays.
    """
    whole, trained = model, {}
    if adapter := adapter_of(model):
        parameters = ((name, parameter.detach()) for name, parameter in model.named_parameters())
        merged = {name: weight.cpu() for name, weight in merged_weights(parameters, adapter)}
        merged |= {name: buffer.cpu() for name, buffer in checkpoint_buffers(model)}
        whole = whole_model(merged, model_path, str(model.dtype).removeprefix("torch."))
        trained = {name: weight.detach().cpu() for name, weight in policy_weights(model)}
    write_hf(whole, model, trained, model_path, folder)


def whole_model(weights: dict[str, torch.Tensor], model_path: str, dtype: str) -> PreTrainedModel:
    """Return ``weights``, which have no adapter, as a model on the CPU with the configuration of ``model_path``."""
    model = build_empty(model_path, dtype, "cpu")
    model.load_state_dict(weights, strict=False)  # strict=False: a tied weight has only one of its two names
    return model


def write_hf(
    whole: PreTrainedModel, policy: PreTrainedModel, adapter: dict[str, torch.Tensor], model_path: str, folder: Path
) -> None:
    """Write a model without an adapter, its generation settings and tokenizer, and the adapter that was merged into it.

    Args:
        whole: all weights.
        policy: the model that was trained, which has the settings of the adapter.
        adapter: its weights on the CPU; empty without an adapter.
        model_path: the folder or hub name that the model came from.
        folder: replaced as a whole.

    Raises:
        CheckpointError: see :func:`export_hf`.
    """
    unfinished = folder.with_name(f".tmp-{folder.name}")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        with quiet_transformers():
            # save_pretrained rejects the settings of some published models, such as a temperature without do_sample.
            settings, whole.generation_config = whole.generation_config, GenerationConfig()
            try:
                whole.save_pretrained(unfinished)
            finally:
                whole.generation_config = settings
            settings.to_json_file(unfinished / GENERATION_CONFIG_NAME)
            load_tokenizer(model_path).save_pretrained(unfinished)
        if adapter:
            write_adapter(policy, adapter, unfinished / "adapter")
        # The old folder goes only when the new one is complete.
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(unfinished, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(
            f"The policy cannot be exported to {folder} on {socket.gethostname()}: {error}. Free space or choose another "
            "folder; the run's checkpoints hold the same weights."
        ) from error


@torch.no_grad()
def load_policy(model: PreTrainedModel, folder: Path) -> None:
    """Load the policy of a checkpoint, also of one that sharded ranks wrote, into the run's initial ``model`` on the CPU.

    Weights that were trained in float32 are rounded to the model's dtype.

    Args:
        folder: the backend's state within the checkpoint.

    Raises:
        CheckpointError: the files are incomplete or broken, or belong to another model; the model has not changed.
    """
    live = dict(policy_weights(model)) | base_fingerprint(model)
    try:
        if (folder / POLICY_FILE).exists():
            saved = load_file(folder / POLICY_FILE)
        else:
            reader = HuggingFaceStorageReader(str(folder))
            parts = {
                name: torch.empty(of.size, dtype=of.properties.dtype)
                for name, of in reader.read_metadata().state_dict_metadata.items()
                if isinstance(of, TensorStorageMetadata) and name.startswith(SHARDED_POLICY)
            }
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # torch warns that it reads as a single process
                load_shards(parts, storage_reader=reader, no_dist=True)
            saved = {name.removeprefix(SHARDED_POLICY): weight for name, weight in parts.items()}
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{folder} cannot be read: {first_line(error)}.") from error
    saved = {name: weight.to(live[name].dtype) if name in live else weight for name, weight in saved.items()}
    check_weights(folder, saved, live)
    check_base(folder, saved, live)
    for name, parameter in policy_weights(model):
        parameter.copy_(saved[name])
