"""The embedded engine without threads, clocks or loops: continuous batching, pauses and weight swaps.

    add ──> waiting ──prefill──> slots 0..count-1 ──one token each per step──> events
                 ^                  │
                 └── pause("recompute"): sequences without their KV cache, first in line

One ``step`` admits what fits (one prefill) and samples one token for every running request. Weights change only between
two steps and only while paused, so that each token has exactly one version.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Mapping
from enum import StrEnum

import numpy as np
import torch
from transformers import PreTrainedModel

from skyrl_train.errors import EngineError, RequestError
from skyrl_train.inference.engines.embedded.messages import Add, EngineSettings, Event, Refused, Tokens
from skyrl_train.inference.engines.embedded.runner import Runner, make_runner
from skyrl_train.inference.engines.embedded.sampling import sample
from skyrl_train.inference.engines.embedded.slots import Sequence, SlotTable
from skyrl_train.inference.engines.embedded.weights import check_weights, load_weights, served_checksum
from skyrl_train.inference.interface import PauseMode, StopReason
from skyrl_train.inference.randomness import mix
from skyrl_train.inference.receivers import WeightReceiver
from skyrl_train.inference.weight_update import WeightUpdate
from skyrl_train.models.folder import DTYPES, build_empty, load_config, load_model
from skyrl_train.models.lora import add_adapter

PREFILL_TOKENS = 4096  # padded tokens of one prefill, so that a flood of prompts does not hold up those that run


class _State(StrEnum):
    RUNNING = "running"
    DRAINING = "draining"  # pause("wait"): what has begun runs to its end
    PAUSED = "paused"


class EmbeddedEngineCore:
    """Serves ``model``; ``eos_ids`` end a response unless a request ignores them.

    Attributes:
        policy_version: the version loaded last; -1 before the first load, and then no request is taken.
        generated_tokens, prefill_tokens: totals since the start.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_ids: Collection[int],
        max_num_seqs: int,
        max_model_len: int,
        batch_invariant: bool = False,
        seed: int = 0,
    ) -> None:
        self.model = model.eval()
        self.max_model_len = max_model_len
        self.policy_version = -1
        self.generated_tokens = 0
        self.prefill_tokens = 0
        self._eos_ids = tuple(sorted(eos_ids))
        self._batch_invariant = batch_invariant
        self._max_num_seqs = max_num_seqs
        self._vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)
        self._runner: Runner = make_runner(model, max_num_seqs, max_model_len)
        self._slots = SlotTable(max_num_seqs, max_model_len)
        self._waiting: deque[Sequence] = deque()
        self._state = _State.RUNNING
        self._seeds = (mix(seed, counter) for counter in itertools.count())
        self._receiver = WeightReceiver(model.device)
        self._received: tuple[WeightUpdate, Mapping[str, torch.Tensor] | EngineError] | None = None
        self._loaded: WeightUpdate | None = None
        self._awake_on: torch.device | None = None  # asleep: where the weights were

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return self._slots.count

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def paused(self) -> bool:
        """Whether no token will be sampled before ``resume``."""
        return self._state == _State.PAUSED

    @property
    def runnable(self) -> bool:
        """Whether ``step`` has something to do."""
        return not self.paused and (self.running > 0 or self._next_in_line() is not None)

    def add(self, request: Add) -> None:
        """Puts a request in line.

        Raises:
            RequestError: there are no weights yet, or the prompt is empty, not of the vocabulary, or too long.
        """
        prompt, params = request.prompt, request.params
        if self.policy_version < 0:
            raise RequestError("The engine has no weights yet; publish the policy before the first generate().")
        if params.n != 1:
            raise RequestError(f"An engine samples one response per request, got n={params.n}; the client splits them.")
        if not prompt:
            raise RequestError("The prompt is empty; give at least one token.")
        if len(prompt) >= self.max_model_len:
            raise RequestError(
                f"The prompt has {len(prompt)} tokens and leaves no room for a response within max_model_len="
                f"{self.max_model_len}; shorten it or raise generator.inference_engine.max_model_len."
            )
        if not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
            raise RequestError(
                f"The prompt has token ids outside the model's vocabulary of {self._vocab_size}; "
                "tokenizer and model must belong together."
            )
        stop_ids = params.stop_token_ids if params.ignore_eos else (*self._eos_ids, *params.stop_token_ids)
        self._waiting.append(
            Sequence(
                request_id=request.request_id,
                prompt=prompt,
                params=params,
                seed=next(self._seeds) if params.seed is None else params.seed,
                # An id that the model does not have cannot be sampled, nor banned.
                stop_ids=tuple(dict.fromkeys(i for i in stop_ids if 0 <= i < self._vocab_size)),
                stream_every=request.stream_every,
            )
        )

    def abort(self, request_ids: Collection[int] | None = None) -> list[Event]:
        """Ends these requests (None: all) with what they have; ids that are not here any more are ignored."""

        def chosen(sequence: Sequence) -> bool:
            return request_ids is None or sequence.request_id in request_ids

        ended = [self._leave(slot) for slot in reversed(range(self.running)) if chosen(self._slots.sequences[slot])]
        ended += [sequence for sequence in self._waiting if chosen(sequence)]
        self._waiting = deque(sequence for sequence in self._waiting if not chosen(sequence))
        self._settle()
        return [Tokens(sequence.request_id, sequence.rest(StopReason.ABORT)) for sequence in ended]

    def pause(self, mode: PauseMode) -> list[Event]:
        """Stops sampling; under ``wait`` only once what has begun has ended (see ``paused``)."""
        self._state = _State.DRAINING if mode == PauseMode.WAIT else _State.PAUSED
        events: list[Event] = []
        if mode == PauseMode.ABORT:
            events = self.abort()
        elif mode == PauseMode.RECOMPUTE:
            self._freeze()
        self._settle()
        return events

    def resume(self) -> None:
        """Samples again.

        Raises:
            EngineError: it sleeps.
        """
        if self._awake_on is not None:
            raise EngineError("The engine sleeps; call wake_up() before resume().")
        self._state = _State.RUNNING

    def sleep(self) -> None:
        """Frees the KV cache, and moves the weights to main memory. What is frozen computes its cache again later.

        Raises:
            EngineError: not paused.
        """
        if not self.paused:
            raise EngineError("An engine sleeps while it is paused; call pause() first.")
        self._freeze()
        self._runner.release()
        self._awake_on = self._awake_on or self.model.device
        self.model.to("cpu")

    def wake_up(self) -> None:
        """Brings the weights back to where they were; still paused. Idempotent."""
        if self._awake_on is not None:
            self.model.to(self._awake_on)
            self._awake_on = None

    def _freeze(self) -> None:
        """Running requests leave their slots and are first in line for others."""
        self._waiting.extendleft([self._leave(slot) for slot in reversed(range(self.running))])

    def receive(self, update: WeightUpdate) -> None:
        """Brings an update's bytes here and checks them; whatever is wrong with it, ``load`` raises.

        The one method that may run beside the others, in a thread, so that sampling goes on meanwhile.
        """
        try:
            self._received = (update, self._receiver.open_update(update))
        except EngineError as error:
            self._received = (update, error)

    def load(self, update: WeightUpdate) -> None:
        """Swaps the received update into the model: all of it or nothing.

        Raises:
            EngineError: not paused, not received, or not this model's weights. The old ones stay then.
        """
        if not self.paused:
            raise EngineError("Weights are loaded while the engine is paused; call pause() first.")
        if self._received is None or self._received[0] != update:
            raise EngineError(f"Version {update.version} was not received; call receive_weights() first.")
        weights = self._received[1]
        if isinstance(weights, EngineError):
            raise weights
        check_weights(self.model, weights, update.adapter)
        load_weights(self.model, weights)
        self._loaded, self._received = update, None
        self.policy_version = update.version

    def served_checksum(self) -> str:
        """The checksum of the weights in the model, comparable with that of the update loaded last.

        Raises:
            EngineError: nothing was loaded yet.
        """
        if self._loaded is None:
            raise EngineError("The engine has no weights yet; publish the policy first.")
        return served_checksum(self.model, self._loaded)

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Admits waiting requests and samples one token for each running one; a no-op when not ``runnable``."""
        if self.paused:
            return []
        events: list[Event] = []
        self._admit(events)
        if self._batch_invariant:
            # From the back: a row that ends is replaced by the last one, which has had its token.
            for slot in reversed(range(self.running)):
                self._decode(slice(slot, slot + 1), events)
        elif self.running:
            self._decode(slice(0, self.running), events)
        self._settle()
        return events

    def close(self) -> None:
        """Lets go of what was received."""
        self._received = None
        self._receiver.close()

    def _admit(self, events: list[Event]) -> None:
        first, longest = self.running, 0
        while (sequence := self._next_in_line()) is not None:
            longest = max(longest, len(sequence))
            if self.running > first and (self.running + 1 - first) * longest > PREFILL_TOKENS:
                break
            self._waiting.popleft()
            slot = self._slots.place(sequence)
            self.prefill_tokens += len(sequence)
            if self._batch_invariant:
                self._prefill(slice(slot, slot + 1), events)
                first = self.running
        if self.running > first:
            self._prefill(slice(first, self.running), events)

    def _next_in_line(self) -> Sequence | None:
        """The request that may take a slot now: while draining only one that has begun (those are first in line)."""
        if not self._waiting or self.running == self._max_num_seqs:
            return None
        sequence = self._waiting[0]
        return sequence if self._state == _State.RUNNING or sequence.begun else None

    def _prefill(self, rows: slice, events: list[Event]) -> None:
        logits = self._runner.prefill(self._slots.tokens[rows], self._slots.lengths[rows], rows.start)
        self._append(rows, logits, events)

    def _decode(self, rows: slice, events: list[Event]) -> None:
        logits = self._runner.decode(self._slots.tokens[rows], self._slots.lengths[rows], rows.start)
        self._append(rows, logits, events)

    def _append(self, rows: slice, logits: torch.Tensor, events: list[Event]) -> None:
        """Samples a token for each of ``rows``, ends those that are done, and hands streams their tokens."""
        slots = self._slots
        tokens, logprobs, top = sample(logits, slots.sampling_rows(rows))
        for row, alternatives in top.items():
            slots.sequences[rows.start + row].top_logprobs.append(alternatives)
        slots.append(rows, tokens, logprobs, self.policy_version)
        self.generated_tokens += len(tokens)
        stopped = (slots.stop_ids[rows] == tokens[:, None]).any(-1)
        broken = np.isnan(logprobs)
        ended = stopped | broken | (slots.lengths[rows] >= slots.limits[rows])
        streaming = slots.chunk_is_full(rows) & ~ended
        for row in np.flatnonzero(streaming):
            slot = rows.start + int(row)
            events.append(Tokens(slots.sequences[slot].request_id, slots.unsent(slot)))
        for row in np.flatnonzero(ended)[::-1]:
            sequence = self._leave(rows.start + int(row), clear=bool(broken[row]))
            if broken[row]:
                events.append(Refused(sequence.request_id, _NOT_A_NUMBER))
            else:
                reason = StopReason.STOP if stopped[row] else StopReason.LENGTH
                events.append(Tokens(sequence.request_id, sequence.rest(reason)))

    def _leave(self, slot: int, clear: bool = False) -> Sequence:
        """Frees the slot (``clear``: of everything that is not a number) and closes the gap."""
        sequence = self._slots.read(slot)
        if clear:
            self._runner.clear_slot(slot)
        last = self._slots.remove(slot)
        if last != slot:
            self._runner.copy_slot(last, slot, int(self._slots.lengths[slot]))
            if clear:
                self._runner.clear_slot(last)
        return sequence

    def _settle(self) -> None:
        if self._state == _State.DRAINING and not self.runnable:
            self._state = _State.PAUSED


_NOT_A_NUMBER = (
    "The model's logits are not numbers; the policy has diverged. Lower the learning rate or clip gradients."
)


def build_core(settings: EngineSettings) -> EmbeddedEngineCore:
    """Builds the architecture in ``model_path``, without its weights: the first publication brings them. Where it brings an
    adapter, the folder has the base model.

    The adapter is not merged into it: the low-rank product costs a little per token, and is what the trainer computes, while
    a merged 16-bit weight would round most of a small update away.

    Raises:
        ModelError: the folder is not a model.
        EngineError: a setting does not fit the model.
    """
    if settings.dtype not in DTYPES:
        raise EngineError(f"dtype {settings.dtype!r} is unknown; choose one of {', '.join(DTYPES)}.")
    if settings.max_num_seqs < 1 or settings.max_model_len < 2:
        raise EngineError(
            "max_num_seqs must be at least 1 and max_model_len at least 2, "
            f"got {settings.max_num_seqs} and {settings.max_model_len}."
        )
    config = load_config(settings.model_path).get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and settings.max_model_len > longest:
        raise EngineError(
            f"max_model_len={settings.max_model_len} exceeds the model's {longest} positions; lower "
            "generator.inference_engine.max_model_len."
        )
    if settings.lora is None:
        model = build_empty(settings.model_path, settings.dtype, settings.device)
    else:
        model = add_adapter(load_model(settings.model_path, settings.dtype, settings.device), settings.lora)
    return EmbeddedEngineCore(
        model,
        eos_ids=_eos_ids(model),
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        batch_invariant=settings.batch_invariant,
        seed=settings.seed,
    )


def _eos_ids(model: PreTrainedModel) -> set[int]:
    """The ends of sequence that the model's configurations name."""
    found: set[int] = set()
    for config in (model.generation_config, model.config.get_text_config(decoder=True)):
        ids = getattr(config, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return found
