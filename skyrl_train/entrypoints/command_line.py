"""``skyrl-train VERB ...``. The libraries of a verb are imported when it is called, so that help is quick.

Verbs that take a recipe are declared here, the others in their own modules.

Exit codes: 0 done, or stopped by SIGTERM / Ctrl-C with a checkpoint; 1 it failed; 2 the command line, a setting or an input is
wrong; 3 a run has trained to its end, but every sample had the same reward; 130 interrupted before anything began.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from skyrl_train.entrypoints.compare import compare
from skyrl_train.entrypoints.export import export
from skyrl_train.entrypoints.init import init
from skyrl_train.entrypoints.page import DEFAULT_PORT, page
from skyrl_train.entrypoints.process_setup import (
    check_current_folder,
    check_temporary_folder,
    prepare_streams,
    raise_open_files_limit,
)
from skyrl_train.entrypoints.report import report
from skyrl_train.entrypoints.serve import serve
from skyrl_train.entrypoints.simulate import simulate
from skyrl_train.entrypoints.trace import trace
from skyrl_train.entrypoints.track import track
from skyrl_train.entrypoints.watch import watch
from skyrl_train.errors import ConfigError, DataError, ModelError, SkyRLError
from skyrl_train.version import __version__

START, TRAIN, LOOK, USE = "Start", "Train", "Look", "Use the model"  # sections of the help
COMPUTING = ("try", "train", "sweep", "simulate", "serve", "export", "eval")  # verbs that import torch

app = typer.Typer(
    help="Asynchronous reinforcement learning of language models.",
    epilog="Settings are given as key=value. First steps: skyrl-train train quickstart",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a traceback without the values of local variables
    context_settings={"help_option_names": ["-h", "--help"]},
    result_callback=lambda code, **options: sys.exit(code),
)

Recipe = Annotated[
    str, typer.Argument(help="The name of a recipe, such as quickstart, a yaml file, or the folder of a run.")
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="key=value ...", help="Settings, in hydra's grammar.")]
ConfigDir = Annotated[Path | None, typer.Option(help="A folder with your recipes.")]
Strict = Annotated[
    bool, typer.Option("--strict", help="Fail if a setting has no effect, or the memory does not suffice.")
]

Library = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="LIBRARY",
        help="Instead of a recipe: a file (yaml, toml) or key=value settings of skyrl, verl, trl, prime-rl or areal.",
    ),
]


def print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"skyrl-async {__version__}")
        raise typer.Exit


@app.callback()
def of_all_verbs(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


class VerbWithSettings(TyperCommand):
    """A verb that takes settings: an option that does not exist was often meant as one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if type(error).__name__ != "NoSuchOption":  # typer does not export it
                raise
            option = str(getattr(error, "option_name"))  # noqa: B009
            if option in ("-m", "--multirun"):
                raise ConfigError(
                    f"{option} is no option. For several runs: skyrl-train sweep RECIPE key=a,b"
                ) from error
            from skyrl_train.config.keys import known_keys, meant_setting

            key = option.lstrip("-")
            meant = key if key in known_keys() else meant_setting(key)
            if not option.startswith("--") or meant is None or getattr(error, "possibilities", None):
                raise
            index, text = next((index, text) for index, text in enumerate(given) if text.partition("=")[0] == option)
            value = text.partition("=")[2] or next(iter(given[index + 1 :]), "VALUE")
            raise ConfigError(f"{option} is no option. Settings are written without dashes: {meant}={value}") from error


class TrainVerb(VerbWithSettings):
    """``train``, whose option ``--page`` may stand without a port."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for index, word in enumerate(args):
            if word == "--page" and not re.fullmatch(r":?\d+", next(iter(args[index + 1 :]), "")):
                args = [*args[:index], f"--page=:{DEFAULT_PORT}", *args[index + 1 :]]
        return super().parse_args(ctx, args)


def _with_verb(words: Sequence[str]) -> typer.Typer:
    """Return the application without the verbs that ``words`` do not call: typer takes a while to prepare each of them."""
    called = [command for command in app.registered_commands if _name(command) in words[:1]]
    if not called:
        return app
    small = copy.copy(app)
    # Of a single verb, typer would make an application without verbs.
    others = [command for command in app.registered_commands if command not in called]
    small.registered_commands = [*called, others[0]]
    return small


def _name(command: typer.models.CommandInfo) -> str | None:
    return command.name or (None if command.callback is None else command.callback.__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    prepare_streams()
    try:
        check_current_folder()
        if words and words[0] in COMPUTING:
            check_temporary_folder()
            raise_open_files_limit()
        _with_verb(words)(words, prog_name="skyrl-train")
    except SkyRLError as error:
        from rich.console import Console

        from skyrl_train.observability.failures import place_of
        from skyrl_train.observability.screen import visible

        place = place_of(error)
        hint = "" if words[:1] == ["try"] else " `skyrl-train try` shows the traceback of one group."
        code = [f"The code that failed: {place}.{hint}"] if place else []
        notes = getattr(error, "__notes__", ())
        text = "\n".join([f"{type(error).__name__}: {error}", *notes, *code, f"More: {error.docs}"])
        Console(stderr=True).print(visible(text), markup=False, highlight=False, soft_wrap=True)
        return 2 if isinstance(error, ConfigError | DataError | ModelError) else 1
    except SystemExit as end:
        if isinstance(end.code, str):  # of a user's module, which says what it misses
            typer.echo(end.code, err=True)
            return 1
        return int(end.code or 0)
    raise AssertionError("a verb ends with an exit code or an error")


app.command(rich_help_panel=START)(init)


@app.command(cls=VerbWithSettings, rich_help_panel=START)
def doctor(
    recipe: Annotated[str | None, typer.Argument(help="Also check the needs of this recipe.")] = None,
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    library: Library = None,
) -> int:
    """Check this machine: versions, GPUs, shared memory, disk, ports, sandbox, Ray; and a recipe's data, model and template.

    If the recipe uses Ray and a cluster runs, also all its nodes: versions, folders, and whether they reach each other.
    Exit code 1 if a check has failed.
    """
    from skyrl_train.entrypoints.doctor import doctor

    return doctor(recipe, overrides or (), config_dir, library=library)


@app.command(cls=VerbWithSettings, rich_help_panel=START)
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    strict: Strict = False,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="NODESxGPUSxKIND",
            help="Also plan for a machine that need not be here, such as H100, 8xH100 or 2x8xH100: who computes where, "
            "memory, times of a weight sync, MFU, tokens/s.",
        ),
    ] = None,
    response_tokens: Annotated[
        int | None, typer.Option(min=1, help="Mean length of responses for --on; default: half of the longest.")
    ] = None,
    prompts: Annotated[
        int, typer.Option(min=0, help="Also print so many prompts with the chat template, and their lengths.")
    ] = 0,
    library: Library = None,
) -> int:
    """Print the resolved settings of a recipe, check them, and start nothing."""
    import gc

    from skyrl_train.runtime.process import gc_paused

    try:
        with gc_paused():  # imports are most of the work
            from skyrl_train.entrypoints.plan import print_plan

            print_plan(
                recipe,
                overrides or (),
                config_dir,
                strict=strict,
                on=on,
                response_tokens=response_tokens,
                prompts=prompts,
                library=library,
            )
    finally:
        gc.unfreeze()
    return 0


app.command(rich_help_panel=START)(simulate)


@app.command("try", cls=VerbWithSettings, rich_help_panel=START)
def try_(
    recipe: Recipe,
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    samples: Annotated[
        int | None, typer.Option("--samples", "-n", min=1, help="Samples of the prompt; default: as the recipe says.")
    ] = None,
    prompt: Annotated[int, typer.Option(min=0, help="Which prompt, in the order of the run.")] = 0,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Also list every token with its log-prob and reward.")
    ] = False,
    library: Library = None,
) -> int:
    """Generate one group, show all of it (tokens, rewards, the traceback of code that fails), and train nothing."""
    from skyrl_train.entrypoints.try_group import try_group

    try_group(recipe, overrides or (), config_dir, samples=samples, prompt=prompt, tokens=tokens, library=library)
    return 0


@app.command(cls=TrainVerb, rich_help_panel=TRAIN)
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show the screens of `skyrl-train watch` in this terminal.")
    ] = False,
    page: Annotated[
        str | None,
        typer.Option(
            metavar="[:PORT]",
            help=f"Serve the page of the run to this machine while it trains; without a port at {DEFAULT_PORT}.",
        ),
    ] = None,
    config_dir: ConfigDir = None,
    strict: Strict = False,
    library: Library = None,
) -> int:
    """Train a policy. The same command resumes a run that was stopped or killed."""
    from skyrl_train.entrypoints.train import train_recipe

    return train_recipe(recipe, overrides or (), config_dir, strict=strict, library=library, watch=watch, page=page)


@app.command(cls=VerbWithSettings, rich_help_panel=TRAIN)
def sweep(
    recipe: Recipe,
    overrides: Annotated[
        list[str], typer.Argument(metavar="key=value ...", help="Settings; key=a,b and key=0..2 list several values.")
    ],
    folder: Annotated[Path | None, typer.Option(help="Of the sweep's runs; default: runs/RECIPE-sweep.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at once.")] = 1,
    config_dir: ConfigDir = None,
    library: Library = None,
) -> int:
    """Train every combination of the listed values, and print a table. The same command continues a sweep that was stopped."""
    from skyrl_train.entrypoints.sweep import sweep

    return sweep(recipe, overrides, config_dir, folder, jobs, library=library)


@app.command(cls=VerbWithSettings, rich_help_panel=TRAIN)
def launch(
    target: Annotated[
        Literal["docker", "slurm", "ray", "kuberay", "skypilot"],
        typer.Argument(help="The program that starts the job."),
    ],
    recipe: Recipe,
    overrides: Overrides = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Default: the fewest that have the GPUs.")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="Default: all on one node, up to 8. All nodes are alike.")
    ] = None,
    image: Annotated[
        str | None, typer.Option(metavar="NAME:TAG", help="docker and kuberay: the image; default: the run's name.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Of the files, in the current folder; default: launch/NAME.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite files that are there with another content.")
    ] = False,
    submit: Annotated[bool, typer.Option("--submit", help="Also run the command that starts the job.")] = False,
    config_dir: ConfigDir = None,
    library: Library = None,
) -> int:
    """Write the files that train a recipe in a container, on Slurm, on a Ray cluster, on Kubernetes or in a cloud.

    Nothing is started without --submit. The job runs in the current folder, or in a copy of it. Nodes, CPUs, GPUs and memory
    follow from the recipe.
    """
    from skyrl_train.entrypoints.launch import launch

    return launch(
        target,
        recipe,
        overrides or (),
        config_dir,
        folder=folder,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        image=image,
        force=force,
        submit=submit,
        library=library,
    )


app.command(rich_help_panel=LOOK)(watch)
app.command(rich_help_panel=LOOK)(page)
app.command(rich_help_panel=LOOK)(report)
app.command(rich_help_panel=LOOK)(compare)
app.command(rich_help_panel=LOOK)(trace)
app.command(rich_help_panel=LOOK)(track)
app.command(rich_help_panel=USE)(serve)
app.command(rich_help_panel=USE)(export)


@app.command("eval", cls=VerbWithSettings, rich_help_panel=USE)
def eval_(
    policy: Annotated[str, typer.Argument(metavar="RUN[:STEP|:best]|MODEL", help="A run; or a model, with --recipe.")],
    overrides: Overrides = None,
    recipe: Annotated[
        str | None, typer.Option(help="The recipe whose trainer.eval says how a model is evaluated.")
    ] = None,
    config_dir: ConfigDir = None,
    library: Library = None,
) -> int:
    """Evaluate a checkpoint or a model as trainer.eval says: pass@k, rewards and lengths. Nothing is trained or written."""
    from skyrl_train.entrypoints.evaluate import evaluate

    evaluate(policy, recipe, overrides or (), config_dir, library=library)
    return 0
