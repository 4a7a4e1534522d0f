"""Time of an update under different ``trainer.micro_batch_tokens``, sequences packed and padded: the small CPU
model, long-tailed lengths.

OMP_NUM_THREADS=1 python benchmarks/token_budget.py [--updates 15]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from skyrl_train.config.schema import BuildModelConfig, TrainerConfig
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.training.backend import Minibatch, TrainingSequence
from skyrl_train.training.batch import pack_rows, pad_rows
from skyrl_train.training.local_backend import LocalBackend

PROMPT_TOKENS, MEAN_RESPONSE_TOKENS, MAX_RESPONSE_TOKENS = 4, 8, 30
SEQUENCES, VOCABULARY = 128, 13


def minibatch(step: int) -> Minibatch:
    """Return 128 sequences with exponential response lengths, in 16 groups."""
    generator = torch.Generator().manual_seed(step)
    sequences = []
    for index in range(SEQUENCES):
        response = 1 + int(torch.empty(1).exponential_(1 / MEAN_RESPONSE_TOKENS, generator=generator))
        length = PROMPT_TOKENS + min(response, MAX_RESPONSE_TOKENS)
        mask = torch.arange(length) >= PROMPT_TOKENS
        sequences.append(
            TrainingSequence(
                token_ids=torch.randint(0, VOCABULARY, (length,), generator=generator),
                loss_mask=mask,
                advantages=torch.randn(length, generator=generator) * mask,
                behaviour_logprobs=-2.5 * mask,
                versions=torch.where(mask, 0, -1),
                group_index=index // 8,
            )
        )
    return Minibatch(sequences, SEQUENCES // 8, step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=15)
    updates = parser.parse_args().updates
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        build_model_folder(BuildModelConfig(), model, seed=0)
        print(
            "| `micro_batch_tokens` | rows | micro-batches | padded / real tokens | update | packed / padded ", end=""
        )
        print("| forward log-probs | packed / padded |")
        print("|---" * 8 + "|", flush=True)
        for budget in (128, 512, 2048, 16384):
            measured = {packing: Measured(str(model), budget, packing, updates) for packing in (False, True)}
            for step in range(1, updates + 1):  # in turns, so that other load on the machine affects both
                for one in measured.values():
                    one.update(minibatch(step))
            for one in measured.values():
                print(one.row(minibatch(updates), measured[False]), flush=True)


class Measured:
    """A backend, and the processor time of its calls in seconds."""

    def __init__(self, model: str, budget: int, packing: bool, updates: int) -> None:
        config = TrainerConfig(micro_batch_tokens=budget, packing=packing)
        self._backend = LocalBackend(model, config, updates, 1.0, seed=0)
        self._budget, self._packing = budget, packing
        self._updates: list[float] = []
        self._forwards: list[float] = []

    def update(self, batch: Minibatch) -> None:
        begin = time.process_time()
        self._backend.update(batch)
        middle = time.process_time()
        self._backend.forward_logprobs(batch.sequences)
        self._updates.append(middle - begin)
        self._forwards.append(time.process_time() - middle)

    def row(self, batch: Minibatch, padded: Measured) -> str:
        lengths = [len(sequence) for sequence in batch.sequences]
        rows = (pack_rows if self._packing else pad_rows)(lengths, self._budget)
        real = 1.0 if self._packing else sum(max(lengths[i] for i in row) * len(row) for row in rows) / sum(lengths)
        line = f"| {self._budget} | {'packed' if self._packing else 'padded'} | {len(rows)} | {real:.2f} |"
        for own, other in ((self._updates, padded._updates), (self._forwards, padded._forwards)):
            mine = statistics.median(own)
            ratio = f"{mine / statistics.median(other):.2f}" if self._packing else ""
            line += f" {1e3 * mine:.0f} ms | {ratio} |"
        return line


if __name__ == "__main__":
    main()
