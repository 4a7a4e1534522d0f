"""``skyrl-train export``: a checkpoint as a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skyrl_train.errors import ConfigError


def export(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN[:STEP|:best]",
            help="A run; without a step its newest checkpoint. best: by trainer.eval.best_metric.",
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="The new model folder.")],
) -> int:
    """Write the policy of a checkpoint as a folder that transformers, vLLM and serve open.

    Any number of ranks may have written the checkpoint. A LoRA adapter is merged, and also written to FOLDER/adapter for peft.
    """
    from rich.console import Console

    from skyrl_train.build.export import export_checkpoint
    from skyrl_train.observability.run import split_checkpoint

    path, which = split_checkpoint(run)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already. Name a new folder.")
    step = export_checkpoint(path, which, folder)
    Console().print(
        f"the policy after step {step} of {path} is in {folder}", markup=False, highlight=False, soft_wrap=True
    )
    return 0
