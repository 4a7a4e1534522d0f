"""Time for which a checkpoint blocks training: written in the background, compared with one that training waits for.

    python benchmarks/checkpoint_blocking.py [--rounds 5] [--hidden-size 768] [--strategies local fsdp2]

One run takes turns: steps without a checkpoint, a checkpoint that training waits for (snapshot and disk), and one that is written
while steps continue. The latter blocks training in the call that takes the snapshot, and while the optimizer waits for the copy:
the additional time of ``finish``, added up over all steps until the checkpoint is on disk.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from skyrl_train.config.schema import BuildModelConfig, TrainerConfig
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.training.backend import Minibatch, TrainingBackend, TrainingSequence
from skyrl_train.training.checkpoint import CheckpointStore
from skyrl_train.training.local_backend import LocalBackend

TOTAL_STEPS = 10_000


def build(strategy: str, model: str) -> TrainingBackend:
    if strategy == "local":
        return LocalBackend(model, TrainerConfig(), TOTAL_STEPS, temperature=1.0, seed=0)
    from skyrl_train.training.distributed.ray_backend import RayBackend

    return RayBackend(model, TrainerConfig(), TOTAL_STEPS, temperature=1.0, seed=0)


class Steps:
    """Trains a fixed minibatch and measures its steps."""

    def __init__(self, backend: TrainingBackend, tokens: int) -> None:
        self._backend = backend
        self._step = 0
        ids, zeros = torch.arange(tokens) % 10, torch.zeros(tokens)
        trained = torch.arange(tokens) > 0
        self._sequences = [
            TrainingSequence(ids, trained, zeros + 1.0, zeros - 2.0, ids * 0, group) for group in range(2)
        ]

    def one(self) -> tuple[float, float]:
        """Make one step; return the seconds of its passes, and of the optimizer including its wait for a snapshot."""
        self._step += 1
        started = time.perf_counter()
        self._backend.accumulate(Minibatch(self._sequences, 2, self._step))
        passed = time.perf_counter()
        self._backend.finish(self._step)
        return passed - started, time.perf_counter() - passed


def measure(strategy: str, backend: TrainingBackend, tokens: int, rounds: int, folder: Path) -> None:
    steps, store, number = Steps(backend, tokens), CheckpointStore(folder, 1), 0
    plain, waited_for, blocked, beside = [], [], [], []
    steps.one()
    with ThreadPoolExecutor(1) as disk:
        for round_ in range(rounds + 1):
            plain.extend(steps.one() for _ in range(2))
            usual = statistics.median(finish for _, finish in plain)
            number += 1
            started = time.perf_counter()
            snapshot = backend.snapshot()
            store.write(number, lambda path, of=snapshot: backend.save(of, path))
            waited_for.append(time.perf_counter() - started)

            number += 1
            started = time.perf_counter()
            snapshot = backend.snapshot()
            taken = time.perf_counter() - started
            writing = disk.submit(store.write, number, lambda path, of=snapshot: backend.save(of, path))
            during = [steps.one()]
            while not writing.done():
                during.append(steps.one())
            writing.result()
            blocked.append(taken + sum(finish - usual for _, finish in during))
            beside.extend(during)
            if round_ == 0:  # the first round allocates memory and files
                for times in (plain, waited_for, blocked, beside):
                    times.clear()
    whole, free, (passes, slowed) = (
        statistics.median(waited_for),
        statistics.median(blocked),
        [statistics.median(first for first, _ in times) for times in (plain, beside)],
    )
    print(
        f"| `{strategy}` | {whole:.2f} s | {free:.3f} s | **{free / whole:.2f}** | {passes:.2f} s "
        f"| {slowed / passes:.2f} times as long | {statistics.median(finish for _, finish in plain):.2f} s |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="of each of a step's two sequences")
    parser.add_argument("--strategies", nargs="+", default=["local", "fsdp2"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = options.hidden_size
    print(
        "| strategy | training waits | in the background: training blocked | ratio | forward and backward passes ",
        end="",
    )
    print("| meanwhile | an optimizer step |")
    print("|---" * 7 + "|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        shape = BuildModelConfig(
            hidden_size=size, intermediate_size=4 * size, num_layers=options.layers, num_heads=size // 64
        )
        build_model_folder(shape, model, seed=0)
        for strategy in options.strategies:
            backend = build(strategy, str(model))
            try:
                if strategy == "local":
                    parameters = sum(weight.numel() for _, weight in backend.named_weights())
                    print(f"{parameters / 1e6:.0f} million parameters, {12 * parameters / 1e6:.0f} MB a checkpoint")
                measure(strategy, backend, options.tokens, options.rounds, Path(folder) / strategy)
            finally:
                backend.close()


if __name__ == "__main__":
    main()
