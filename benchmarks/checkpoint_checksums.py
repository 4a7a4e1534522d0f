"""Cost of a checkpoint's checksums: writing and reading with them, compared with the same without.

    python benchmarks/checkpoint_checksums.py [--megabytes 200] [--rounds 9]

One run takes turns. Reading is measured twice: from the disk (the system forgets the files first), and from memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

from skyrl_train.runtime import checksums
from skyrl_train.training.checkpoint import CheckpointStore
from skyrl_train.training.state import BackendState, read_state, write_state


def random_state(num_bytes: int) -> BackendState:
    """A policy in float32 with two moments."""
    parameters, layers = num_bytes // 12, 16
    weights = {f"layers.{layer}": torch.randn(parameters // layers) for layer in range(layers)}
    moments = {name: {"exp_avg": torch.randn_like(w), "exp_avg_sq": torch.randn_like(w)} for name, w in weights.items()}
    return BackendState(weights, moments, {"cpu": torch.get_rng_state()})


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def forget(folder: Path) -> None:
    """Let the system drop its copies of the files in main memory."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    state = random_state(options.megabytes * 1_000_000)
    times: dict[tuple[str, bool], list[float]] = {}
    with tempfile.TemporaryDirectory(dir=".") as parent:
        store = CheckpointStore(Path(parent), 1)
        for number in range(1, options.rounds + 2):
            for summed in (True, False) if number % 2 else (False, True):
                checksums.zlib = zlib if summed else SimpleNamespace(crc32=lambda data, start=0: 0)  # type: ignore[attr-defined]
                written = seconds(lambda of=number: store.write(of, lambda folder: write_state(state, folder)))  # type: ignore[misc]

                def read(verified: bool = summed, folder: Path = Path(parent) / f"global_step_{number}") -> None:
                    assert not verified or store.latest() == folder
                    read_state(folder, state, lambda optimizer: None)

                warm = seconds(read)
                forget(Path(parent))
                for what, took in (("write", written), ("read from memory", warm), ("read from disk", seconds(read))):
                    if number > 1:  # the first round allocates memory and files
                        times.setdefault((what, summed), []).append(took)
    print("| | with checksums | without | ratio |\n|---|---|---|---|")
    for what in ("write", "read from disk", "read from memory"):
        summed, plain = (statistics.median(times[what, with_sums]) for with_sums in (True, False))
        print(f"| {what} | {summed:.3f} s | {plain:.3f} s | **{summed / plain:.2f}** |")


if __name__ == "__main__":
    main()
