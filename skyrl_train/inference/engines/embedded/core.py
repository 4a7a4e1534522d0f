"""The embedded engine without clocks or loops: continuous batching, pauses and weight updates.

    add ──> waiting ──prefill──> slots 0..count-1 ──one token each per step──> answers
                 ^                  │
                 └── pause("recompute"): sequences without their KV cache, first in line

One ``step`` admits the requests that fit (one prefill) and samples one token for every running request. Weights change only
between two steps and only while paused, so each token has exactly one version. A thread computes the masks of grammars while the
model computes the logits that they are for.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from functools import cached_property, partial

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.config.model_shape import num_positions
from skyrl_train.errors import EngineError, GrammarError, ModelError, RequestError
from skyrl_train.inference.engines.embedded.engine import EngineSettings
from skyrl_train.inference.engines.embedded.masks import MaskThread
from skyrl_train.inference.engines.embedded.runner import Tokens, make_runner
from skyrl_train.inference.engines.embedded.sampling import sample
from skyrl_train.inference.engines.embedded.slots import Sequence, SlotTable
from skyrl_train.inference.grammar import Grammars
from skyrl_train.inference.interface import SamplingParams, StopReason
from skyrl_train.inference.response_text import ResponseText
from skyrl_train.models.adapter_spec import AdapterSpec
from skyrl_train.models.folder import DTYPES, build_empty, load_config, load_model, load_tokenizer
from skyrl_train.models.lora import adapter_of, add_adapter, policy_weights, served_weights
from skyrl_train.runtime.seeds import derive_seed
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.checksum import checksum
from skyrl_train.weight_sync.pinning import wait_for_copies
from skyrl_train.weight_sync.receiver import WeightReceiver
from skyrl_train.weight_sync.staging import tensor_view
from skyrl_train.weight_sync.update import WeightUpdate
from skyrl_train.workers.messages import Failure, Item, Message, Result

logger = logging.getLogger(__name__)

PREFILL_TOKENS = 4096  # limit of one prefill, padding included, so that many prompts do not stall the running requests
NOT_A_NUMBER = "The model's logits are not numbers; the policy has diverged. Lower the learning rate or clip gradients."


class PauseState(StrEnum):
    RUNNING = "running"
    DRAINING = "draining"  # pause("wait"): requests that have begun run to their end
    PAUSED = "paused"


class EmbeddedEngineCore:
    """Continuous batching over one model. A token in ``eos_ids`` ends a response, unless its request ignores them.

    Args:
        tokenizer: returns the model's tokenizer, which only stop strings and grammars need; None: requests with a grammar are
            rejected, and others do not end at stop strings.

    Attributes:
        policy_version: the version loaded last; -1 before the first load, when requests are rejected.
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
        tokenizer: Callable[[], PreTrainedTokenizerBase] | None = None,
    ) -> None:
        self.model = model.eval()
        self.max_model_len = max_model_len
        self.policy_version = -1
        self.generated_tokens = 0
        self.prefill_tokens = 0
        self._eos_ids = tuple(sorted(eos_ids))
        self._tokenizer = tokenizer
        self._batch_invariant = batch_invariant
        self._max_num_seqs = max_num_seqs
        self._vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)
        self._runner = make_runner(model, max_num_seqs, max_model_len)
        self._slots = SlotTable(max_num_seqs, max_model_len)
        self._waiting: deque[Sequence] = deque()
        self._state = PauseState.RUNNING
        self._seeds = (derive_seed(seed, counter) for counter in itertools.count())
        self._masks = MaskThread(self._vocab_size)
        self._receiver = WeightReceiver(model.device)
        self._received: tuple[WeightUpdate, Mapping[str, torch.Tensor] | EngineError] | None = None
        self._loaded: WeightUpdate | None = None
        self._awake_on: torch.device | None = None  # the device of the weights before sleep(); None: awake

    @property
    def running(self) -> int:
        """The number of requests that hold a slot."""
        return self._slots.count

    @property
    def waiting(self) -> int:
        """The number of requests without a slot."""
        return len(self._waiting)

    @property
    def paused(self) -> bool:
        """True if no token will be sampled before ``resume``."""
        return self._state == PauseState.PAUSED

    @property
    def runnable(self) -> bool:
        """True if ``step`` has something to do."""
        return not self.paused and (self.running > 0 or self._next_in_line() is not None)

    def add(self, request_id: int, prompt: list[int], params: SamplingParams, stream_every: int = 0) -> None:
        """Queue a request. Steps answer it by one ``Result`` with the (last) chunk, before it by ``Item``s, or by ``Failure``.

        Args:
            stream_every: number of tokens in each chunk of a stream; 0: no chunks.

        Raises:
            RequestError: there are no weights yet, or the prompt is empty, too long, or has ids outside the vocabulary.
            GrammarError: the grammar cannot be compiled or followed.
        """
        if self.policy_version < 0:
            raise RequestError("The engine has no weights yet; sync the policy's weights before the first generate().")
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
        biases = () if params.adjustment is None else params.adjustment.logit_bias
        if any(token >= self._vocab_size for token, _ in biases):
            raise RequestError(f"logit_bias has token ids outside the model's vocabulary of {self._vocab_size}.")
        # ignore_eos concerns the model's own ids; the caller's stop tokens always count.
        stop_ids = params.stop_token_ids if params.ignore_eos else (*self._eos_ids, *params.stop_token_ids)
        matcher = None
        if params.structured is not None:
            grammars = self.grammars
            stop_ids = (*stop_ids, *grammars.eos_ids)
            continued = prompt[len(prompt) - params.structured.continued_tokens :]
            # Not the engine's own end tokens: the trainer has to come to the same masks.
            matcher = grammars.matcher(params.structured, continued, params.stop_token_ids)
        self._waiting.append(
            Sequence(
                request_id=request_id,
                prompt=prompt,
                params=params,
                seed=next(self._seeds) if params.seed is None else params.seed,
                # An id that the model does not have cannot be sampled, nor banned.
                stop_ids=tuple(dict.fromkeys(i for i in stop_ids if 0 <= i < self._vocab_size)),
                matcher=matcher,
                text=ResponseText(self.tokenizer, params.stop) if params.stop and self.tokenizer is not None else None,
                stream_every=stream_every,
            )
        )

    def load_tokenizer(self, grammars: bool) -> None:
        """Load what stop strings, or also ``grammars``, need; also in a thread beside the other methods.

        Raises:
            GrammarError: the engine has no tokenizer for grammars.
        """
        _ = self.grammars if grammars else self.tokenizer

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer of the model's folder; None: there is none, so that the engine samples on behind stop strings."""
        try:
            return None if self._tokenizer is None else self._tokenizer()
        except ModelError as error:
            logger.warning("The engine samples on behind stop strings, which only the client then finds: %s", error)
            return None

    @cached_property
    def grammars(self) -> Grammars:
        """The grammars of the model. The first access loads what they need.

        Raises:
            GrammarError: the engine has no tokenizer.
        """
        if self._tokenizer is None:
            raise GrammarError("The engine has no tokenizer, without which it cannot follow a grammar.")
        try:
            return Grammars(self.tokenizer or self._tokenizer(), self.model.config)
        except ModelError as error:
            raise GrammarError(f"The engine cannot follow a grammar: {error}") from error

    def abort(self, request_ids: Collection[int] | None = None) -> list[Message]:
        """End these requests (None: all) with the tokens that they have. Unknown ids are ignored."""

        def chosen(sequence: Sequence) -> bool:
            return request_ids is None or sequence.request_id in request_ids

        # From the back: removing a slot moves the last one into its place.
        ended = [self._leave(slot) for slot in reversed(range(self.running)) if chosen(self._slots.sequences[slot])]
        ended += [sequence for sequence in self._waiting if chosen(sequence)]
        self._waiting = deque(sequence for sequence in self._waiting if not chosen(sequence))
        self._pause_if_drained()
        return [Result(sequence.request_id, sequence.rest(StopReason.ABORT)) for sequence in ended]

    def pause(self, mode: PauseMode) -> list[Message]:
        """Stop sampling; with ``wait`` as soon as the requests that have begun have ended (see ``paused``)."""
        # KEEP needs no more than this: running requests stay in their slots with their caches.
        self._state = PauseState.DRAINING if mode == PauseMode.WAIT else PauseState.PAUSED
        answers: list[Message] = []
        if mode == PauseMode.ABORT:
            answers = self.abort()
        elif mode == PauseMode.RECOMPUTE:
            self._freeze()
        self._pause_if_drained()
        return answers

    def resume(self) -> None:
        """Allow sampling again.

        Raises:
            EngineError: the engine sleeps.
        """
        if self._awake_on is not None:
            raise EngineError("The engine sleeps; call wake_up() before resume().")
        self._state = PauseState.RUNNING

    def sleep(self) -> None:
        """Free the KV cache and move the weights to main memory. Frozen requests compute their cache again later.

        Raises:
            EngineError: the engine is not paused.
        """
        if not self.paused:
            raise EngineError("An engine sleeps while it is paused; call pause() first.")
        self._freeze()
        # Sequences left their slots above, because their cache is freed with the memory.
        if self._runner.cache is not None:
            self._runner.cache.release()
        self._awake_on = self._awake_on or self.model.device
        self.model.to("cpu")
        if self._awake_on.type == "cuda":
            torch.cuda.empty_cache()  # for other processes

    def wake_up(self) -> None:
        """Move the weights back to their device; the engine stays paused. Idempotent."""
        if self._awake_on is not None:
            self.model.to(self._awake_on)
            self._awake_on = None

    def _freeze(self) -> None:
        """Take running requests out of their slots and put them first in the queue."""
        self._waiting.extendleft([self._leave(slot) for slot in reversed(range(self.running))])

    def receive(self, update: WeightUpdate) -> None:
        """Fetch an update's bytes and verify them. ``load`` raises what is wrong with them.

        Like the first access to ``grammars``, it may run in a thread beside the others, so that sampling continues meanwhile.
        """
        self._received = None  # its memory may be written to now
        try:
            self._received = (update, self._receiver.open_update(update))
        except EngineError as error:
            self._received = (update, error)

    def load(self, update: WeightUpdate) -> None:
        """Copy the received update into the model: all of it or nothing.

        Raises:
            EngineError: not paused, not received, or not this model's weights. The old weights stay then.
        """
        if not self.paused:
            raise EngineError("Weights are loaded while the engine is paused; call pause() first.")
        if self._received is None or self._received[0] != update:
            raise EngineError(f"Version {update.version} was not received; call receive_weights() first.")
        weights = self._received[1]
        if isinstance(weights, EngineError):
            raise weights
        load_update(self.model, update, weights)
        if self.model.device.type == "cuda":
            wait_for_copies(self.model.device)  # the trainer may overwrite the staging copy after this
        # Tokens sampled from here on carry the new version.
        self._loaded, self._received = update, None
        self.policy_version = update.version

    def served_checksum(self) -> str:
        """Return the checksum of the model's weights, laid out like the update loaded last: equal to that update's.

        Raises:
            EngineError: nothing was loaded yet.
        """
        if self._loaded is None:
            raise EngineError("The engine has no weights yet; sync the policy's weights first.")
        staging, own = torch.zeros(self._loaded.num_bytes, dtype=torch.uint8), _named_tensors(self.model)
        for spec in self._loaded.tensors:
            tensor_view(staging, spec).copy_(own[spec.name])
        return checksum(staging)

    @torch.inference_mode()
    def step(self) -> list[Message]:
        """Admit waiting requests and sample one token for each running one. Does nothing when not ``runnable``."""
        if self.paused:
            return []
        answers: list[Message] = []
        self._admit(answers)
        if self._batch_invariant:
            # From the back: a slot that ends is taken by the last one, which has had its token.
            for slot in reversed(range(self.running)):
                self._forward(self._runner.decode, slice(slot, slot + 1), answers)
        elif self.running:
            self._forward(self._runner.decode, slice(0, self.running), answers)
        self._pause_if_drained()
        return answers

    def close(self) -> None:
        """Release the received update, and end the thread."""
        self._masks.close()
        self._received = None
        self._receiver.close()

    def _admit(self, answers: list[Message]) -> None:
        """Give waiting requests slots and sample their first token."""
        # New slots are the last ones, so one prefill covers a contiguous range of rows.
        first, longest = self.running, 0
        while (sequence := self._next_in_line()) is not None:
            longest = max(longest, len(sequence))
            if self.running > first and (self.running + 1 - first) * longest > PREFILL_TOKENS:
                break
            self._waiting.popleft()
            slot = self._slots.place(sequence)
            self.prefill_tokens += len(sequence)
            if self._batch_invariant:
                self._forward(self._runner.prefill, slice(slot, slot + 1), answers)
                first = self.running
        if self.running > first:
            self._forward(self._runner.prefill, slice(first, self.running), answers)

    def _next_in_line(self) -> Sequence | None:
        """Return the request that may take a slot now, or None."""
        if not self._waiting or self.running == self._max_num_seqs:
            return None
        # While draining, only a request that has begun may; those are first in the queue.
        sequence = self._waiting[0]
        return sequence if self._state == PauseState.RUNNING or sequence.begun else None

    def _forward(self, run: Callable[[Tokens, Tokens, int], torch.Tensor], rows: slice, answers: list[Message]) -> None:
        """Run the model over ``rows``, sample a token for each, end those that are done, and stream full chunks."""
        slots = self._slots
        # The version of these tokens is fixed here: weights cannot change during a step.
        logits = run(slots.tokens[rows], slots.lengths[rows], rows.start)
        self._masks.wait()  # computed since the last tokens, while the model ran
        tokens, logprobs, top = sample(logits, slots.sampling_rows(rows))
        for row, alternatives in top.items():
            slots.sequences[rows.start + row].top_logprobs.append(alternatives)
        slots.append(rows, tokens, logprobs, self.policy_version)
        self.generated_tokens += len(tokens)

        stopped = (slots.stop_ids[rows] == tokens[:, None]).any(-1)
        broken = np.isnan(logprobs)
        at_string = np.zeros(len(tokens), np.bool_)
        for row in slots.has_text[rows].nonzero()[0]:
            at_string[row] = slots.reaches_stop_string(rows.start + int(row))
        ended = stopped | broken | at_string | (slots.lengths[rows] >= slots.limits[rows])
        failed: dict[int, GrammarError] = {}
        guided = slots.guided_rows(rows)
        if guided.matchers:
            for row, matcher in zip(guided.rows.tolist(), guided.matchers, strict=True):
                if matcher.error is not None:
                    failed[row] = matcher.error
                    ended[row] = True  # without a mask, this token does not count
            following = zip(guided.matchers, tokens[guided.rows].tolist(), ended[guided.rows].tolist(), strict=True)
            if sampled := [(matcher, token) for matcher, token, ends in following if not ends]:
                self._masks.submit(sampled)
        every = slots.stream_every[rows]
        chunk_is_full = (every > 0) & (slots.lengths[rows] - slots.sent[rows] >= every)
        # A token that ends the response leaves with its stop reason, never in a chunk before.
        for row in (chunk_is_full & ~ended).nonzero()[0]:
            slot = rows.start + int(row)
            answers.append(Item(slots.sequences[slot].request_id, slots.take_chunk(slot)))
        # From the back: removing a slot moves the last one into its place.
        for row in ended.nonzero()[0][::-1]:
            sequence = self._leave(rows.start + int(row), clear=bool(broken[row]))
            if broken[row]:
                answers.append(Failure.of(sequence.request_id, RequestError(NOT_A_NUMBER)))
            elif int(row) in failed:
                answers.append(Failure.of(sequence.request_id, failed[int(row)]))
            else:
                # The client matches stop strings by itself, also across segments, and continues where it finds none.
                early = StopReason.ABORT if at_string[row] else StopReason.LENGTH
                answers.append(Result(sequence.request_id, sequence.rest(StopReason.STOP if stopped[row] else early)))

    def _leave(self, slot: int, clear: bool = False) -> Sequence:
        """Free a slot and move the last one into its place; ``clear`` zeroes a cache that holds NaN."""
        sequence, cache = self._slots.read(slot), self._runner.cache
        last = self._slots.remove(slot)
        if cache is not None and clear:
            cache.clear_slot(slot)
        if cache is not None and last != slot:
            cache.copy_slot(last, slot, int(self._slots.lengths[slot]))
            if clear:
                cache.clear_slot(last)
        return sequence

    def _pause_if_drained(self) -> None:
        if self._state == PauseState.DRAINING and not self.runnable:
            self._state = PauseState.PAUSED


@torch.no_grad()
def load_update(model: PreTrainedModel, update: WeightUpdate, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy the weights of an update into the model: all of them or none. On a GPU the copies are queued.

    Raises:
        EngineError: they are not this model's.
    """
    # Checked as a whole before the first copy: half an update is no model.
    check_weights(model, weights, update.adapter)
    own = _named_tensors(model)
    for name, weight in weights.items():
        own[name].copy_(weight, non_blocking=True)  # in place, so that tied weights stay tied


def check_weights(model: PreTrainedModel, weights: Mapping[str, torch.Tensor], adapter: AdapterSpec | None) -> None:
    """Check that ``weights`` is the whole model (a tied weight under any of its names), or the whole adapter of one that has
    an ``adapter``, and nothing else.

    Raises:
        EngineError: a name is unknown or missing, a shape or dtype differs, two names of a tied weight disagree, or only one
            of model and update has an adapter.
    """
    if adapter != adapter_of(model):
        raise EngineError(
            f"The update brings {adapter or 'a whole model'}, the engine serves {adapter_of(model) or 'one'}; trainer and engine "
            "must have the same trainer.policy.model.lora."
        )
    own = _named_tensors(model)
    names: dict[int, str] = {}  # by the address of a tensor, the name under which the update has it
    for name, weight in weights.items():
        target = own.get(name)
        if target is None:
            raise EngineError(f"The model has no weight {name!r}; trainer and engine must use the same model folder.")
        if target.shape != weight.shape:
            raise EngineError(
                f"Weight {name!r} has shape {tuple(weight.shape)}, the engine's model has {tuple(target.shape)}; "
                "trainer and engine must use the same model folder."
            )
        if weight.dtype != model.dtype:
            raise EngineError(
                f"Weight {name!r} is {weight.dtype}, the engine serves {model.dtype}; gather weights in "
                "generator.inference_engine.dtype."
            )
        twin = names.setdefault(target.data_ptr(), name)
        if twin != name and not torch.equal(weight, weights[twin]):
            raise EngineError(
                f"Weights {twin!r} and {name!r} are tied in the engine's model, but differ in the update."
            )
    # By address, so that a tied weight counts under any of its names.
    missing = [name for name, weight in served_weights(model) if weight.data_ptr() not in names]
    if missing:
        raise EngineError(f"The update misses {len(missing)} weights of the model, the first is {missing[0]!r}.")


def _named_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the parameters under all their names and the buffers of a checkpoint, or the parameters of the adapter."""
    if adapter_of(model) is not None:
        return dict(policy_weights(model))
    return {**dict(model.named_parameters(remove_duplicate=False)), **model.state_dict()}


def build_core(settings: EngineSettings) -> EmbeddedEngineCore:
    """Build the architecture in ``model_path`` without its weights, which the first weight sync brings. If weight syncs carry
    an adapter, the base model's weights come from the folder.

    The adapter is not merged into the base: the low-rank product costs a little per token, but it is what the trainer
    computes, and a merged 16-bit weight would round most of a small update away.

    Raises:
        ModelError: the folder is not a model.
        EngineError: a setting is impossible, or exceeds the model's positions.
    """
    if settings.dtype not in DTYPES:
        raise EngineError(f"dtype {settings.dtype!r} is unknown; choose one of {', '.join(DTYPES)}.")
    if settings.max_num_seqs < 1 or settings.max_model_len < 2:
        raise EngineError(
            "max_num_seqs must be at least 1 and max_model_len at least 2, "
            f"got {settings.max_num_seqs} and {settings.max_model_len}."
        )
    config = load_config(settings.model_path).get_text_config(decoder=True)
    longest = num_positions(config)
    if longest is not None and settings.max_model_len > longest:
        raise EngineError(
            f"max_model_len={settings.max_model_len} exceeds the model's {longest} positions; lower "
            "generator.inference_engine.max_model_len."
        )
    # Without an adapter the folder's weights would only be overwritten by the first sync.
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
        tokenizer=partial(load_tokenizer, settings.model_path),
    )


def _eos_ids(model: PreTrainedModel) -> set[int]:
    """Return the end-of-sequence ids in the model's configurations."""
    found: set[int] = set()
    for config in (model.generation_config, model.config.get_text_config(decoder=True)):
        ids = getattr(config, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return found
