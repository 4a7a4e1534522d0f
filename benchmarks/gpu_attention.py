"""Time of a training update on a GPU with three ways of attention within packed rows; each step has new lengths, long-tailed.

varlen           torch's flash attention for ragged batches: what a run uses
buckets, flash   runs of similar length, each padded to its longest, through flash attention
buckets, cuDNN   the same with cuDNN allowed, which scaled_dot_product_attention prefers on recent GPUs: a plan for each new shape

python benchmarks/gpu_attention.py [--tokens 16384 32768] [--seconds 80] [--output attention.json]

The three take turns on the same lengths in one process. A round begins only while ``--seconds`` are not spent.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from skyrl_train.config.schema import TrainerConfig
from skyrl_train.models.folder import quiet_transformers
from skyrl_train.training import attention
from skyrl_train.training.backend import Minibatch, TrainingSequence
from skyrl_train.training.local_backend import LocalBackend

WAYS = ("varlen", "buckets, flash", "buckets, cuDNN")
PROMPT_TOKENS, LONGEST = 64, 4096
SHAPE = Qwen3Config(  # Qwen3-0.6B's
    hidden_size=1024,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=3072,
    vocab_size=151_936,
    max_position_embeddings=LONGEST,
    tie_word_embeddings=True,
)
DRY = Qwen3Config(
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    vocab_size=61,
    max_position_embeddings=LONGEST,
)


def long_tailed_lengths(step: int, tokens: int) -> list[int]:
    """Return log-normal lengths, most of them far below the longest, with ``tokens`` tokens in all."""
    generator, lengths, left = torch.Generator().manual_seed(step), [], tokens
    while left:
        drawn = PROMPT_TOKENS + int(torch.empty(1).log_normal_(5.5, 0.9, generator=generator))
        lengths.append(min(drawn, LONGEST, left))
        left -= lengths[-1]
    return lengths


def minibatch(step: int, lengths: Sequence[int], vocabulary: int) -> Minibatch:
    generator = torch.Generator().manual_seed(step)
    sequences = []
    for length in lengths:
        mask = torch.arange(length) >= min(PROMPT_TOKENS, length // 2)
        sequences.append(
            TrainingSequence(
                token_ids=torch.randint(0, vocabulary, (length,), generator=generator),
                loss_mask=mask,
                advantages=torch.randn(length, generator=generator) * mask,
                behaviour_logprobs=-2.5 * mask,
                versions=torch.where(mask, 0, -1),
                group_index=0,
            )
        )
    return Minibatch(sequences, 1, step)


def never(*_inputs: object) -> bool:
    """Serve no inputs. A mock object would keep all that it is called with."""
    return False


@contextmanager
def attention_by(way: str) -> Iterator[None]:
    """While open, packed rows use this way."""
    with ExitStack() as stack:
        if way != "varlen":
            stack.enter_context(mock.patch.object(attention, "varlen_serves", never))
        torch.backends.cuda.enable_cudnn_sdp(way == "buckets, cuDNN")
        try:
            yield
        finally:
            torch.backends.cuda.enable_cudnn_sdp(False)


class Measured:
    """A backend, and the seconds and the peak of memory of its updates by each way."""

    def __init__(self, folder: str, tokens: int, device: str) -> None:
        # Without checkpointing, 32k tokens of this model do not fit 80 GB.
        config = TrainerConfig(device=device, micro_batch_tokens=tokens, packing=True)
        config.policy.dtype, config.policy.gradient_checkpointing = "bfloat16", True
        self._backend = LocalBackend(folder, config, total_steps=1000, temperature=1.0, seed=0)
        self._cuda = device == "cuda"
        self._vocabulary = self._backend.model.config.vocab_size
        self.seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        self.peak_bytes = dict.fromkeys(WAYS, 0)
        self.shapes: list[int] = []  # (rows, width) of each round that no round before had
        self._seen: set[tuple[int, int]] = set()

    def warm_up(self) -> None:
        for way in WAYS:
            with attention_by(way):
                self._backend.update(minibatch(1, [100, 90, 80], self._vocabulary))

    def round(self, step: int, tokens: int) -> None:
        """Measure one update by each way, in an order that changes with the step."""
        batch = minibatch(step, long_tailed_lengths(step, tokens), self._vocabulary)
        inputs = sorted((len(sequence) - 1 for sequence in batch.sequences), reverse=True)
        shapes = {(bucket.rows, bucket.width) for bucket in attention.Segments.of(inputs).buckets}
        self.shapes.append(len(shapes - self._seen))
        self._seen |= shapes
        for place in range(len(WAYS)):
            way = WAYS[(step + place) % len(WAYS)]
            with attention_by(way):
                self._start()
                begin = time.perf_counter()
                self._backend.update(batch)
                self.seconds[way].append(self._end() - begin)
            if self._cuda:
                self.peak_bytes[way] = max(self.peak_bytes[way], torch.cuda.max_memory_allocated())

    def _start(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def _end(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 32768])
    parser.add_argument("--seconds", type=float, default=80, help="no round begins after that many")
    parser.add_argument("--rounds", type=int, default=8, help="at most, for each number of tokens")
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--dry", action="store_true", help="one round of a tiny model on the CPU, which only has buckets"
    )
    arguments = parser.parse_args()
    begin = time.perf_counter()
    device, shape = ("cpu", DRY) if arguments.dry else ("cuda", SHAPE)
    sizes = [256] if arguments.dry else arguments.tokens
    rounds = 1 if arguments.dry else arguments.rounds
    name = "cpu" if arguments.dry else torch.cuda.get_device_name()
    rows = []
    print(
        f"{name}, PyTorch {torch.__version__}: median seconds of an update, in brackets of varlen's; tokens/s of varlen"
    )
    print(f"| tokens | rounds | new shapes an update | {' | '.join(WAYS)} | tokens/s |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
        with quiet_transformers():
            model.save_pretrained(folder)
        del model
        for place, tokens in enumerate(sizes):
            deadline = begin + arguments.seconds * (place + 1) / len(sizes)
            measured = Measured(folder, tokens, device)
            measured.warm_up()
            step = 0
            while step < rounds and (step == 0 or time.perf_counter() < deadline):
                step += 1
                measured.round(step, tokens)
            rows.append(row_of(measured, tokens, step))
            print(line_of(rows[-1]), flush=True)
            del measured
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    if arguments.output is not None:
        result = {"device": name, "torch": torch.__version__, "rows": rows, "seconds": time.perf_counter() - begin}
        arguments.output.write_text(json.dumps(result, indent=1))


def row_of(measured: Measured, tokens: int, rounds: int) -> dict[str, object]:
    return {
        "tokens": tokens,
        "rounds": rounds,
        "new_shapes": measured.shapes,
        "seconds": measured.seconds,
        "median_s": {way: statistics.median(seconds) for way, seconds in measured.seconds.items()},
        "peak_bytes": measured.peak_bytes,
    }


def line_of(row: dict[str, object]) -> str:
    median: dict[str, float] = row["median_s"]  # type: ignore[assignment]
    shapes: list[int] = row["new_shapes"]  # type: ignore[assignment]
    cells = " | ".join(f"{median[way]:.3f} s ({median[way] / median['varlen']:.2f})" for way in WAYS)
    speed = int(row["tokens"]) / median["varlen"]  # type: ignore[call-overload]
    return f"| {row['tokens']} | {row['rounds']} | {statistics.mean(shapes):.1f} | {cells} | {speed:,.0f} |"


if __name__ == "__main__":
    main()
