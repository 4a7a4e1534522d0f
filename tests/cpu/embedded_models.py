"""Tiny models and a hand to drive an engine core with, for the tests of the embedded engine."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from skyrl_train.inference.engines.embedded.core import EmbeddedEngineCore
from skyrl_train.inference.interface import LogitAdjustment, SamplingParams, TokenChunk, TopLogprobs
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_train.weight_sync.update import WeightUpdate
from skyrl_train.workers.messages import Failure, Item, Message, Result

VOCAB, CONTEXT, EOS = 23, 64, 1
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8}
ARCHITECTURES = {
    "qwen3": {**_GROUPED},
    "llama": {**_GROUPED, "tie_word_embeddings": True},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT},
    "mistral": {**_GROUPED, "sliding_window": 7},
    "gemma3_text": {**_GROUPED, "num_hidden_layers": 3, "sliding_window": 7, "sliding_window_pattern": 2},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}
# Of log-probs in float32: a batch sums in another order than the plain forward pass of one sequence, and widely spread weights
# make large logits. 7.4e-6 was the largest difference of 12,192 requests, and 1.05e-5 was seen once before. A wrong mask or
# position makes 0.01 and more.
TOLERANCE = 2e-4
CACHED = [name for name in ARCHITECTURES if name != "mamba"]


@functools.cache
def tiny_model(architecture: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Random weights, spread widely enough that a wrong mask or position shows in the logits. Do not modify."""
    config = AutoConfig.for_model(
        architecture,
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=0,
        **ARCHITECTURES[architecture],
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1 and architecture != "mamba":
                parameter.data.normal_(std=0.3)
    return model


def empty_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The same architecture with other weights, as an engine builds it."""
    return AutoModelForCausalLM.from_config(model.config, dtype=model.dtype).eval()


ADJUSTMENTS = st.builds(
    LogitAdjustment,
    presence_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -1.1]),
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.6]),
    logit_bias=st.sampled_from([(), ((2, 3.5),), ((0, -100.0), (6, 0.25))]),
)


@dataclass
class Response:
    """What came back for one request; the chunks of a stream put together."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logprobs: TopLogprobs = field(default_factory=list)
    stop_reason: str | None = None
    error: str | None = None
    chunks: int = 0

    def add(self, chunk: TokenChunk) -> None:
        assert self.stop_reason is None, "nothing comes after the last chunk"
        self.tokens += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.versions += chunk.versions
        self.top_logprobs += chunk.top_logprobs or []
        self.stop_reason = chunk.stop_reason
        self.chunks += 1


class Driver:
    """A core with published weights (version 0 is ``model``'s), driven step by step."""

    def __init__(self, model: PreTrainedModel, *, publish: bool = True, **options: object) -> None:
        settings = {"max_num_seqs": 4, "max_model_len": CONTEXT, "eos_ids": (EOS,), **options}
        self.core = EmbeddedEngineCore(empty_copy(model), **settings)
        self.responses: dict[int, Response] = {}
        self._dtype = str(model.dtype).removeprefix("torch.")
        self._transport = SharedMemoryTransport(self._dtype, verify=True)
        self._ids = itertools.count()
        if publish:
            self.pause(PauseMode.KEEP)
            self.load(model, 0)
            self.core.resume()

    def gather(self, model: PreTrainedModel, version: int) -> WeightUpdate:
        return self._transport.gather(model.named_parameters(), version)

    def load(self, model: PreTrainedModel, version: int) -> WeightUpdate:
        update = self.gather(model, version)
        self.core.receive(update)
        self.core.load(update)
        return update

    def add(self, prompt: list[int], stream_every: int = 0, **params: object) -> int:
        request_id = next(self._ids)
        self.responses[request_id] = Response()
        self.core.add(request_id, prompt, SamplingParams(**{"ignore_eos": True, **params}), stream_every)
        return request_id

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.collect(self.core.step())

    def pause(self, mode: PauseMode) -> None:
        self.collect(self.core.pause(mode))

    def run(self) -> None:
        while self.core.runnable:
            self.step()

    def collect(self, events: list[Message]) -> None:
        for event in events:
            match event:
                case Item(request_id, chunk) | Result(request_id, chunk):
                    self.responses[request_id].add(chunk)
                case Failure(request_id, _, message):
                    self.responses[request_id].error = message

    def generate(self, prompt: list[int], **params: object) -> Response:
        request_id = self.add(prompt, **params)
        self.run()
        return self.responses[request_id]


def full_logprobs(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """The reference: log-probs of ``tokens`` after ``prompt`` from one plain forward pass over the whole sequence."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0].float()
    logprobs = logits.log_softmax(-1)
    return np.array([logprobs[len(prompt) + i - 1, token].item() for i, token in enumerate(tokens)])


def adjusted_logits(
    logits: list[float], change: LogitAdjustment, prompt: list[int], response: list[int]
) -> list[float]:
    """The reference: ``logits`` ``[V]`` changed by the definition, one token after the other."""
    found = []
    for token, z in enumerate(logits):
        z += dict(change.logit_bias).get(token, 0.0)
        if token in prompt + response:
            z = z / change.repetition_penalty if z > 0 else z * change.repetition_penalty
        for index, used in enumerate(response):
            if used == token:
                z -= change.frequency_penalty + (change.presence_penalty if token not in response[:index] else 0.0)
        found.append(z)
    return found


def full_greedy(model: PreTrainedModel, prompt: list[int], length: int) -> list[int]:
    """The reference: greedy tokens, each from a plain forward pass over everything before it."""
    tokens: list[int] = []
    with torch.inference_mode():
        for _ in range(length):
            logits = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
    return tokens
