"""Decode speed of the embedded engine against transformers' own generation, on one tiny model in one run.

    python benchmarks/embedded_engine.py [--requests 1 16 64 128] [--tokens 128] [--device cpu] [--dtype float32]
        [--vocab 128] [--width 128] [--layers 2] [--grammar]

Prints tokens per second (on the CPU of processor time, so that other programs do not count; else of wall-clock) and the
ratio to ``generate`` (fixed batch) and to transformers' continuous batching, where that runs (on the CPU it needs psutil).
All sample at temperature 1 without filters from the same prompts; the engine also returns log-probs and versions.

``--grammar`` compares the engine's speed under a JSON schema with its speed without: both take their steps in turns, and of each
step the least time of all runs counts, so that other programs hardly do. A thread beside the engine's own computes the masks,
except a few. Printed for each clock: the time of a token without the grammar, the time that the grammar adds, and the share of
the speed that it leaves. ``thread`` is the engine's own thread: the speed where a core is free for the masks. ``process`` is all
threads: the speed where none is.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import string
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from skyrl_train.inference.engines.embedded.core import EmbeddedEngineCore
from skyrl_train.inference.interface import SamplingParams, StructuredOutput
from skyrl_train.models.folder import DTYPES
from skyrl_train.models.tiny import character_tokenizer
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.shared_memory import SharedMemoryTransport

PROMPT = [5, 6, 7, 8]
REPEATS = 5
GRAMMAR_RUNS = 20


# An array of this many short strings is long enough for every request of the benchmark.
GUIDED = StructuredOutput(
    "json_schema",
    '{"type": "array", "minItems": 400, "items": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, '
    '"n": {"type": "integer"}}, "required": ["name", "n"], "additionalProperties": false}, "x-guidance": '
    '{"whitespace_flexible": false}}',
)


def build(dtype: str, device: str, vocab: int, width: int, layers: int) -> PreTrainedModel:
    """Build a model with heads of 32; the quickstart's has 2 layers of width 128."""
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=vocab,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        head_dim=32,
        intermediate_size=2 * width,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype]).to(device).eval()


def embedded(
    make: Callable[[], PreTrainedModel], requests: int, tokens: int, structured: StructuredOutput | None = None
) -> Callable[[], int]:
    """Run the engine's core in this thread."""
    core, params = embedded_core(make, requests, tokens, structured)

    def run() -> int:
        for request_id in range(requests):
            core.add(request_id, PROMPT, params)
        while core.runnable:
            core.step()
        return requests * tokens

    return run


def embedded_core(
    make: Callable[[], PreTrainedModel], requests: int, tokens: int, structured: StructuredOutput | None
) -> tuple[EmbeddedEngineCore, SamplingParams]:
    """Return the engine's core with weights, and the parameters of its requests."""
    model = make()
    core = EmbeddedEngineCore(
        model,
        eos_ids=(1,),
        max_num_seqs=requests,
        max_model_len=512,
        tokenizer=partial(character_tokenizer, string.printable, words(model.config.vocab_size)),
    )
    transport = SharedMemoryTransport(str(model.dtype).removeprefix("torch."))
    update = transport.gather(make().named_parameters(), version=0)
    core.pause(PauseMode.KEEP)
    core.receive(update)
    core.load(update)
    core.resume()
    return core, SamplingParams(max_tokens=tokens, ignore_eos=True, structured=structured)


def words(vocab: int) -> list[str]:
    """Return the tokens of several letters that fill the vocabulary."""
    pairs = map("".join, itertools.chain(*(itertools.product(string.ascii_letters + ' ,:"', repeat=n) for n in (2, 3))))
    return list(itertools.islice(pairs, vocab - len(character_tokenizer(string.printable))))


def generate(make: Callable[[], PreTrainedModel], requests: int, tokens: int) -> Callable[[], int]:
    """Run ``model.generate`` with the whole batch from the start."""
    model = make()
    ids = torch.tensor([PROMPT] * requests, device=model.device)

    def run() -> int:
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=True,
            )
        return requests * tokens

    return run


def continuous_batching(make: Callable[[], PreTrainedModel], requests: int, tokens: int) -> Callable[[], int]:
    """Run ``model.generate_batch``, transformers' paged continuous batching."""
    model = make()
    config = GenerationConfig(max_new_tokens=tokens, eos_token_id=-1, pad_token_id=0, do_sample=True)
    # Explicit sizes: on a CPU, transformers cannot determine the free memory.
    page_size = 32
    blocks = requests * (-(-(len(PROMPT) + tokens) // page_size) + 1)
    paging = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=1024, page_size=page_size)

    def run() -> int:
        outputs = model.generate_batch([PROMPT] * requests, generation_config=config, continuous_batching_config=paging)
        return sum(len(output.generated_tokens) for output in outputs.values())

    return run


def tokens_per_second(
    *contenders: Callable[[], int], clock: Callable[[], float], repeats: int = REPEATS
) -> list[float]:
    """Return the best of ``repeats`` runs of each, after a warm-up and in turns."""
    best = [0.0] * len(contenders)
    for repeat in range(1 + repeats):
        for index, run in enumerate(contenders):
            began = clock()
            count = run()
            if repeat > 0:
                best[index] = max(best[index], count / (clock() - began))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64, 128])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=sorted(DTYPES))
    parser.add_argument("--vocab", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--grammar", action="store_true", help="compare the engine's speed with and without a grammar")
    args = parser.parse_args()
    torch.set_num_threads(1)  # small models are faster on one; the trainer has the other core
    make = partial(build, args.dtype, args.device, args.vocab, args.width, args.layers)
    if args.grammar:
        compare_grammar(make, args.requests, args.tokens)
    else:
        compare_transformers(make, args.requests, args.tokens, args.device)


def compare_grammar(make: Callable[[], PreTrainedModel], requests: list[int], tokens: int) -> None:
    """Print what a grammar costs, in three clocks."""
    print("| requests | clock | a token | the grammar adds | speed left |")
    print("|---" * 5 + "|", flush=True)
    clocks = {"wall": time.perf_counter, "thread": time.thread_time, "process": time.process_time}
    for number in requests:
        cores = [embedded_core(make, number, tokens, structured) for structured in (None, GUIDED)]
        least = np.full((len(cores), tokens, len(clocks)), np.inf)
        for run in range(1 + GRAMMAR_RUNS):
            for step in range(tokens):
                for index, (core, params) in enumerate(cores):
                    began = [clock() for clock in clocks.values()]
                    for request_id in range(number if step == 0 else 0):
                        core.add(request_id, PROMPT, params)
                    core.step()
                    took = [clock() - at for clock, at in zip(clocks.values(), began, strict=True)]
                    if run > 0:
                        least[index, step] = np.minimum(least[index, step], took)
        per_token = least.sum(1) / (number * tokens) * 1e6
        for name, free, guided in zip(clocks, *per_token, strict=True):
            print(f"| {number} | {name} | {free:.0f} us | {guided - free:.1f} us | {free / guided:.2f} |", flush=True)


def compare_transformers(make: Callable[[], PreTrainedModel], requests: list[int], tokens: int, device: str) -> None:
    """Print the speed of the engine and of transformers."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    print("| requests | embedded | `generate` | embedded / `generate` | continuous batching | embedded / continuous |")
    print("|---" * 6 + "|", flush=True)
    for number in requests:
        size = (make, number, tokens)
        ours, fixed = tokens_per_second(embedded(*size), generate(*size), clock=clock)
        line = f"| {number} | {ours:,.0f} tokens/s | {fixed:,.0f} tokens/s | **{ours / fixed:.2f}** |"
        try:
            (paged,) = tokens_per_second(continuous_batching(*size), clock=clock, repeats=1)
            line += f" {paged:,.0f} tokens/s | {ours / paged:.2f} |"
        except Exception as error:  # of any class: the comparison continues without transformers' batching
            line += f" does not run: {type(error).__name__}: {error} | |"
        print(line, flush=True)


if __name__ == "__main__":
    main()
