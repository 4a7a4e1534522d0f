"""A policy as a folder that transformers opens: of a live model, or of a checkpoint that any number of ranks wrote."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from transformers import PreTrainedModel

from skyrl_train.errors import CheckpointError, first_line
from skyrl_train.models.folder import build_empty, load_tokenizer, quiet_transformers
from skyrl_train.models.lora import adapter_of, base_fingerprint, merged_weights, policy_weights, write_adapter
from skyrl_train.training.state import POLICY_FILE, check_base, check_weights

SHARDED_POLICY = "policy."  # before the names of weights in a sharded checkpoint


def export_hf(model: PreTrainedModel, model_path: str, folder: Path) -> None:
    """Write weights, configuration and tokenizer. An adapter is merged, and also written to ``folder/adapter`` for peft.

    Args:
        model_path: the folder or hub name that the model came from.
        folder: replaced as a whole.

    Raises:
        CheckpointError: the folder cannot be written; its previous content stays.
    """
    unfinished = folder.with_name(f".tmp-{folder.name}")
    adapter = adapter_of(model)
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        with quiet_transformers():
            if adapter is None:
                model.save_pretrained(unfinished)
            else:
                merged = build_empty(model_path, str(model.dtype).removeprefix("torch."), "cpu")
                parameters = ((name, parameter.detach()) for name, parameter in model.named_parameters())
                weights = {name: weight.cpu() for name, weight in merged_weights(parameters, adapter)}
                merged.load_state_dict(
                    weights, strict=False
                )  # strict=False: a tied weight has only one of its two names
                merged.save_pretrained(unfinished)
                trained = {name: weight.detach().cpu() for name, weight in policy_weights(model)}
                write_adapter(model, trained, unfinished / "adapter")
            load_tokenizer(model_path).save_pretrained(unfinished)
        # The old folder goes only when the new one is complete.
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(unfinished, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(
            f"The policy cannot be exported to {folder}: {error}. Free space or choose another folder; the "
            "run's checkpoints hold the same weights."
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
