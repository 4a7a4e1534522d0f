"""The policy of a checkpoint as a model folder.

The verbs ``export`` and ``eval`` use it, and the settings ``trainer.hf_save_interval`` and ``trainer.init_from``.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from safetensors.torch import save_file

from skyrl_train.checkpoint_saving import POLICY_FOLDER
from skyrl_train.config import derive
from skyrl_train.config.schema import RunConfig
from skyrl_train.errors import CheckpointError, ConfigError, SkyRLError
from skyrl_train.models.folder import load_model
from skyrl_train.models.lora import add_adapter
from skyrl_train.observability.run import Run, Which, load_run, split_checkpoint
from skyrl_train.observability.run_folder import CONFIG, ORIGIN, RunFolder, replace_file
from skyrl_train.training.actor_critic import CRITIC_FOLDER
from skyrl_train.training.checkpoint import checkpoint_step
from skyrl_train.training.critic_worker import VALUE_HEAD, put_value_head
from skyrl_train.training.export import export_hf, load_policy

logger = logging.getLogger(__name__)


def export_checkpoint(run: Path, which: Which, folder: Path) -> int:
    """Write the policy of a run's checkpoint to ``folder`` and return its step. The run is only read.

    Raises:
        ConfigError: there is no run, or no such checkpoint on this machine.
        CheckpointError: the checkpoint is damaged, or ``folder`` cannot be written.
        ModelError: the initial model of the run cannot be opened.
    """
    source = load_run(run)
    return export_folder(source, source.checkpoint(which), folder)


def export_folder(source: Run, checkpoint: Path, folder: Path) -> int:
    """As :func:`export_checkpoint`, for the folder of an intact checkpoint of ``source``."""
    policy, model_path = source.config.trainer.policy, starting_model(source)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # before the model is loaded, which may take minutes
        raise CheckpointError(f"{folder} cannot be made: {error.strerror}. Choose another folder.") from error
    model = load_model(model_path, policy.dtype, "cpu")
    if policy.model.lora.rank:
        add_adapter(model, policy.model.lora, seed=source.config.trainer.seed)
    load_policy(model, checkpoint / POLICY_FOLDER)
    export_hf(model, model_path, folder)
    return checkpoint_step(checkpoint)


def starting_model(run: Run) -> str:
    """Return the folder or hub name of the model that a run starts from."""
    path, own = run.config.trainer.policy.model.path, run.path / "model"
    # A run that builds its model, or starts from the policy of another run, has it in its own folder.
    return str(own) if own.is_dir() or path is None else path


def export_in_process(run: RunFolder, step: int) -> None:
    """Write the policy of a checkpoint to ``policies/global_step_N`` in another process, and wait for it.

    A failure is a warning: the checkpoint has the same weights. Another process, because transformers changes globals of torch,
    such as the default dtype, while it builds a model. An export that fails while the checkpoint is written again, which has the
    same policy then, begins again once.
    """
    folder = run.path / "policies" / f"global_step_{step}"
    # Of a step that was lost with its weights. Removed first: if the new export fails, it would pass for that of this step.
    shutil.rmtree(folder, ignore_errors=True)
    checkpoint = run.checkpoints / f"global_step_{step}"
    before = _inode(checkpoint)
    problem = _export_elsewhere(run, step, folder)
    if problem and _inode(checkpoint) != before:
        problem = _export_elsewhere(run, step, folder)
    if problem:
        logger.warning(
            "the policy after step %d was not exported (%s). `skyrl-train export %s:%d FOLDER` does it later",
            step, problem, run.path, step,
        )  # fmt: skip


def _inode(folder: Path) -> int | None:
    """Return a number that tells a folder from another one that takes its place; None: there is none."""
    with suppress(OSError):
        return folder.stat().st_ino
    return None


def _export_elsewhere(run: RunFolder, step: int, folder: Path) -> str:
    """Export in another process and wait for it. Returns what went wrong, or an empty string."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # the same packages as here
    log = run.logs / "export.log"
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "skyrl_train", "export", f"{run.path}:{step}", str(folder)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C asks for a checkpoint, and for the policy of this one
            )
        code = process.wait()
    except OSError as error:
        return str(error)
    return f"exit code {code}, {log} says why" if code else ""


def export_critic(source: Run, state: Path, folder: Path) -> None:
    """Write the critic of a checkpoint to ``folder``: a model with the head of its base, and the value head in a file beside it.

    Args:
        state: the critic's folder in the checkpoint.

    Raises: like :func:`export_checkpoint`.
    """
    critic = source.config.trainer.critic
    base = critic.model.path or starting_model(source)
    model = load_model(base, critic.dtype, "cpu")
    tied, head = model.config.get_text_config().tie_word_embeddings, model.get_output_embeddings()
    put_value_head(model)
    load_policy(model, state)
    value_head = {name: weight.contiguous() for name, weight in model.get_output_embeddings().state_dict().items()}
    model.set_output_embeddings(head)
    model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = tied
    export_hf(model, base, folder)
    save_file(value_head, folder / VALUE_HEAD)


def find_source(init_from: str, config: RunConfig, step: int | None = None) -> tuple[Run, Path]:
    """Return the run that ``trainer.init_from`` names, and the folder of its checkpoint, or of the one of ``step``.

    Raises:
        ConfigError: there is no such run or checkpoint, or the run has another model than ``config``.
        CheckpointError: the checkpoint is damaged.
    """
    path, which = split_checkpoint(init_from)
    source = load_run(path)
    ours, theirs = config.trainer.policy.model, source.config.trainer.policy.model
    places = [None if model.path is None else Path(model.path).absolute() for model in (ours, theirs)]
    if places[0] != places[1] or ours.build != theirs.build:
        raise ConfigError(
            f"trainer.init_from={init_from}: that run has another model. Set trainer.policy.model.path and "
            f"trainer.policy.model.build as in {path / CONFIG}."
        )
    return source, source.checkpoint(which if step is None else step)


def start_from_run(init_from: str, config: RunConfig, folder: Path, began: int | None = None) -> None:
    """Write the policy that ``trainer.init_from`` names to ``folder``, and its run and step beside it; keep an existing folder.

    A LoRA adapter is merged. If both runs have a critic that starts from the same model, the critic is written beside it too.

    Args:
        began: the step of the policy from which the run has started on another machine.

    Raises: like :func:`find_source` and :func:`export_checkpoint`.
    """
    if folder.is_dir():
        return
    try:
        source, checkpoint = find_source(init_from, config, began)
    except SkyRLError as error:
        if began is None:
            raise
        raise ConfigError(
            f"The run in trainer.ckpt_path={config.trainer.ckpt_path} started from step {began} of {init_from}. Another policy "
            f"would change its reference: {error} Restore that checkpoint, or copy the run folder from the machine where the "
            f"run began to {folder.parent}."
        ) from error
    unfinished = folder.with_name(f".init-{folder.name}")
    step = export_folder(source, checkpoint, unfinished)
    # A start that was interrupted may have left one, written under other settings.
    shutil.rmtree(folder.with_name(CRITIC_FOLDER), ignore_errors=True)
    critic = checkpoint / POLICY_FOLDER / CRITIC_FOLDER
    same = source.config.trainer.critic.model == config.trainer.critic.model
    if derive.needs_critic(config.trainer.algorithm) and critic.is_dir() and same:
        export_critic(source, critic, folder.with_name(CRITIC_FOLDER))
        logger.info("the critic starts from the one of %s", source.path)
    origin = {"run": str(source.path.resolve()), "step": step}
    replace_file(folder.with_name(ORIGIN), json.dumps(origin, indent=2) + "\n")
    os.replace(unfinished, folder)
    logger.info("the run starts from the policy after step %d of %s", step, source.path)
