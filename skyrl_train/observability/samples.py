"""Recorded samples: ``samples/step_000120.parquet`` (training) and ``samples/eval_000120.parquet`` (evaluation of version 120).

RecordedGroup ──rows_of──> rows ──SampleWriter (a thread)──> one file, written and then renamed ──read_samples──> table

A row is one token sequence; most samples have one. ``docs/reference/samples.md`` describes the columns.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from skyrl_train.runtime.process import DaemonThreadPool
from skyrl_train.types import RolloutGroup, RolloutSequence

if TYPE_CHECKING:
    import pyarrow

logger = logging.getLogger(__name__)

MAX_PENDING = 16  # files that wait for the disk; further ones are dropped
WRITE_LIMIT_S = 60.0  # at the end of a run, for the files that are still to be written

_FILE = re.compile(r"(step|eval)_(\d+)\.parquet")
# The beginning of a message with its role, and its end, in the chat templates of most models.
_TURNS = tuple(
    re.compile(turn, re.DOTALL)
    for turn in (
        r"<\|im_start\|>(\w+)(?:\n|<\|im_sep\|>)(.*?)(?:<\|im_end\|>|$)",  # ChatML: Qwen and many others
        r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\s*(.*?)(?:<\|eot_id\|>|<\|eom_id\|>|$)",  # Llama 3
        r"<start_of_turn>(\w+)\n(.*?)(?:<end_of_turn>|$)",  # Gemma
        r"<\|im_(?:system|user|assistant)\|>([^<]*)<\|im_middle\|>(.*?)(?:<\|im_end\|>|$)",  # Kimi
        r"<｜(begin▁of▁sentence|User|Assistant|tool▁outputs▁(?:begin|end))｜>(.*?)"
        r"(?=<｜(?:User|Assistant|end▁of▁sentence|tool▁outputs▁(?:begin|end))｜>|$)",  # DeepSeek
        r"<\|(system|user|assistant|observation)\|>(.*?)(?=<\|(?:system|user|assistant|observation|end|endoftext)\|>|$)",  # GLM
        r"\]~b\](\w+)\n(.*?)(?:\[e~\[|$)",  # MiniMax
    )
)
_ROLES = {
    "User": "user", "Assistant": "assistant", "model": "assistant", "ai": "assistant", "observation": "tool",
    "ipython": "tool", "begin▁of▁sentence": "system", "tool▁outputs▁begin": "tool", "tool▁outputs▁end": "assistant",
    "tool_declare": "system",
}  # fmt: skip
_TOOL_CALL = re.compile(
    r"<(?:minimax:)?tool_call>\s*(.*?)\s*</(?:minimax:)?tool_call>|<｜tool▁call▁begin｜>(.*?)<｜tool▁call▁end｜>"
    r"|<\|tool_call_begin\|>(.*?)<\|tool_call_end\|>",
    re.DOTALL,
)
# Marks around all calls of a message, around the results of tools, and reasoning without a text.
_CALLS = re.compile(r"<｜tool▁calls▁(?:begin|end)｜>|<\|tool_calls_section_(?:begin|end)\|>")
_RESULT = re.compile(r"</?tool_response>|</?response>|<｜tool▁output▁(?:begin|end)｜>")
_NO_REASONING = re.compile(r"^\s*(?:<think>\s*)?</think>")


@dataclass(frozen=True)
class TrainedSequence:
    """What training computed for the ``T`` response tokens of a sequence; 0 on tokens that are not trained.

    Attributes:
        loss_mask: tokens that were trained, bool [T].
        advantages: float32 [T].
        logprobs: under the policy at the beginning of the step, float32 [T]; None: the backend does not tell.
        weights: importance weights as the loss used them, after truncation and rejection, float32 [T]; None: likewise.
    """

    loss_mask: np.ndarray
    advantages: np.ndarray
    logprobs: np.ndarray | None
    weights: np.ndarray | None


@dataclass(frozen=True)
class RecordedGroup:
    """A group whose samples are recorded.

    Attributes:
        chosen: why: "first" of its step, "best", "worst", "stalest"; several are joined by a comma.
        trained: one entry per sequence of all its samples; empty: it is not trained (an evaluation, or a failed group).
    """

    group: RolloutGroup
    chosen: str
    trained: tuple[TrainedSequence, ...] = ()


def rows_of(
    phase: str, step: int, recorded: Sequence[RecordedGroup], decode: Callable[[Sequence[int]], str]
) -> list[dict[str, Any]]:
    """Return a row per sequence.

    Args:
        phase: "train" or "eval".
        step: that trained the groups; of an evaluation, the version that it measured.
        decode: converts tokens to text, special tokens included.
    """
    rows = []
    sequences = (each for entry in recorded for sample in entry.group.samples for each in sample.sequences)
    # Each token is decoded once: a file has far fewer different ones.
    pieces = {token: decode([token]) for token in {token for each in sequences for token in each.response_ids}}
    for entry in recorded:
        group, trained = entry.group, iter(entry.trained)
        for number, sample in enumerate(group.samples):
            for place, sequence in enumerate(sample.sequences):
                tokens = next(trained, None)
                prompt, response = decode(sequence.prompt_token_ids), decode(sequence.response_ids)
                rows.append(
                    {
                        "step": step,
                        "phase": phase,
                        "group_index": group.group_index,
                        "uid": group.uid,
                        "data_source": group.data_source,
                        "chosen": entry.chosen,
                        "sample": number,
                        "sequence": place,
                        "prompt": prompt,
                        "response": response,
                        "messages": messages_of(prompt, response, sequence, decode),
                        "reward": sample.reward,
                        "reward_parts": list((sample.reward_parts or {}).items()),
                        "stop_reason": sequence.stop_reason,
                        "lag": step - 1 - group.oldest_version if phase == "train" else 0,
                        "oldest_version": group.oldest_version,
                        "newest_version": group.newest_version,
                        "submitted_version": group.submitted_version,
                        "generation_s": group.generation_s,
                        "time": time.time(),
                        "prompt_token_ids": sequence.token_array[: sequence.num_prompt_tokens],
                        "response_token_ids": sequence.token_array[sequence.num_prompt_tokens :],
                        "response_pieces": [pieces[token] for token in sequence.response_ids],
                        "sampled": sequence.sampled,
                        "versions": sequence.version_array,
                        "token_rewards": sequence.reward_array,
                        "behaviour_logprobs": sequence.logprob_array,
                        "reference_logprobs": sequence.reference_logprobs,
                        "values": sequence.values,
                        "loss_mask": None if tokens is None else tokens.loss_mask,
                        "advantages": None if tokens is None else tokens.advantages,
                        "trainer_logprobs": None if tokens is None else tokens.logprobs,
                        "importance_weights": None if tokens is None else tokens.weights,
                    }
                )
    return rows


def messages_of(
    prompt: str, response: str, sequence: RolloutSequence, decode: Callable[[Sequence[int]], str]
) -> list[dict[str, Any]]:
    """Split a sequence into messages ``{role, content, tool_calls}``, by the marks of its chat template.

    Without known marks, the messages are the prompt (role "prompt"), and the runs of sampled tokens ("assistant") and of other
    tokens ("environment") of the response.
    """
    for turn in _TURNS:
        turns = turn.findall(prompt + response)
        if turns:
            messages = [_message(_ROLES.get(role, role), content) for role, content in turns]
            # DeepSeek's first mark also stands where there is no message.
            return [message for message in messages if message["content"] or message["role"] != "system"]
    messages = [_message("prompt", prompt)]
    for sampled, ids in sequence.response_runs():
        messages.append(_message("assistant" if sampled else "environment", decode(ids)))
    return messages


def _message(role: str, content: str) -> dict[str, Any]:
    calls: list[str] = []
    if role == "assistant":  # prompts explain the format, too
        calls = [max(found) for found in _TOOL_CALL.findall(content)]
        content = _NO_REASONING.sub("", _CALLS.sub("", _TOOL_CALL.sub("", content)))
        content = content.strip() if calls else content.strip("\n")
    elif role not in ("prompt", "environment"):
        # Some templates send the results of tools as the user.
        role = "tool" if content.lstrip().startswith("<tool_response>") else role
        content = (_RESULT.sub("", content) if role == "tool" else content).strip("\n")
    return {"role": role, "content": content, "tool_calls": calls}


@functools.cache
def schema() -> pyarrow.Schema:
    """Return the columns of a file."""
    import pyarrow as pa  # 0.3 s, which only recording needs

    ids, floats, flags = pa.list_(pa.int32()), pa.list_(pa.float32()), pa.list_(pa.bool_())
    message = pa.struct({"role": pa.string(), "content": pa.string(), "tool_calls": pa.list_(pa.string())})
    of_group = {"step": pa.int64(), "phase": pa.string(), "group_index": pa.int64(), "uid": pa.string()}
    of_group |= {"data_source": pa.string(), "chosen": pa.string(), "sample": pa.int32(), "sequence": pa.int32()}
    texts = {"prompt": pa.string(), "response": pa.string(), "messages": pa.list_(message)}
    facts = {
        "reward": pa.float64(),
        "reward_parts": pa.map_(pa.string(), pa.float64()),
        "stop_reason": pa.string(),
        "lag": pa.int64(),
        "oldest_version": pa.int64(),
    }
    facts |= {"newest_version": pa.int64(), "submitted_version": pa.int64()}
    facts |= {"generation_s": pa.float64(), "time": pa.float64()}
    tokens = {"prompt_token_ids": ids, "response_token_ids": ids, "response_pieces": pa.list_(pa.string())}
    tokens |= {"sampled": flags, "versions": ids}
    tokens |= dict.fromkeys(("token_rewards", "behaviour_logprobs", "reference_logprobs", "values"), floats)
    tokens |= {"loss_mask": flags, **dict.fromkeys(("advantages", "trainer_logprobs", "importance_weights"), floats)}
    return pa.schema(of_group | texts | facts | tokens)


class SampleWriter:
    """Writes files of samples in a thread. A failure is logged; it never ends the run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread = DaemonThreadPool(max_threads=1, name="samples", shutdown_limit_s=WRITE_LIMIT_S)
        # Two counts, because two threads count: the caller, and the one that writes.
        self._submitted = self._finished = 0
        self._dropped = 0

    def write(self, phase: str, step: int, rows: Callable[[], list[dict[str, Any]]]) -> None:
        """Write the file of a step, or of an evaluated version. Returns at once.

        Args:
            rows: called in the thread; from :func:`rows_of`.
        """
        if self._submitted - self._finished >= MAX_PENDING:
            self._dropped += 1
            logger.warning("the disk is too slow for samples; %d files are left out so far", self._dropped)
            return
        self._submitted += 1
        name = f"{'step' if phase == 'train' else 'eval'}_{step:06}.parquet"
        self._thread.submit(self._write, self._folder / name, rows)

    def discard_after(self, step: int) -> None:
        """Remove the files of later steps, which run again, and what a killed run has left unfinished. Blocks."""
        self._thread.submit(self._discard_after, step).result()

    def close(self) -> None:
        """Wait until everything is written. Idempotent."""
        self._thread.shutdown()

    def _write(self, path: Path, rows: Callable[[], list[dict[str, Any]]]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        unfinished = path.with_name(f".{path.name}.tmp")
        try:
            path.parent.mkdir(exist_ok=True)
            table = pa.Table.from_pylist(rows(), schema())
            # Small tables of unique values: dictionaries and statistics would take more time and space than they save.
            pq.write_table(table, unfinished, compression="zstd", use_dictionary=False, write_statistics=False)
            # Readers see a whole file or none, also after a kill.
            os.replace(unfinished, path)
        except Exception:  # also of a tokenizer: the samples are a help, and must not end the run
            logger.exception("%s cannot be written", path)
        finally:
            self._finished += 1

    def _discard_after(self, step: int) -> None:
        for path in sample_files(self._folder):
            if int(path.stem.partition("_")[2]) > step:
                path.unlink()
        for unfinished in self._folder.glob(".*.tmp"):
            unfinished.unlink()


def sample_files(folder: Path) -> list[Path]:
    """Return the files of samples in ``folder``, ordered by step; an evaluation comes before the training of the same number."""
    found = [
        (int(match.group(2)), path.name, path) for path in folder.glob("*") if (match := _FILE.fullmatch(path.name))
    ]
    return [path for _, _, path in sorted(found)]


def read_samples(folder: Path) -> pyarrow.Table:
    """Read all files of samples in ``folder`` as one table, which is empty if there are none. A damaged file is a warning."""
    import pyarrow as pa

    tables = []
    for path in sample_files(folder):
        try:
            tables.append(read_columns(path, schema().names))
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:
            logger.warning("%s cannot be read, and is left out: %s", path, error)
    return pa.concat_tables(tables) if tables else schema().empty_table()


def read_columns(path: Path, columns: Sequence[str]) -> pyarrow.Table:
    """Return columns of a file of samples. One that it lacks, as a file of another version may, is empty.

    Raises:
        OSError, ValueError, KeyError, pyarrow.ArrowException: the file cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        there = set(file.schema_arrow.names)
        table = file.read([name for name in columns if name in there])
    wanted = pa.schema([schema().field(name) for name in columns])
    filled = [table[name] if name in there else pa.nulls(table.num_rows, wanted.field(name).type) for name in columns]
    return pa.table(filled, names=list(columns)).cast(wanted)
