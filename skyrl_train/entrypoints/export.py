"""``skyrl-train export``: a checkpoint as a model folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from skyrl_train.errors import CheckpointError, ConfigError


def export(
    run: Annotated[str, typer.Argument(metavar="RUN[:STEP]", help="A run; without a step its newest checkpoint.")],
    folder: Annotated[Path, typer.Argument(help="The new model folder.")],
) -> int:
    """Write the policy of a checkpoint as a folder that transformers, vLLM and serve open.

    Any number of ranks may have written the checkpoint. A LoRA adapter is merged, and also written to FOLDER/adapter for peft.
    """
    from rich.console import Console

    path, step = split_step(run)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already. Name a new folder.")
    step = export_checkpoint(path, step, folder)
    Console().print(
        f"the policy after step {step} of {path} is in {folder}", markup=False, highlight=False, soft_wrap=True
    )
    return 0


def split_step(run: str) -> tuple[Path, int | None]:
    """Split ``RUN:STEP``; the step may be missing."""
    found = re.fullmatch(r"(.+):(\d+)", run)
    return (Path(found[1]), int(found[2])) if found else (Path(run), None)


def export_checkpoint(run: Path, step: int | None, folder: Path) -> int:
    """Write the policy of a run's checkpoint to ``folder`` and return its step. The run is only read.

    Args:
        step: None: the newest intact checkpoint.

    Raises:
        ConfigError: there is no run, or no such checkpoint on this machine.
        CheckpointError: the checkpoint is damaged, or ``folder`` cannot be written.
        ModelError: the initial model of the run cannot be opened.
    """
    # They import torch.
    from skyrl_train.checkpoint_saving import POLICY_FOLDER
    from skyrl_train.models.folder import load_model
    from skyrl_train.models.lora import add_adapter
    from skyrl_train.observability.run import load_run
    from skyrl_train.training.checkpoint import CheckpointStore, checkpoint_step, find_damage
    from skyrl_train.training.export import export_hf, load_policy

    trainer, checkpoints = load_run(run).config.trainer, run / "checkpoints"
    if step is None:
        checkpoint = CheckpointStore(checkpoints, max_to_keep=1).latest()
        if checkpoint is None:
            where = f"; copy one there from {trainer.ckpt_path}" if trainer.ckpt_path else ""
            raise ConfigError(f"{checkpoints} has no checkpoint yet{where}.")
    else:
        checkpoint = checkpoints / f"global_step_{step}"
        if not checkpoint.is_dir():
            steps = sorted(int(path.name.rpartition("_")[2]) for path in checkpoints.glob("global_step_*[0-9]"))
            raise ConfigError(
                f"{run} has no checkpoint of step {step} here. Steps: {', '.join(map(str, steps)) or 'none'}."
            )
        if damage := find_damage(checkpoint):
            raise CheckpointError(f"{checkpoint} is damaged: {damage}. Export another step.")
    model_path = trainer.policy.model.path or str(run / "model")
    model = load_model(model_path, trainer.policy.dtype, "cpu")
    if trainer.policy.model.lora.rank:
        add_adapter(model, trainer.policy.model.lora, seed=trainer.seed)
    load_policy(model, checkpoint / POLICY_FOLDER)
    folder.parent.mkdir(parents=True, exist_ok=True)
    export_hf(model, model_path, folder)
    return checkpoint_step(checkpoint)
