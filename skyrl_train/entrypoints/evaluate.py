"""``skyrl-train eval``: the evaluation of a run without training, for any of its checkpoints, or for any model."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from skyrl_train.config import derive
from skyrl_train.config.compose import with_overrides
from skyrl_train.config.import_path import forget_files
from skyrl_train.config.schema import RunConfig
from skyrl_train.config.validate import raise_errors, validate
from skyrl_train.entrypoints.generation import engine_logs, started_generation, without_trainer
from skyrl_train.entrypoints.inputs import RunInputs, check_implementations, load_inputs, print_warnings
from skyrl_train.entrypoints.settings import read_settings
from skyrl_train.errors import ConfigError, NoSuchRunError
from skyrl_train.evaluation.metrics import EvaluatedPrompt, EvaluationResult
from skyrl_train.observability.run import part_of_run, split_checkpoint
from skyrl_train.observability.run_folder import CONFIG, read_config
from skyrl_train.rollout.data.dataset import check_template


def evaluate(
    policy: str, recipe: str | None, overrides: Sequence[str], config_dir: Path | None, *, library: str | None = None
) -> EvaluationResult:
    """Evaluate a policy as the settings ``trainer.eval`` say, print the scores, and return them.

    Args:
        policy: ``RUN``, ``RUN:STEP`` or ``RUN:best``, whose settings apply; with ``recipe``, a model folder or a hub name.
        library: of the settings in ``recipe``; see :func:`skyrl_train.entrypoints.settings.read_settings`.

    Raises:
        SkyRLError: a setting or an input cannot work, or the engines failed.
    """
    if library is not None and recipe is None:
        raise ConfigError(
            f"--from {library} needs a file of {library}: --recipe FILE. Without it, a run's settings apply."
        )
    console = Console()
    forget_files()
    with tempfile.TemporaryDirectory() as folder:
        if recipe is not None:
            config = read_settings(recipe, overrides, config_dir, library, console)
        else:
            from skyrl_train.build.export import export_checkpoint  # imports torch

            run, which = split_checkpoint(policy)
            if not (run / CONFIG).is_file():
                raise NoSuchRunError(
                    f"There is no run in {run}.{part_of_run(run)} For a model, name the recipe that evaluates it: --recipe "
                    "RECIPE."
                )
            config = with_overrides(read_config(run), overrides)
            policy = str(Path(folder) / "model")
            step = export_checkpoint(run, which, Path(policy))
            console.print(f"the policy after step {step} of {run}", markup=False, highlight=False, soft_wrap=True)
        inputs = load_inputs(for_evaluation(config, policy))
        check_implementations(inputs.config)
        print_warnings(inputs, console, strict=False)
        with engine_logs(Path(folder), console) as logs:
            result = asyncio.run(_evaluate(inputs, policy, logs))
    console.print(result.headline.partition(": ")[2], markup=False, highlight=False, soft_wrap=True)
    for name, value in result.metrics.items():
        console.print(f"{name} {value:g}", markup=False, highlight=False)
    return result


def for_evaluation(config: RunConfig, policy: str) -> RunConfig:
    """Return ``config`` with what the evaluation of the model folder ``policy`` alone needs.

    The schedule of a run's evaluations, engines beside the run's, and the choice of a best checkpoint do not count here.

    Raises:
        ConfigError: a setting cannot work.
    """
    trainer = config.trainer
    model, settings = replace(trainer.policy.model, path=policy), replace(trainer.eval, best_metric=None)
    trainer = replace(trainer, policy=replace(trainer.policy, model=model), eval=settings)
    config = without_trainer(replace(config, trainer=trainer))
    if settings.interval:
        return config
    raise_errors(validate(config).errors)  # the interval below relies on valid sizes
    # Without an interval there would be no prompts.
    settings = replace(settings, interval=derive.weight_sync_interval(config), num_engines=0)
    return replace(config, trainer=replace(config.trainer, eval=settings))


async def _evaluate(inputs: RunInputs, model_path: str, logs: Path) -> EvaluationResult:
    from skyrl_train.evaluation.engines import SharedEngines
    from skyrl_train.evaluation.rollouts import PromptRunner
    from skyrl_train.runtime.concurrency import gather_or_cancel

    async with started_generation(inputs.config, inputs.plan, model_path, logs) as generation:
        check_template(inputs.evaluation_prompts, generation.tokenizer)
        began = time.perf_counter()
        engines = SharedEngines(generation.generator, generation.client)
        score = next((stage.run for stage in generation.rewards), None)
        runner = PromptRunner(inputs.config, engines, score)
        slots = asyncio.Semaphore(inputs.config.trainer.eval.max_parallel)

        async def run(index: int) -> EvaluatedPrompt:
            async with slots:
                return await runner.run(inputs.evaluation_prompts[index], index, version=0)

        prompts = await gather_or_cancel(run(index) for index in range(len(inputs.evaluation_prompts)))
        return EvaluationResult(0, tuple(prompts), time.perf_counter() - began)
