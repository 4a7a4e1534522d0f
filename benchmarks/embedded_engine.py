"""Decode speed of the embedded engine against transformers' own generation, on one tiny model in one run.

    python benchmarks/embedded_engine.py [--requests 1 16 64 128] [--tokens 128] [--device cpu] [--dtype float32]

Prints tokens per second (on the CPU of processor time, so that other programs do not count; else of wall-clock) and the
ratio to ``generate`` (fixed batch) and to transformers' continuous batching, where that runs (on the CPU it needs psutil).
``grammar`` is the engine's speed under a JSON schema, as a share of its speed without; ``beside`` is the same by the clock of
the engine's own thread, where another core computes the masks (on the CPU only).
All sample at temperature 1 without filters from the same prompts; the engine also returns log-probs and versions.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import string
import time
from collections.abc import Callable
from functools import partial

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


# An array of this many short strings is long enough for every request of the benchmark.
GUIDED = StructuredOutput(
    "json_schema",
    '{"type": "array", "minItems": 400, "items": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, '
    '"n": {"type": "integer"}}, "required": ["name", "n"], "additionalProperties": false}, "x-guidance": '
    '{"whitespace_flexible": false}}',
)


def build(dtype: str, device: str, vocab: int) -> PreTrainedModel:
    """Build a model of the quickstart's size: 2 layers, width 128."""
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=vocab,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=256,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype]).to(device).eval()


def embedded(
    dtype: str, device: str, vocab: int, requests: int, tokens: int, structured: StructuredOutput | None = None
) -> Callable[[], int]:
    """Run the engine's core in this thread."""
    core = EmbeddedEngineCore(
        build(dtype, device, vocab),
        eos_ids=(1,),
        max_num_seqs=requests,
        max_model_len=512,
        tokenizer=partial(character_tokenizer, string.printable, words(vocab)),
    )
    transport = SharedMemoryTransport(dtype)
    update = transport.gather(build(dtype, device, vocab).named_parameters(), version=0)
    core.pause(PauseMode.KEEP)
    core.receive(update)
    core.load(update)
    core.resume()
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, structured=structured)

    def run() -> int:
        for request_id in range(requests):
            core.add(request_id, PROMPT, params)
        while core.runnable:
            core.step()
        return requests * tokens

    return run


def words(vocab: int) -> list[str]:
    """Return the tokens of several letters that fill the vocabulary."""
    pairs = map("".join, itertools.chain(*(itertools.product(string.ascii_letters + ' ,:"', repeat=n) for n in (2, 3))))
    return list(itertools.islice(pairs, vocab - len(character_tokenizer(string.printable))))


def generate(dtype: str, device: str, vocab: int, requests: int, tokens: int) -> Callable[[], int]:
    """Run ``model.generate`` with the whole batch from the start."""
    model = build(dtype, device, vocab)
    ids = torch.tensor([PROMPT] * requests, device=device)

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


def continuous_batching(dtype: str, device: str, vocab: int, requests: int, tokens: int) -> Callable[[], int]:
    """Run ``model.generate_batch``, transformers' paged continuous batching."""
    model = build(dtype, device, vocab)
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
    args = parser.parse_args()
    clock = time.process_time if args.device == "cpu" else time.perf_counter
    torch.set_num_threads(1)  # small models are faster on one; the trainer has the other core
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    print(
        f"{'requests':>8} {'embedded':>10} {'grammar':>8} {'beside':>7} {'generate':>10} {'ratio':>6} "
        f"{'continuous':>11} {'ratio':>6}   (tokens/s)"
    )
    for requests in args.requests:
        size = (args.dtype, args.device, args.vocab, requests, args.tokens)
        free, under_schema = embedded(*size), embedded(*size, GUIDED)
        ours, guided, fixed = tokens_per_second(free, under_schema, generate(*size), clock=clock)
        alone, beside = tokens_per_second(free, under_schema, clock=time.thread_time)
        shares = f"{guided / ours:>8.2f} {beside / alone if args.device == 'cpu' else float('nan'):>7.2f}"
        line = f"{requests:>8} {ours:>10,.0f} {shares} {fixed:>10,.0f} {ours / fixed:>6.2f}"
        try:
            (paged,) = tokens_per_second(continuous_batching(*size), clock=clock, repeats=1)
            line += f" {paged:>11,.0f} {ours / paged:>6.2f}"
        except Exception as error:  # of any class: the comparison continues without transformers' batching
            line += f"   does not run: {type(error).__name__}: {error}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
