"""Weights change between decode steps: the effect of each pause mode on requests; a bad update has none."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from embedded_models import CONTEXT, TOLERANCE, Driver, full_greedy, full_logprobs, tiny_model
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from skyrl_train.errors import EngineError
from skyrl_train.inference.engines.embedded.engine_loop import EngineLoop
from skyrl_train.runtime.seeds import segment_seed
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.update import WeightUpdate
from skyrl_train.workers.messages import Call, Message, Result

PROMPT, BEFORE, LENGTH = [3, 5, 8], 6, 16
TOLERANCES = {torch.float32: TOLERANCE, torch.bfloat16: 0.15}  # bfloat16 has a precision of 8 bits
DTYPES = list(TOLERANCES)


def swap(driver: Driver, mode: PauseMode, model: PreTrainedModel, version: int = 1) -> WeightUpdate:
    driver.pause(mode)
    if mode == PauseMode.WAIT:
        driver.run()
    assert driver.core.paused
    update = driver.load(model, version)
    driver.core.resume()
    return update


def old_keys_new_weights(old: PreTrainedModel, new: PreTrainedModel, tokens: list[int]) -> np.ndarray:
    """The reference for ``keep``: the old model's KV of everything before the newest token, then the new model."""
    sequence = PROMPT + tokens
    frozen = len(PROMPT) + BEFORE - 1  # the newest token's own KV did not exist yet
    cache = DynamicCache(config=old.config)
    with torch.inference_mode():
        old(input_ids=torch.tensor([sequence[:frozen]]), past_key_values=cache, use_cache=True)
        logits = new(input_ids=torch.tensor([sequence[frozen:]]), past_key_values=cache, use_cache=True).logits[0]
    logprobs = logits.float().log_softmax(-1)
    return np.array([logprobs[i, token].item() for i, token in enumerate(tokens[BEFORE:])])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.RECOMPUTE])
def test_a_frozen_request_continues_under_the_new_weights(mode: PauseMode, dtype: torch.dtype) -> None:
    old, new = tiny_model(dtype=dtype), tiny_model(seed=1, dtype=dtype)
    driver = Driver(old)
    frozen, company = driver.add(PROMPT, max_tokens=LENGTH, seed=7), driver.add([9] * 11, max_tokens=LENGTH)
    driver.step(BEFORE - 1)  # the first step samples two tokens: one from the prefill, one from the decode
    update = swap(driver, mode, new)
    assert driver.core.served_checksum() == update.checksum, "served bit for bit"
    late = driver.add(PROMPT, max_tokens=LENGTH, seed=7)
    driver.run()
    response = driver.responses[frozen]
    assert response.versions == [0] * BEFORE + [1] * (LENGTH - BEFORE)
    assert driver.responses[company].versions == [0] * BEFORE + [1] * (LENGTH - BEFORE)
    assert driver.responses[late].versions == [1] * LENGTH
    expected_before = full_logprobs(old, PROMPT, response.tokens)[:BEFORE]
    if mode == PauseMode.KEEP:
        expected_after = old_keys_new_weights(old, new, response.tokens)
    else:
        expected_after = full_logprobs(new, PROMPT, response.tokens)[BEFORE:]
    expected = np.concatenate([expected_before, expected_after])
    np.testing.assert_allclose(response.logprobs, expected, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_abort_returns_the_partial_tokens_and_the_rest_continues_from_them(dtype: torch.dtype) -> None:
    old, new = tiny_model(dtype=dtype), tiny_model(seed=1, dtype=dtype)
    driver = Driver(old, max_num_seqs=1)
    running, waiting = (driver.add(PROMPT, max_tokens=LENGTH, seed=7) for _ in range(2))
    driver.step(BEFORE - 1)
    swap(driver, PauseMode.ABORT, new)
    part, nothing = driver.responses[running], driver.responses[waiting]
    assert (part.stop_reason, part.versions) == ("abort", [0] * BEFORE)
    assert (nothing.stop_reason, nothing.tokens) == ("abort", [])
    rest = driver.generate(PROMPT + part.tokens, max_tokens=LENGTH - BEFORE, seed=segment_seed(7, BEFORE))
    assert rest.versions == [1] * (LENGTH - BEFORE)
    tokens = part.tokens + rest.tokens
    expected = full_logprobs(new, PROMPT, tokens)[BEFORE:]
    np.testing.assert_allclose(rest.logprobs, expected, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_wait_lets_running_requests_end_and_keeps_waiting_ones_waiting(dtype: torch.dtype) -> None:
    driver = Driver(tiny_model(dtype=dtype), max_num_seqs=1)
    running, waiting = (driver.add(PROMPT, max_tokens=LENGTH, seed=7) for _ in range(2))
    driver.step()
    driver.pause(PauseMode.WAIT)
    assert not driver.core.paused
    driver.run()
    assert driver.core.paused
    assert driver.responses[running].versions == [0] * LENGTH
    assert driver.responses[waiting].stop_reason is None
    swap(driver, PauseMode.WAIT, tiny_model(seed=1, dtype=dtype))
    driver.run()
    assert driver.responses[waiting].versions == [1] * LENGTH


def test_wait_also_ends_a_request_that_a_recompute_pause_took_out_of_its_slot() -> None:
    driver = Driver(tiny_model(), max_num_seqs=1)
    begun, waiting = (driver.add(PROMPT, max_tokens=LENGTH) for _ in range(2))
    driver.step()
    driver.pause(PauseMode.RECOMPUTE)
    driver.core.resume()
    driver.pause(PauseMode.WAIT)
    driver.run()
    assert driver.core.paused
    assert len(driver.responses[begun].tokens) == LENGTH
    assert driver.responses[waiting].stop_reason is None


@pytest.mark.parametrize("mode", list(PauseMode))
def test_requests_that_arrive_while_paused_wait(mode: PauseMode) -> None:
    driver = Driver(tiny_model())
    driver.pause(mode)
    assert driver.core.paused, "nothing runs, so even wait is at once"
    late = driver.add(PROMPT, max_tokens=4)
    assert not driver.core.runnable
    driver.step(3)
    assert driver.responses[late].tokens == []
    driver.core.resume()
    driver.run()
    assert len(driver.responses[late].tokens) == 4


@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.RECOMPUTE])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_pause_without_new_weights_changes_no_token(mode: PauseMode, batch_invariant: bool) -> None:
    plain, paused = (Driver(tiny_model(), batch_invariant=batch_invariant, max_num_seqs=2) for _ in range(2))
    ids = [
        d.add([3 + i] * (i + 1), max_tokens=12, seed=i, stream_every=int(i == 1))
        for d in (plain, paused)
        for i in range(3)
    ]
    plain.run()
    for _ in range(4):
        paused.step(3)
        paused.pause(mode)
        paused.core.resume()
    paused.run()
    for request_id in ids[:3]:
        got, expected = paused.responses[request_id], plain.responses[request_id]
        assert got.tokens == expected.tokens
        np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=0 if mode == PauseMode.KEEP else TOLERANCE)


def test_an_abort_after_a_freeze_still_returns_the_tokens() -> None:
    driver = Driver(tiny_model())
    request = driver.add(PROMPT, max_tokens=LENGTH)
    driver.step(3)
    driver.pause(PauseMode.RECOMPUTE)
    driver.pause(PauseMode.ABORT)
    assert (driver.responses[request].stop_reason, len(driver.responses[request].tokens)) == ("abort", 4)
    assert driver.core.waiting == 0


def test_tied_weights_stay_tied_and_may_come_under_both_names() -> None:
    model = tiny_model("llama", seed=2)
    driver = Driver(tiny_model("llama"))
    driver.pause(PauseMode.KEEP)
    update = driver._transport.gather(model.named_parameters(remove_duplicate=False), 1)
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= {spec.name for spec in update.tensors}
    driver.core.receive(update)
    driver.core.load(update)
    driver.core.resume()
    assert driver.generate(PROMPT, max_tokens=9, temperature=0).tokens == full_greedy(model, PROMPT, 9)


def renamed(update: WeightUpdate, index: int = 1, **changes: object) -> WeightUpdate:
    specs = list(update.tensors)
    specs[index] = dataclasses.replace(specs[index], **changes)
    return dataclasses.replace(update, tensors=tuple(specs))


BROKEN = {
    "unknown name": (lambda u: renamed(u, name="nobody.weight"), "no weight 'nobody.weight'"),
    "missing": (lambda u: dataclasses.replace(u, tensors=u.tensors[:-1]), "misses 1 weights"),
    "shape": (lambda u: renamed(u, shape=(2, 2)), "shape"),
    "dtype": (lambda u: renamed(u, dtype="bfloat16"), "bfloat16"),
    "no dtype": (lambda u: renamed(u, dtype="save"), "unknown dtype"),
    "outside": (lambda u: renamed(u, offset=u.num_bytes), "outside"),
    "checksum": (lambda u: dataclasses.replace(u, checksum="crc32:00000000"), "checksum"),
    "gone": (lambda u: dataclasses.replace(u, location="/nowhere/weights"), "Cannot open"),
    "too small": (lambda u: dataclasses.replace(u, num_bytes=u.num_bytes * 2), "bytes"),
    "transport": (lambda u: dataclasses.replace(u, transport="pigeon"), "pigeon"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_bad_update_changes_nothing(case: str) -> None:
    spoil, message = BROKEN[case]
    old, new = tiny_model(), tiny_model(seed=1)
    driver = Driver(old)
    request = driver.add(PROMPT, max_tokens=LENGTH, temperature=0)
    driver.step(2)
    before = driver.core.served_checksum()
    driver.pause(PauseMode.KEEP)
    update = spoil(driver.gather(new, 1))
    driver.core.receive(update)
    with pytest.raises(EngineError, match=message):
        driver.core.load(update)
    driver.core.resume()
    driver.run()
    assert driver.core.served_checksum() == before
    assert driver.core.policy_version == 0
    assert driver.responses[request].tokens == full_greedy(old, PROMPT, LENGTH)
    assert driver.responses[request].versions == [0] * LENGTH


def test_tied_weights_that_disagree_are_rejected() -> None:
    model = tiny_model("llama")
    driver = Driver(model)
    driver.pause(PauseMode.KEEP)
    weights = {**dict(model.named_parameters()), "lm_head.weight": torch.zeros_like(model.lm_head.weight)}
    update = driver._transport.gather(weights.items(), 1)
    driver.core.receive(update)
    with pytest.raises(EngineError, match="tied"):
        driver.core.load(update)


def test_weights_are_loaded_only_while_paused_and_after_they_were_received() -> None:
    driver = Driver(tiny_model())
    update = driver.gather(tiny_model(seed=1), 1)
    driver.core.receive(update)
    with pytest.raises(EngineError, match="paused"):
        driver.core.load(update)
    driver.add([3], max_tokens=CONTEXT)
    driver.step()
    driver.pause(PauseMode.WAIT)
    with pytest.raises(EngineError, match="paused"):
        driver.core.load(update)
    driver.pause(PauseMode.KEEP)
    with pytest.raises(EngineError, match="not received"):
        driver.core.load(dataclasses.replace(update, version=2))


@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.RECOMPUTE])
def test_a_sleep_frees_the_cache_and_changes_no_token(mode: PauseMode) -> None:
    undisturbed, slept = Driver(tiny_model()), Driver(tiny_model())
    for driver in (undisturbed, slept):
        driver.add(PROMPT, max_tokens=LENGTH, seed=7)
        driver.add([9] * 11, max_tokens=LENGTH, seed=8)
        driver.step(BEFORE)
    slept.pause(mode)
    slept.core.sleep()
    assert slept.core.running == 0 and all(not layer.stores for layer in slept.core._runner.cache._slot_layers)
    with pytest.raises(EngineError, match="wake_up"):
        slept.core.resume()
    slept.core.wake_up()
    slept.core.resume()
    for driver in (undisturbed, slept):
        driver.run()
    assert [r.tokens for r in slept.responses.values()] == [r.tokens for r in undisturbed.responses.values()]


def test_an_engine_that_runs_does_not_sleep() -> None:
    driver = Driver(tiny_model())
    with pytest.raises(EngineError, match="call pause"):
        driver.core.sleep()


def test_resume_is_answered_before_the_next_step() -> None:
    driver = Driver(tiny_model())
    driver.add(PROMPT, max_tokens=LENGTH)
    driver.pause(PauseMode.KEEP)
    sampled: dict[int, int] = {}  # call -> tokens when it was answered

    batches: list[list[Message]] = [[Call(1, "start", (None,))], [Call(7, "resume")]]

    class Script:
        def receive(self, block: bool) -> list[Message]:
            if not batches:
                raise EOFError
            return batches.pop(0)

        def send(self, messages: list[Message]) -> None:
            sampled.update({m.id: driver.core.generated_tokens for m in messages if isinstance(m, Result)})

    EngineLoop(Script(), lambda settings: driver.core).run()
    assert sampled[7] == 0
    assert driver.core.generated_tokens > 0
