"""``skyrl-train try``: generate one group, show everything, train nothing.

For people who write an environment, a reward function, an agent or a generator: prompt and response as the model sees them,
token for token, the rewards, and the traceback of code that fails. It takes seconds, because no trainer is built.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from skyrl_train.config.import_path import forget_files
from skyrl_train.config.schema import RunConfig
from skyrl_train.entrypoints.generation import engine_logs, started_generation, without_trainer
from skyrl_train.entrypoints.inputs import RunInputs, check_implementations, load_inputs, print_warnings
from skyrl_train.entrypoints.settings import read_settings
from skyrl_train.entrypoints.stop_signals import INTERRUPTED, StopSignals
from skyrl_train.errors import ConfigError, DataError, ModelError, SkyRLError
from skyrl_train.events.log import CollectedEvents, sample_of
from skyrl_train.observability.failures import user_frame
from skyrl_train.observability.screen import visible
from skyrl_train.rollout.data.dataset import check_template
from skyrl_train.rollout.data.loader import build_loader
from skyrl_train.runtime.watchdog import BLOCKED_S, LoopMonitor, Watchdog

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from skyrl_train.environments.base import PromptRecord
    from skyrl_train.types import RolloutGroup, RolloutSequence

SAMPLED, GIVEN = "bold green", "dim"  # styles of tokens with loss mask 1 and 0
QUIET_S = 20.0  # without a result, before the place of the user's code is shown
STOP_LIMIT_S = 2.0  # for an event loop that a call blocks, after Ctrl-C


class Calls(CollectedEvents):
    """The requests, tool calls and slow environment calls of a group's samples, in the order of their ends."""

    def lines(self, sample: int | None = None) -> list[str]:
        """Return a line for each call of ``sample``, counted from 0; None: of all samples, which the lines then name."""
        lines = []
        for kind, session, fields in self.collected:
            _, number = sample_of(session)
            if sample not in (None, number):
                continue
            match kind:
                case "request":
                    sampled = sum(tokens for _, tokens, *_ in fields["segments"])
                    seconds = fields["t_end"] - fields["t_submit"]
                    call = f"request: {fields['prompt_tokens']} prompt tokens, {sampled} sampled, ended by {fields['stop']}"
                case "tool":
                    seconds, call = fields["t1"] - fields["t0"], f"tool calls: {', '.join(fields['names'])}"
                case "environment":
                    seconds, call = fields["t1"] - fields["t0"], f"environment {fields['name']}: {fields['call']}"
                case _:
                    continue
            of = "" if sample is not None or number is None else f"sample {number + 1}, "
            lines.append(visible(f"{of}{call}, {seconds:.3f} s"))
        return lines


def try_group(
    recipe: str,
    overrides: Sequence[str],
    config_dir: Path | None,
    *,
    samples: int | None = None,
    prompt: int = 0,
    tokens: bool = False,
    library: str | None = None,
) -> None:
    """Generate one group of a recipe and print it.

    Args:
        samples: of the prompt; None: as the recipe says.
        prompt: its place in the order of the run, from 0.
        tokens: whether to list every token.
        library: see :func:`skyrl_train.entrypoints.settings.read_settings`.

    Raises:
        SkyRLError: a setting or an input cannot work, or the group failed; then the traceback of the code that failed is printed.
        SystemExit: Ctrl-C has stopped the group.
    """
    console = Console()
    forget_files()
    config = read_settings(recipe, overrides, config_dir, library, console)
    check_implementations(config)
    inputs = load_inputs(config)
    print_warnings(inputs, console, strict=False)
    calls = Calls()
    try:
        with tempfile.TemporaryDirectory() as folder, engine_logs(Path(folder), console) as logs:
            record, group, tokenizer = asyncio.run(
                generate_group(inputs, Path(folder) / "model", logs, console, calls, prompt, samples)
            )
    except asyncio.CancelledError:
        raise SystemExit(INTERRUPTED) from None
    except SkyRLError as error:
        cause = error.__cause__
        while cause is not None and cause.__cause__ is not None:
            cause = cause.__cause__
        if cause is not None and not isinstance(error, ConfigError | DataError | ModelError):
            # The code that failed is at the end of the chain; what passed its error on would only hide it.
            trace = "".join(traceback.format_exception(cause, chain=False))
            for text in (*calls.lines(), trace):
                console.print(text, markup=False, highlight=False, soft_wrap=True)
        raise
    show(console, record, group, tokenizer, calls, tokens=tokens)


def for_one_group(config: RunConfig, samples: int | None) -> RunConfig:
    """Return ``config`` with what one group needs: one engine, generation in this process, one attempt, whole weights.

    Args:
        samples: of the group; None: as ``config`` says. One sample cannot train under every estimator, but it can be shown.
    """
    config = without_trainer(config)
    engine, failures = config.generator.inference_engine, config.trainer.failures
    one_engine = replace(
        engine,
        num_engines=1,
        remote_urls=engine.remote_urls[:1],
        executor="thread" if engine.backend == "embedded" else "process",
    )
    return replace(
        config,
        generator=replace(
            config.generator,
            inference_engine=one_engine,
            n_samples_per_prompt=samples or config.generator.n_samples_per_prompt,
        ),
        trainer=replace(config.trainer, failures=replace(failures, max_rollout_retries=0)),
    )


async def generate_group(
    inputs: RunInputs, folder: Path, logs: Path, console: Console, calls: Calls, prompt: int, samples: int | None
) -> tuple[PromptRecord, RolloutGroup, PreTrainedTokenizerBase]:
    """Start an engine with the run's initial weights, generate the group of one prompt, and stop the engine.

    Args:
        folder: for the model, if the recipe builds one.
        logs: folder for the output of the engine's process.
        calls: takes the calls of the samples.
        prompt: the prompt's place in the order of the run, from 0.
        samples: of the prompt; None: as the recipe says.

    Raises:
        DataError: there is no such prompt.
        RolloutError: the generator, the environment, the agent or the reward function failed, which is the cause.
        SkyRLError: the engine or a stage failed.
    """
    # They import torch.
    from skyrl_train.build.trainer import prepare_model
    from skyrl_train.rollout.group_generator import GroupGenerator
    from skyrl_train.rollout.stages.pipeline import StagePipeline

    config = for_one_group(inputs.config, samples)
    model_path = prepare_model(config, folder)
    changed = asyncio.Event()
    loader = build_loader(inputs.dataset, config.data, config.trainer.seed)
    console.print("Starting: model, engine.", highlight=False)
    async with started_generation(config, inputs.plan, model_path, logs, calls) as generation:
        check_template(inputs.dataset, generation.tokenizer)
        try:
            await loader.source.start(changed.set)
            index: int | None = None
            while index is None or index < prompt:
                while not loader.ready:
                    changed.clear()
                    await changed.wait()
                index = loader.issue()
                if index is None:
                    raise DataError(f"the data has no prompt number {prompt}, counted from 0")
            group_generator = GroupGenerator(
                generation.generator,
                loader.source,
                generation.client,
                config.trainer.failures,
                n_samples_per_prompt=config.generator.n_samples_per_prompt,
                sampling_params=asdict(config.generator.sampling_params),
                env_class=config.environment.env_class,
                seed=config.trainer.seed,
                stages=StagePipeline(generation.rewards),
            )
            with watched(console):
                return loader.source.record(index), await group_generator.run(index), generation.tokenizer
        finally:
            await loader.source.aclose()


@contextmanager
def watched(console: Console) -> Iterator[None]:
    """Print where the user's code is if the block takes long, and when Ctrl-C cancels the task that runs it."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None, "the block runs in a task"

    def say(message: str) -> None:
        console.print(message, markup=False, highlight=False, soft_wrap=True)

    def stop() -> None:
        say("\n  ".join(["Interrupted.", *places_of_user_code()]))
        task.cancel()

    watchdog = Watchdog(QUIET_S, loop.time, places_of_user_code, say)
    with LoopMonitor(BLOCKED_S, say), StopSignals(stop, lambda: None, limit_s=STOP_LIMIT_S):
        watchdog.start()
        try:
            yield
        finally:
            watchdog.stop()


def places_of_user_code() -> list[str]:
    """Return a line for each place where code of the user's is under way or waits, in the tasks of the event loop and in other
    threads. Call it on the event loop."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    stacks = [traceback.extract_stack(frame) for frame in frames.values()]
    for task in asyncio.all_tasks():
        calls = []
        awaited: object = task.get_coro()
        while (frame := getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)) is not None:
            calls.append((frame, frame.f_lineno))
            awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
        stacks.append(traceback.StackSummary.extract(calls))
    places = Counter(user_frame("".join(stack.format()), own_only=True) for stack in stacks)
    del places[""]
    lines = [f"your code is at {place}{f', {count} times' if count > 1 else ''}" for place, count in places.items()]
    return lines or ["none of your code is under way: an engine samples, or an agent's program runs"]


def show(
    console: Console,
    record: PromptRecord,
    group: RolloutGroup,
    tokenizer: PreTrainedTokenizerBase,
    calls: Calls,
    *,
    tokens: bool,
) -> None:
    """Print a group: its data row, each sample's calls and what the model saw, its metrics, and what would keep it from teaching.

    Args:
        tokens: also print a table with a line for each token of each response.
    """
    console.print(Rule(Text(f"prompt {record.uid!r}")))
    row = {"data_source": record.data_source, "env_class": record.env_class, **record.env_extras}
    for key, value in row.items():
        if value not in (None, ""):
            console.print(Text(f"{key}: {visible(str(value))}", style=GIVEN), soft_wrap=True)
    for number, sample in enumerate(group.samples, 1):
        title = f"sample {number} of {len(group.samples)}: reward {sample.reward:g}"
        console.print(Rule(Text(title), align="left"))
        for line in calls.lines(number - 1):
            console.print(Text(line, style="italic"), soft_wrap=True)
        for branch, sequence in enumerate(sample.sequences, 1):
            which = f"sequence {branch} of {len(sample.sequences)}, " if len(sample.sequences) > 1 else ""
            sampled, given = sequence.num_sampled, sequence.num_response_tokens - sequence.num_sampled
            counts = f"{sequence.num_prompt_tokens} prompt tokens, {sampled} sampled" + (
                f", {given} given" if given else ""
            )
            console.print(Text(f"{which}{counts}, ended by {sequence.stop_reason}", style="italic"), soft_wrap=True)
            text = Text(visible(str(tokenizer.decode(sequence.prompt_token_ids))), style=GIVEN)
            for is_sampled, ids in sequence.response_runs():
                text.append(visible(str(tokenizer.decode(ids))), style=SAMPLED if is_sampled else GIVEN)
            console.print(text, soft_wrap=True)
            if tokens:
                console.print(token_table(sequence, tokenizer))
    console.print(Rule())
    for name, value in group.metrics.items():
        console.print(f"{name} {value:g}", markup=False, highlight=False)
    if console.color_system is not None:
        console.print(Text.assemble(("sampled by the policy", SAMPLED), ", ", ("given to it", GIVEN)))
    for problem in problems(group):
        console.print(f"warning: {problem}", markup=False, highlight=False, soft_wrap=True)


def token_table(sequence: RolloutSequence, tokenizer: PreTrainedTokenizerBase) -> Table:
    """Return a table with a line for each token of the response."""
    table = Table("token", "id", "text", "log-prob", "reward", box=None)
    columns = zip(sequence.response_ids, sequence.loss_mask, sequence.logprobs, sequence.rewards, strict=True)
    for place, (token, sampled, logprob, reward) in enumerate(columns):
        cells = [
            str(place),
            str(token),
            visible(str(tokenizer.decode([token]))),
            f"{logprob:.4f}" if sampled else "given",
        ]
        table.add_row(*map(Text, [*cells, f"{reward:g}" if reward else ""]), style="" if sampled else GIVEN)
    return table


def problems(group: RolloutGroup) -> list[str]:
    """Return why the group would teach nothing or little."""
    found = []
    sequences = [sequence for sample in group.samples for sequence in sample.sequences]
    if not any(sequence.num_sampled for sequence in sequences):
        found.append("no token was sampled by the policy, so nothing is trained")
    if len({sample.reward for sample in group.samples}) == 1 < len(group.samples):
        found.append("all samples have the same reward, so this group teaches nothing with advantages within a group")
    truncated = sum(sequence.stop_reason == "length" for sequence in sequences)
    if truncated:
        found.append(f"{truncated} of {len(sequences)} responses were ended by a length limit")
    unfinished = round(group.metrics.get("generate/unfinished_episodes", 0.0) * len(group.samples))
    if unfinished:
        found.append(
            f"{unfinished} of {len(group.samples)} episodes ended before their environment was done. Raise generator.max_turns "
            "(1 by default), or generator.max_input_length if the context was full"
        )
    return found
