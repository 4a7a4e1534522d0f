"""A LoRA adapter (arXiv 2106.09685) inside a model, which is trained and synced instead of the model's own weights.

    y = W x + scale * B (A x)      W [out, in] stays; A [rank, in] and B [out, rank] learn; scale = alpha / rank

B is zero at the start, so a run starts from the base model itself. Weights are synced and saved under peft's names, so peft and
vLLM can open them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from skyrl_train.config.schema import ALL_LINEAR, LoraConfig
from skyrl_train.errors import ConfigError
from skyrl_train.models.adapter_spec import AdapterSpec
from skyrl_train.models.folder import BUILDING
from skyrl_train.models.seeded_draws import SeededDraws
from skyrl_train.runtime.seeds import derive_seed

_ADAPTER = "default"  # peft's name of the only adapter of a model
_PREFIX = "base_model.model."  # of the model's names inside peft's model
FINGERPRINT = "base_fingerprint"
_SAMPLES = 1024  # elements of each weight that enter the fingerprint
_SETTING = "trainer.policy.model.lora"
_STREAM = 0x6C6F7261  # separates adapters' seeds from models' seeds
_INIT_METHODS = {"kaiming": True, "gaussian": "gaussian"}  # of A; peft's words for them


def add_adapter(
    model: PreTrainedModel, lora: LoraConfig, *, seed: int = 0, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """Add an adapter to ``model``, in place; all other parameters no longer take gradients.

    Args:
        seed: determines A. Random draws elsewhere in the process do not change it.
        dtype: of A and B; None: the model's.

    Raises:
        ConfigError: peft is not installed, or the targets are not linear layers inside the model.
    """
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(
            f"{_SETTING}.rank={lora.rank} needs peft: {error}. Install the extra `lora` (./uvw run --extra lora ...)."
        ) from error
    # Taken before the injection, which renames parameters. A model on the meta device has no values to hash.
    fingerprint = (
        torch.empty(32, dtype=torch.uint8, device="meta") if model.device.type == "meta" else _digest(model, lora)
    )
    settings = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=ALL_LINEAR if lora.target_modules == [ALL_LINEAR] else list(lora.target_modules),
        exclude_modules=list(lora.exclude_modules) or None,
        init_lora_weights=_INIT_METHODS[lora.init_method],
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        # peft draws A from torch's global generator, from which an engine in a thread may draw at the same time.
        with BUILDING, SeededDraws(derive_seed(seed, _STREAM)):
            inject_adapter_in_model(settings, model)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{_SETTING}.target_modules={lora.target_modules}: {str(error).splitlines()[0]} Set it to [all-linear], or to "
            "the last parts of the names of linear layers, such as [q_proj, v_proj]."
        ) from error
    _check_targets(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and dtype is not None:
            model.get_parameter(name).data = parameter.data.to(dtype)
    model.register_buffer(FINGERPRINT, fingerprint.to(model.device))
    return model


def adapter_of(model: PreTrainedModel) -> AdapterSpec | None:
    """Return rank and scale of the adapter in ``model``, or None without one."""
    settings = getattr(model, "peft_config", {}).get(_ADAPTER)
    return None if settings is None else AdapterSpec(settings.r, settings.lora_alpha / settings.r)


def policy_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the weights of ``model`` that are trained and synced: the adapter's under peft's names, or all parameters under their
    own names without an adapter. A tied parameter is yielded once.
    """
    if adapter_of(model) is None:
        yield from model.named_parameters()
        return
    for name, parameter in model.named_parameters():
        if f".{_ADAPTER}." in name:
            yield _PREFIX + name.replace(f".{_ADAPTER}.", "."), parameter


def served_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what engines need to compute as ``model`` does: :func:`policy_weights`, and without an adapter the numbers that its
    checkpoints have as buffers, because they are not trained (a scale of each layer in Gemma 4).
    """
    yield from policy_weights(model)
    if adapter_of(model) is None:
        yield from ((name, buffer) for name, buffer in checkpoint_buffers(model) if buffer.is_floating_point())


def checkpoint_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that checkpoints of ``model`` have; all others follow from its configuration."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and name != FINGERPRINT:
                yield f"{path}.{name}".removeprefix("."), buffer


def base_fingerprint(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the fingerprint of base model and scale (uint8 ``[32]``) by its name in a checkpoint; empty without an adapter."""
    return {FINGERPRINT: model.get_buffer(FINGERPRINT)} if adapter_of(model) is not None else {}


@torch.no_grad()
def merged_weights(
    weights: Iterable[tuple[str, torch.Tensor]], adapter: AdapterSpec | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of the plain model: each ``W + scale * B A``, computed in float32 and rounded once.

    Args:
        weights: all parameters of a model with this ``adapter``, under its own names and in its own order, in which A and B
            follow the weight that they belong to. Without an adapter they are yielded unchanged.
    """
    base: tuple[str, torch.Tensor] | None = None
    first: torch.Tensor | None = None
    for name, weight in weights:
        if adapter is None or not (name.endswith(".base_layer.weight") or f".{_ADAPTER}." in name):
            yield name.replace(".base_layer.", "."), weight
        elif base is None:
            base = (name.replace(".base_layer.", "."), weight)
        elif first is None:
            first = weight
        else:
            change = adapter.scale * (weight.float() @ first.float())
            yield base[0], (base[1].float() + change).to(base[1].dtype)
            base = first = None


def write_adapter(model: PreTrainedModel, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write ``weights`` (from :func:`policy_weights`, on the CPU) as a folder that peft opens.

    Raises:
        OSError, SafetensorError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "adapter_model.safetensors")
    peft_config: Any = model.peft_config
    peft_config[_ADAPTER].save_pretrained(folder)


def _check_targets(model: PreTrainedModel) -> None:
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        if type(module.base_layer) is not torch.nn.Linear or module is head:
            kind = "the model's head" if module is head else f"a {type(module.base_layer).__name__}"
            raise ConfigError(
                f"{_SETTING}.target_modules takes {name!r}, which is {kind}: engines and the chunked head compute adapters of "
                "linear layers inside the model only. Leave it out, or name it in exclude_modules."
            )


def _digest(model: PreTrainedModel, lora: LoraConfig) -> torch.Tensor:
    """Return the SHA-256 over the adapter's rank and alpha, and names, shapes and a sample of every weight: uint8 ``[32]``."""
    digest = hashlib.sha256(f"{lora.rank}/{lora.alpha}".encode())
    for name, weight in model.named_parameters():
        flat = weight.detach().flatten()
        sample = flat[:: max(1, flat.numel() // _SAMPLES)].float().cpu().contiguous()
        digest.update(f"{name}{tuple(weight.shape)}".encode() + sample.numpy().tobytes())
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
