"""How long an update takes under different ``trainer.micro_batch_tokens``: the small CPU model, long-tailed lengths.

OMP_NUM_THREADS=1 python benchmarks/token_budget.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch

from skyrl_train.config.schema import BuildModelConfig, TrainerConfig
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.training.backend import Minibatch, TrainingSequence
from skyrl_train.training.batch import pack_by_tokens
from skyrl_train.training.local_backend import LocalBackend

PROMPT_TOKENS, MEAN_RESPONSE_TOKENS, MAX_RESPONSE_TOKENS = 4, 8, 30
SEQUENCES, UPDATES, VOCABULARY = 128, 15, 13


def minibatch(step: int) -> Minibatch:
    """128 sequences with exponential response lengths, in 16 groups."""
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
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        build_model_folder(BuildModelConfig(), model, seed=0)
        print("micro_batch_tokens  micro-batches  padded/real tokens  update ms (median)  forward_logprobs ms")
        for budget in (128, 512, 2048, 16384):
            backend = LocalBackend(str(model), TrainerConfig(micro_batch_tokens=budget), UPDATES, 1.0, seed=0)
            updates, forwards = [], []
            for step in range(1, UPDATES + 1):
                batch = minibatch(step)
                begin = time.perf_counter()
                backend.update(batch)
                middle = time.perf_counter()
                backend.forward_logprobs(batch.sequences)
                updates.append(middle - begin)
                forwards.append(time.perf_counter() - middle)
            lengths = [len(sequence) for sequence in batch.sequences]
            packed = pack_by_tokens(lengths, budget)
            padded = sum(max(lengths[i] for i in chosen) * len(chosen) for chosen in packed) / sum(lengths)
            update_ms, forward_ms = (1e3 * statistics.median(values) for values in (updates, forwards))
            print(f"{budget:18d}  {len(packed):13d}  {padded:18.2f}  {update_ms:18.1f}  {forward_ms:19.1f}")


if __name__ == "__main__":
    main()
