"""The Python front door: :func:`train` in a script, a test or a notebook."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import re
import shutil
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from hydra.core.override_parser.types import Quote, QuotedString
from rich.console import Console

from skyrl_train.config.compose import compose, with_overrides
from skyrl_train.config.import_path import forget_files, import_path_of
from skyrl_train.config.keys import in_free_section, known_keys, meant_setting, nearest
from skyrl_train.config.schema import EnvironmentConfig, RunConfig
from skyrl_train.entrypoints.inputs import RunInputs, load_inputs, print_warnings
from skyrl_train.entrypoints.run import RunResult, StopRequest
from skyrl_train.entrypoints.run import train as train_inputs
from skyrl_train.entrypoints.settings import check_working_folder
from skyrl_train.entrypoints.stop_signals import stop_signals_as_ctrl_c
from skyrl_train.errors import ConfigError
from skyrl_train.observability.run import Run, load_run
from skyrl_train.observability.run_folder import replace_file
from skyrl_train.rollout.stages.reward import WeightedSum

if TYPE_CHECKING:
    import datasets
    import pandas
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from skyrl_train.generators.base import GeneratorInterface
    from skyrl_train.trainer import PPOTrainer

Overrides = Sequence[str] | Mapping[str, Any]

# Arguments of TRL's trainers, and settings that have an argument.
_ARGUMENTS_ELSEWHERE = {
    "reward_funcs": "reward_fn",
    "reward": "reward_fn",
    "env": "environment",
    "train_dataset": "dataset",
    "data": "dataset",
    "eval_data": "eval_dataset",
    "processing_class": "tokenizer",
    "args": "overrides",
}


def train(
    recipe_or_config: str | Path | RunConfig | None = None,
    *,
    overrides: Overrides = (),
    model: str | Path | PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dataset: Sequence[Mapping[str, Any]] | datasets.Dataset | pandas.DataFrame | None = None,
    eval_dataset: Sequence[Mapping[str, Any]] | datasets.Dataset | pandas.DataFrame | None = None,
    trainer_cls: type[PPOTrainer] | None = None,
    generator: type[GeneratorInterface] | Callable[..., GeneratorInterface] | None = None,
    environment: str | type | Callable[..., Any] | None = None,
    agent: Callable[..., Any] | None = None,
    reward_fn: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    reward_weights: Sequence[float] | None = None,
    config_dir: str | Path | None = None,
    strict: bool = False,
    quiet: bool = False,
    **unknown: Never,
) -> Run:
    """Train, and return the run. Blocks until training has ended; works in a script and in a notebook cell.

    A run that was interrupted continues when the same call is made again: a function is recognised by its name, a lambda by its
    code. In the main thread Ctrl-C (in a notebook: interrupting the kernel) stops the run after its current step, with a
    checkpoint.

    Args:
        recipe_or_config: a recipe's name, the path of a yaml file, or a configuration from ``compose``. None: with ``model``, the
            defaults of all settings and ``trainer.mode=fully_async``; else the recipe ``quickstart``. Without a recipe,
            ``trainer.run_name`` is the name of the agent, generator, environment or reward function, else of the script that
            gives a ``dataset``, else of the model.
        overrides: settings, as ``["trainer.max_steps=10"]`` or as ``{"trainer.max_steps": 10}``; a mapping may be nested.
        model: a folder, a name on the hub, or a model of transformers; sets ``trainer.policy.model.path``. An object is not
            changed: it is saved to ``trainer.runs_dir/models/DIGEST``, and the trained model is in the folder ``Run.policy``.
        tokenizer: of a model that is an object; by default that of ``model.name_or_path``.
        dataset: the prompts: rows as dictionaries, a ``datasets.Dataset`` or a pandas frame. Sets ``data.train_data`` to a file
            with the rows, ``trainer.runs_dir/datasets/DIGEST.jsonl``: equal rows have the same file, so an equal call continues
            the run.
        eval_dataset: the same for evaluation; sets ``trainer.eval.eval_data``.
        trainer_cls: a subclass of a trainer; sets ``trainer.mode``.
        generator: a generator's class, or a function that returns one; sets ``generator.name``. It is called with the
            arguments that it names: ``client``, ``tokenizer``, ``generator_config``, ``environment_config``, ``model_path``.
        environment: a class, a function that returns a new environment for the extras of a data row, or a registered name;
            sets ``environment.env_class``.
        agent: a function agent, ``async def agent(prompt, base_url, api_key, extras)``, which returns its reward; sets
            ``generator.name=harness`` and ``generator.kwargs.agent``.
        reward_fn: scores each finished group, see :mod:`skyrl_train.rollout.stages.reward`; sets
            ``rollout.stages.reward.function``. With data of yours and no other environment, each answer is one turn. A list
            of functions: the reward is their sum, and the mean of each the metric ``environment/<its name>``.
        reward_weights: of each function in ``reward_fn``; by default 1 each.
        config_dir: a folder with further recipes.
        strict: an error, instead of a warning, if a setting has no effect or this machine's memory does not suffice; the
            ``--strict`` of the command line.
        quiet: print nothing.
        unknown: any other name is an error, which tells the setting or the argument that is meant.

    Raises:
        ConfigError: an argument or a setting is wrong, or a run is under way in this process.
        SkyRLError: the run failed; its last checkpoint stands.
    """
    for argument in unknown:
        raise _unknown_argument(argument)
    # A file may have changed since the last run in this notebook.
    forget_files()
    # After the overrides: an argument of this call is the more explicit choice.
    named: dict[str, Any] = {}
    if recipe_or_config is None:
        recipe_or_config = "quickstart" if model is None else compose("base", ["trainer.mode=fully_async"])
        if name := _name(agent, generator, environment, reward_fn, dataset, model):
            named = {"trainer.run_name": name}
    settings = dict(_classes(trainer_cls, generator, environment, agent, reward_fn, reward_weights))
    config = _compose(recipe_or_config, [*_as_list(named), *_as_list(overrides), *_as_list(settings)], config_dir)
    if model is None and tokenizer is not None:
        raise ConfigError("tokenizer belongs to a model that is an object: train(model=..., tokenizer=...).")
    if model is not None:
        if not isinstance(model, str | Path):
            model = write_model(model, tokenizer, Path(config.trainer.runs_dir) / "models")
        elif tokenizer is not None:
            raise ConfigError("tokenizer belongs to a model that is an object: a folder has its own.")
        config = with_overrides(config, _as_list({"trainer.policy.model.path": str(model)}))
    for argument, rows, key in (
        ("dataset", dataset, "data.train_data"),
        ("eval_dataset", eval_dataset, "trainer.eval.eval_data"),
    ):
        if rows is not None:
            path = write_rows(argument, rows, Path(config.trainer.runs_dir) / "datasets")
            config = with_overrides(config, _as_list({key: [path]}))
    # The default environment is a toy task, which cannot judge other prompts; the reward function does.
    judged = config.data.train_data and config.rollout.stages.reward.function is not None
    if judged and environment is None and config.environment == EnvironmentConfig():
        config = with_overrides(config, ["environment.env_class=single_turn"])
    console = Console(quiet=quiet)
    inputs = load_inputs(config)
    print_warnings(inputs, console, strict=strict)
    try:
        asyncio.get_running_loop()
        loop_runs = True
    except RuntimeError:
        loop_runs = False
    if loop_runs:
        result = _train_in_a_thread(inputs, console)
    else:
        in_main_thread = threading.current_thread() is threading.main_thread()  # only there may signal handlers change
        with stop_signals_as_ctrl_c() if in_main_thread else nullcontext():
            result = train_inputs(inputs, console)
    run = load_run(result.path)
    if not result.finished:
        console.print("Stopped with a checkpoint; the same call continues the run.", highlight=False)
    alarms = [str(advice) for advice in run.advice if advice.level == "alarm"]
    for line in (*alarms, run.learned, repr(run)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return run


def _unknown_argument(argument: str) -> ConfigError:
    arguments = list(inspect.signature(train).parameters)[:-1]
    remedy = "Settings are given in overrides."
    exact = [key for key in known_keys() if key.rpartition(".")[2] == argument]
    other = _ARGUMENTS_ELSEWHERE.get(argument)
    if other is None and not exact:  # not "model" for mode
        other = nearest(argument, arguments)
    if other is not None:
        remedy = f"Did you mean {other}?"
    elif setting := meant_setting(argument):
        remedy = f"Settings are given in overrides: train(..., overrides={{{setting!r}: ...}})."
    return ConfigError(f"train() has no argument {argument!r}. {remedy}")


def _name(
    agent: object, generator: object, environment: object, reward_fn: object, dataset: object, model: object
) -> str | None:
    """Return a name for a run without a recipe; None if it has nothing of its own: then it is the quickstart."""
    rewards = reward_fn if isinstance(reward_fn, Sequence) else [reward_fn]
    for given in (agent, generator, environment, *rewards):
        if given is not None:
            name = str(getattr(given, "__name__", given))
            break
    else:
        script = getattr(sys.modules["__main__"], "__file__", None)  # a notebook has none
        if dataset is not None and script is not None:
            name = Path(script).stem.replace("__main__", Path(script).parent.name)  # of python -m package
        elif model is not None:
            name = Path(str(getattr(model, "name_or_path", model)) or type(model).__name__).name
        else:
            return None if dataset is None else "dataset"
    return re.sub(r"[^\w.-]+", "_", name)


def _classes(
    trainer_cls: object,
    generator: Callable[..., GeneratorInterface] | None,
    environment: str | Callable[..., Any] | None,
    agent: Callable[..., Any] | None,
    reward_fn: Callable[..., Any] | Sequence[Callable[..., Any]] | None,
    reward_weights: Sequence[float] | None,
) -> Iterator[tuple[str, object]]:
    """The settings that name the given classes and functions."""
    if trainer_cls is not None:
        from skyrl_train.trainer import PPOTrainer

        if not isinstance(trainer_cls, type) or not issubclass(trainer_cls, PPOTrainer):
            raise ConfigError(f"trainer_cls must be a subclass of PPOTrainer, got {trainer_cls!r}.")
        yield "trainer.mode", import_path_of(trainer_cls)
    if generator is not None:
        from skyrl_train.generators.base import GeneratorInterface

        if inspect.isclass(generator):
            if not issubclass(generator, GeneratorInterface):
                raise ConfigError(f"generator must be a subclass of GeneratorInterface, got {generator!r}.")
        elif not inspect.isfunction(generator):
            raise ConfigError(
                f"generator must be a class, or a function that returns a generator, got {generator!r}. A trainer makes its "
                "generator itself, because only then does the inference client exist."
            )
        yield "generator.name", import_path_of(generator)
    if isinstance(environment, str):
        yield "environment.env_class", environment
    elif environment is not None:
        if not (inspect.isfunction(environment) or inspect.isclass(environment)):
            raise ConfigError(
                f"environment must be a class, a function that returns an environment, or a name, got {environment!r}. Each "
                "episode has an environment of its own."
            )
        yield "environment.env_class", import_path_of(environment)
    if agent is not None:
        if generator is not None:
            raise ConfigError("Give agent or generator, not both: an agent runs in the harness, which is a generator.")
        if not inspect.isfunction(agent):
            raise ConfigError(
                f"agent must be a function such as async def agent(prompt, base_url, api_key), got {agent!r}."
            )
        yield "generator.name", "harness"
        yield "generator.kwargs.agent", import_path_of(agent)
    # A text is a sequence too, and no list of functions.
    given: Any = reward_fn
    several = isinstance(given, Sequence) and not isinstance(given, str)
    functions = list(given) if several else [] if given is None else [given]
    for function in functions:
        if not (inspect.isfunction(function) or inspect.isclass(function)):
            named = "; a name such as file.py:reward is the setting rollout.stages.reward.function, in overrides"
            raise ConfigError(
                f"reward_fn must be a function, or a class with a __call__ method, got {function!r}"
                f"{named if isinstance(function, str) else ''}."
            )
    paths = list(map(import_path_of, functions))
    if len(set(paths)) < len(paths):
        raise ConfigError(f"Two functions in reward_fn have the name {max(paths, key=paths.count)}; give each its own.")
    setting = "rollout.stages.reward"
    if several:
        yield f"{setting}.function", import_path_of(WeightedSum)
        yield f"{setting}.kwargs", {"functions": paths, "weights": reward_weights}
    elif reward_weights is not None:
        raise ConfigError("reward_weights belong to a list of functions: reward_fn=[first, second].")
    elif paths:
        yield f"{setting}.function", paths[0]


def write_rows(argument: str, dataset: Any, folder: Path) -> Path:
    """Write the rows of ``dataset`` as JSON lines, unless they are there; return the file, which is named after its content.

    Raises:
        ConfigError: ``dataset`` is of another kind, it is empty, a value is not JSON, or ``folder`` cannot be made.
        SkyRLError: the disk is full or gone.
    """
    rows: Iterable[Any]
    if isinstance(dataset, Sequence) and not isinstance(dataset, str | bytes):
        rows = dataset
    else:
        import datasets
        import pandas

        if isinstance(dataset, datasets.DatasetDict):
            raise ConfigError(f"{argument} has several splits: {', '.join(map(str, dataset))}. Give one of them.")
        if isinstance(dataset, datasets.Dataset):
            rows = dataset
        elif isinstance(dataset, pandas.DataFrame):
            rows = dataset.to_dict("records")
        else:
            raise ConfigError(
                f"{argument} must be a list of rows, a datasets.Dataset or a pandas.DataFrame, got "
                f"{type(dataset).__name__}. Name files, folders or data sets on the hub in data.train_data."
            )

    def without_numpy(value: object) -> Any:
        # Frames hold lists as arrays, and numbers as numpy's.
        if hasattr(value, "tolist"):
            return value.tolist()
        raise TypeError(f"{value!r:.100}, a {type(value).__name__}")

    lines, digest = [], hashlib.sha256()
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ConfigError(f"{argument}[{number}] must be a dictionary of columns, got {row!r:.100}.")
        try:
            line = json.dumps(dict(row), ensure_ascii=False, default=without_numpy) + "\n"
            digest.update(line.encode())
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{argument}[{number}] has a value that is not text, a number, true or false, a list or a mapping: {error}."
            ) from error
        lines.append(line)
    if not lines:
        raise ConfigError(f"{argument} has no rows.")
    path = folder / f"{digest.hexdigest()[:16]}.jsonl"
    if not path.is_file():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be made: {error.strerror}. Correct trainer.runs_dir.") from error
        # Several processes may write equal rows at once, each under a name of its own.
        own = path.with_name(f".{uuid.uuid4().hex}.jsonl")
        replace_file(own, "".join(lines))
        own.replace(path)
    return path


def write_model(model: Any, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> Path:
    """Save a model of transformers and its tokenizer, unless they are there; return their folder, named after its content.

    Args:
        tokenizer: None: the one of ``model.name_or_path``.

    Raises:
        ConfigError: ``model`` is of another kind, its tokenizer is unknown, or they cannot be saved in ``folder``.
        ModelError: ``model.name_or_path`` has no usable tokenizer.
    """
    from transformers import PreTrainedModel

    from skyrl_train.models.folder import load_tokenizer, quiet_transformers

    # A model with an adapter would save nothing else.
    if not isinstance(model, PreTrainedModel) or getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError(
            f"model must be a folder, a name on the hub, or a model of transformers, got {type(model).__name__}. Merge the "
            "adapter of a PEFT model first: model.merge_and_unload()."
        )
    if tokenizer is None:
        if not model.name_or_path:
            raise ConfigError(
                "model comes from no folder or hub, so its tokenizer is unknown: give train(tokenizer=...)."
            )
        tokenizer = load_tokenizer(model.name_or_path)
    own = folder / f".{uuid.uuid4().hex}"
    try:
        own.mkdir(parents=True)
        with quiet_transformers():
            model.save_pretrained(own)
            tokenizer.save_pretrained(own)
        digest = hashlib.sha256()
        for file in sorted(own.iterdir()):
            with file.open("rb") as content:
                digest.update(f"{file.name} {hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
        path = folder / digest.hexdigest()[:16]
        if not path.is_dir():
            own.rename(path)
    except OSError as error:
        raise ConfigError(
            f"The model cannot be saved in {folder}: {error}. Make space there, or correct trainer.runs_dir."
        ) from error
    finally:
        shutil.rmtree(own, ignore_errors=True)
    return path


def _compose(
    recipe_or_config: str | Path | RunConfig, overrides: Sequence[str], config_dir: str | Path | None
) -> RunConfig:
    if isinstance(recipe_or_config, str | Path):
        config = compose(str(recipe_or_config), overrides, config_dir)
        check_working_folder(recipe_or_config, config)
        return config
    if isinstance(recipe_or_config, RunConfig):
        return with_overrides(recipe_or_config, overrides)
    raise ConfigError(
        "train() takes a recipe's name, the path of a yaml file, or a RunConfig (see skyrl_train.compose); got "
        f"{type(recipe_or_config).__name__}. Give settings as overrides=..."
    )


def _as_list(overrides: Iterable[object] | Mapping[str, Any]) -> list[str]:
    """Overrides in hydra's grammar."""
    if isinstance(overrides, str):
        raise ConfigError(
            f"overrides must be a list or a mapping, got the string {overrides!r}: write [{overrides!r}]."
        )
    if isinstance(overrides, Mapping):
        return list(_flattened("", overrides))
    listed = []
    for override in overrides:
        if not isinstance(override, str):
            raise ConfigError(f"Each override is a string such as 'trainer.max_steps=10', got {override!r}.")
        listed.append(override)
    return listed


def _flattened(prefix: str, settings: Mapping[str, Any]) -> Iterator[str]:
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and not in_free_section(key):
            yield from _flattened(f"{key}.", value)
        else:
            yield f"{key}={_literal(value)}"


def _literal(value: Any) -> str:
    """A value in hydra's override grammar."""
    if value is None:
        return "null"
    # Before the numbers: a bool is an int in Python.
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str | Path):
        return QuotedString(str(value), Quote.single).with_quotes()
    if isinstance(value, Mapping):
        # The grammar takes no quotes around the key of a mapping; it takes special characters behind a backslash.
        keys = (re.sub(r"([\\()\[\]{}:=,\s])", r"\\\1", str(key)) for key in value)
        return "{" + ",".join(f"{key}:{_literal(inner)}" for key, inner in zip(keys, value.values(), strict=True)) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(map(_literal, value)) + "]"
    raise ConfigError(f"A setting cannot hold {value!r}: give a number, text, true or false, a list or a mapping.")


def _train_in_a_thread(inputs: RunInputs, console: Console) -> RunResult:
    """Train beside the event loop that runs in this thread, such as a notebook's, which stands still meanwhile.

    The first interrupt of the kernel requests a stop; a second one returns at once, and the run ends in the background.
    """
    stop, done = StopRequest(), Future[RunResult]()

    def run() -> None:
        try:
            done.set_result(train_inputs(inputs, console, stop))
        except BaseException as error:
            done.set_exception(error)

    # A daemon: an interrupted notebook must be able to end while the run still stops.
    threading.Thread(target=run, name="train", daemon=True).start()
    try:
        return done.result()
    except KeyboardInterrupt:
        stop.request()
        return done.result()
