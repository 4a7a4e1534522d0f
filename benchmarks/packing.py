"""Packed against padded training on long-tailed lengths, and the memory of log-probs for two vocabularies.

OMP_NUM_THREADS=1 python benchmarks/packing.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl_train.config.schema import BuildModelConfig, TrainerConfig
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.training.backend import Minibatch, TrainingSequence
from skyrl_train.training.batch import collate_packed
from skyrl_train.training.local_backend import LocalBackend
from skyrl_train.training.scorer import Scorer, full_scores

SEQUENCES, MEAN_TOKENS, MAX_OVER_MEAN, VOCABULARY = 64, 64, 8, 13
SCORED_TOKENS = 4096
METHODS = ("tiles", "tiles, backward", "full logits")
MIB = 2**20


def log_normal_lengths(step: int) -> list[int]:
    """Return log-normal lengths; the longest is eight times the mean."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.empty(SEQUENCES).log_normal_(0.0, 1.0, generator=generator)
    longest = MAX_OVER_MEAN * MEAN_TOKENS
    others = lengths.sort().values[:-1]
    others = others / others.sum() * (SEQUENCES * MEAN_TOKENS - longest)
    return [max(4, min(int(length), longest)) for length in others] + [longest]


def minibatch(step: int) -> Minibatch:
    generator = torch.Generator().manual_seed(step)
    sequences = []
    lengths = log_normal_lengths(step)
    for place in torch.randperm(SEQUENCES, generator=generator).tolist():
        mask = torch.arange(lengths[place]) >= 2
        sequences.append(
            TrainingSequence(
                token_ids=torch.randint(0, VOCABULARY, (lengths[place],), generator=generator),
                loss_mask=mask,
                advantages=torch.randn(lengths[place], generator=generator) * mask,
                behaviour_logprobs=-2.5 * mask,
                versions=torch.where(mask, 0, -1),
                group_index=0,
            )
        )
    return Minibatch(sequences, 1, step)


def tokens_per_second(model: str, updates: int) -> dict[str, float]:
    """Return the tokens of an update per second of processor time: packed, padded by similar length, padded in order."""
    longest = MAX_OVER_MEAN * MEAN_TOKENS
    backends = {
        "packed": LocalBackend(model, TrainerConfig(packing=True), updates + 1, 1.0, seed=0),
        "padded, sorted by length": LocalBackend(model, TrainerConfig(packing=False), updates + 1, 1.0, seed=0),
        "padded, as they come": LocalBackend(
            model, TrainerConfig(packing=False, micro_batch_tokens=longest * SEQUENCES), updates + 1, 1.0, seed=0
        ),
    }
    seconds, tokens = dict.fromkeys(backends, 0.0), 0
    for step in range(updates + 1):  # in turns, so that other load on the machine affects all
        batch = minibatch(step + 1)
        tokens += sum(map(len, batch.sequences)) if step else 0
        for name, backend in backends.items():
            begin = time.process_time()
            if name == "padded, as they come":
                update_in_given_order(backend, batch)
            else:
                backend.update(batch)
            seconds[name] += time.process_time() - begin if step else 0.0  # the first warms up
    return {name: tokens / taken for name, taken in seconds.items()}


def update_in_given_order(backend: LocalBackend, batch: Minibatch) -> None:
    """Train on eight sequences at a time in the given order, padded to the longest of them."""
    for first in range(0, SEQUENCES, 8):
        chosen = batch.sequences[first : first + 8]
        width = max(map(len, chosen))
        backend.accumulate(Minibatch([widened(s, width) for s in chosen], 1, batch.step))
    backend.finish(batch.step)


def widened(sequence: TrainingSequence, width: int) -> TrainingSequence:
    """Return the sequence filled with untrained tokens, which cost as much as padding."""

    def fill(field: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(field, (0, width - len(sequence)))

    fields = (sequence.token_ids, sequence.loss_mask, sequence.advantages, sequence.behaviour_logprobs)
    return TrainingSequence(*map(fill, fields), versions=fill(sequence.versions), group_index=0)


def peak_of_logprobs(vocabulary: int, way: str) -> float:
    """Return the peak growth of this process in MiB while it scores 4,096 tokens.

    The gradient of the head's weight is left out: with every method it grows with the vocabulary.
    """
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=vocabulary,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        intermediate_size=128,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    model.get_input_embeddings().requires_grad_(False)
    scorer = Scorer(model, temperature=1.0, micro_batch_tokens=SCORED_TOKENS + 1)
    ids = torch.arange(SCORED_TOKENS + 1) % vocabulary
    nothing = torch.zeros(len(ids))
    sequence = TrainingSequence(ids, nothing == 0, nothing, nothing, ids, 0)
    batch = collate_packed([sequence], [0], [sequence.loss_mask])
    before = peak_mib(afresh=True)
    if way == "tiles":
        scorer.logprobs(batch)
    elif way == "tiles, backward":
        scorer.logprobs_and_entropies(batch, differentiate_entropy=False)[0].sum().backward()
        return peak_mib() - before - model.get_output_embeddings().weight.grad.nbytes / MIB
    else:
        with torch.no_grad():
            full_scores(model, batch, 1.0, differentiate_entropy=False)
    return peak_mib() - before


def peak_mib(*, afresh: bool = False) -> float:
    """Return this process's peak memory in MiB since the last call with ``afresh`` (Linux)."""
    if afresh:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / MIB


def main() -> None:
    torch.set_num_threads(1)
    if len(sys.argv) == 3 and sys.argv[1].isdigit():  # a process that measures one peak: vocabulary and method
        print(peak_of_logprobs(int(sys.argv[1]), sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=METHODS, help="of which the memory is measured"
    )
    parser.add_argument("--updates", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        build_model_folder(BuildModelConfig(max_position_embeddings=1024), model, seed=0)
        speeds = tokens_per_second(str(model), options.updates)
    print("| rows | tokens/s | packed over it |\n|---|---|---|")
    for name, speed in speeds.items():
        print(f"| {name} | {speed:,.0f} | {speeds['packed'] / speed:.2f} |", flush=True)
    print("\n| head | peak at a vocabulary of 8,192 | of 65,536 | ratio |\n|---|---|---|---|")
    for way in options.methods:
        small, large = (
            float(
                subprocess.run([sys.executable, __file__, size, way], capture_output=True, check=True, text=True).stdout
            )
            for size in ("8192", "65536")
        )
        print(f"| {way} | {small:.0f} MiB | {large:.0f} MiB | {large / small:.2f} |", flush=True)


if __name__ == "__main__":
    main()
