"""The engine core: each request in a changing batch gets the tokens that the model alone gives it."""

from __future__ import annotations

import copy
import dataclasses
import gc
import logging
import random
import weakref

import numpy as np
import pytest
import torch
from embedded_models import (
    ADJUSTMENTS,
    ARCHITECTURES,
    CACHED,
    CONTEXT,
    EOS,
    TOLERANCE,
    VOCAB,
    Driver,
    adjusted_logits,
    empty_copy,
    full_greedy,
    full_logprobs,
    tiny_model,
)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from skyrl_train.errors import ModelError, RequestError
from skyrl_train.inference.continuation import Continuation
from skyrl_train.inference.engines.embedded import core as core_module
from skyrl_train.inference.engines.embedded.cache import SlotCache
from skyrl_train.inference.engines.embedded.runner import CachedRunner, RecomputeRunner, make_runner
from skyrl_train.inference.interface import LogitAdjustment, SamplingParams, StopReason, TokenChunk
from skyrl_train.inference.response_text import ResponseText
from skyrl_train.models.tiny import character_tokenizer
from skyrl_train.runtime.seeds import derive_seed, segment_seed
from skyrl_train.types import PauseMode

few_examples = settings(max_examples=10, suppress_health_check=list(HealthCheck))
ALPHABET = "abcdefghijklmnopqrst"  # the texts of the model's tokens, behind three special ones
PROMPT = st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=14)
# (steps before the request joins, prompt, tokens it may have, temperature, seed)
COMPANY = st.lists(
    st.tuples(st.integers(0, 4), PROMPT, st.integers(1, 18), st.sampled_from([0.0, 0.7, 1.0]), st.integers(0, 99)),
    min_size=2,
    max_size=7,
)


@pytest.mark.parametrize(
    "architecture",
    # Llama's layers are Mistral's without a window.
    [pytest.param(name, marks=pytest.mark.slow if name == "llama" else ()) for name in ARCHITECTURES],
)
def test_greedy_tokens_and_logprobs_are_those_of_the_plain_forward_pass(architecture: str) -> None:
    model = tiny_model(architecture)
    driver = Driver(model, max_num_seqs=3)  # fewer slots than requests: they join and leave
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCAB, size=size).tolist() for size in (1, 9, 4, 17, 2)]
    lengths = [12, 3, 20, 8, 15]
    ids = [driver.add(p, max_tokens=n, temperature=0) for p, n in zip(prompts, lengths, strict=True)]
    driver.run()
    for request_id, prompt, length in zip(ids, prompts, lengths, strict=True):
        response = driver.responses[request_id]
        assert response.tokens == full_greedy(model, prompt, length)
        np.testing.assert_allclose(response.logprobs, full_logprobs(model, prompt, response.tokens), atol=TOLERANCE)
        assert response.stop_reason == "length"


@few_examples
@given(COMPANY)
def test_sampled_logprobs_match_the_plain_forward_pass_while_others_join_and_leave(company: list[tuple]) -> None:
    model, driver = tiny_model(), Driver(tiny_model(), max_num_seqs=3)
    prompts = {}
    for steps, prompt, length, temperature, seed in company:
        driver.step(steps)
        prompts[driver.add(prompt, max_tokens=length, temperature=bool(temperature), seed=seed)] = prompt
    driver.run()
    for request_id, prompt in prompts.items():
        response = driver.responses[request_id]
        np.testing.assert_allclose(response.logprobs, full_logprobs(model, prompt, response.tokens), atol=TOLERANCE)


@settings(few_examples, max_examples=5)
@given(COMPANY)
def test_batch_invariant_a_request_is_bit_for_bit_the_same_in_any_company(company: list[tuple]) -> None:
    alone, together = Driver(tiny_model(), batch_invariant=True), Driver(tiny_model(), batch_invariant=True)
    ids = []
    for steps, prompt, length, temperature, seed in company:
        together.step(steps)
        ids.append(together.add(prompt, max_tokens=length, temperature=temperature, seed=seed))
    together.run()
    for request_id, (_, prompt, length, temperature, seed) in zip(ids, company, strict=True):
        assert together.responses[request_id] == alone.generate(
            prompt, max_tokens=length, temperature=temperature, seed=seed
        )


@pytest.mark.parametrize("architecture", CACHED)
def test_attention_models_use_the_cache(architecture: str) -> None:
    assert isinstance(make_runner(tiny_model(architecture), 2, CONTEXT), CachedRunner)


def test_a_recurrent_model_falls_back_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert isinstance(make_runner(tiny_model("mamba"), 2, CONTEXT), RecomputeRunner)
    (record,) = caplog.records
    assert "without a KV cache" in record.message
    assert "LinearAttentionLayer" in record.message


def test_a_cache_that_disagrees_with_the_model_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_window(model: object) -> dict[str, None]:
        return {"sliding_attention": None}

    monkeypatch.setattr("skyrl_train.inference.engines.embedded.runner._attention_windows", no_window)
    assert isinstance(make_runner(tiny_model("mistral"), 2, CONTEXT), RecomputeRunner)


@pytest.mark.parametrize("architecture", CACHED)
def test_captured_passes_compute_the_same_bits_as_the_models_code(architecture: str) -> None:
    model = empty_copy(tiny_model(architecture))
    captured, plain = make_runner(model, 5, CONTEXT), CachedRunner(model, 5, CONTEXT)
    assert isinstance(captured, CachedRunner)
    assert set(captured.graphs) == {True, False}, "prefill and decode"
    model.load_state_dict(tiny_model(architecture).state_dict())  # weights that came after the capture
    rng = np.random.default_rng(0)
    tokens, lengths = rng.integers(0, VOCAB, size=(5, CONTEXT)), np.array([1, 9, 30, 4, 33])
    with torch.inference_mode():
        for first, last in ((0, 1), (1, 3), (3, 5)):  # one row, several, and slots that are not the first
            results = [run.prefill(tokens[first:last], lengths[first:last], first) for run in (captured, plain)]
            assert torch.equal(*results)
        for _ in range(4):  # over the end of a bucket of the cache
            lengths = lengths + 1
            for first, last in ((0, 5), (2, 3)):
                results = [run.decode(tokens[first:last], lengths[first:last], first) for run in (captured, plain)]
                assert torch.equal(*results)


def test_engines_of_one_architecture_share_its_graphs_which_keep_no_model() -> None:
    model = empty_copy(tiny_model("qwen3"))
    first = make_runner(model, 2, CONTEXT)
    graphs, gone = first.graphs, weakref.ref(model)
    del model, first
    gc.collect()
    assert gone() is None
    assert make_runner(tiny_model("qwen3"), 3, CONTEXT).graphs is graphs
    assert make_runner(tiny_model("llama"), 2, CONTEXT).graphs is not graphs
    assert make_runner(tiny_model("qwen3", dtype=torch.bfloat16), 2, CONTEXT).graphs is not graphs


def test_a_model_whose_code_branches_on_values_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    config = copy.deepcopy(tiny_model("llama").config)
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}  # by the largest position
    with caplog.at_level(logging.INFO):
        runner = make_runner(AutoModelForCausalLM.from_config(config).eval(), 2, CONTEXT)
    assert isinstance(runner, CachedRunner)
    assert not runner.graphs
    assert "branches on values in" in caplog.text


def test_a_seed_reproduces_in_any_company_and_different_seeds_differ() -> None:
    first, second = Driver(tiny_model()), Driver(tiny_model(), seed=5)
    second.add([4, 4, 4], max_tokens=9, seed=1)
    a, b = (d.generate([3, 5], max_tokens=30, seed=11) for d in (first, second))
    assert a.tokens == b.tokens
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=TOLERANCE)
    assert first.generate([3, 5], max_tokens=30, seed=12_000).tokens != a.tokens


def test_requests_without_a_seed_draw_from_the_engines_own_stream() -> None:
    one, same, other = (Driver(tiny_model(), seed=seed) for seed in (0, 0, 1))
    first, second = (one.generate([3], max_tokens=20).tokens for _ in range(2))
    assert first != second
    assert [same.generate([3], max_tokens=20).tokens for _ in range(2)] == [first, second]
    assert other.generate([3], max_tokens=20).tokens != first


@pytest.mark.parametrize("sampled", [1, 7])
def test_a_continued_request_draws_the_same_as_an_uninterrupted_one(sampled: int) -> None:
    driver = Driver(tiny_model())
    whole = driver.generate([3, 5, 8], max_tokens=20, seed=77).tokens
    rest = driver.generate([3, 5, 8, *whole[:sampled]], max_tokens=20 - sampled, seed=segment_seed(77, sampled)).tokens
    assert whole[:sampled] + rest == whole


@settings(few_examples, max_examples=4)
@given(
    ADJUSTMENTS,
    st.sampled_from([0.0, 0.8]),
    st.sets(st.integers(0, 15), max_size=4),
)
@example(LogitAdjustment(presence_penalty=2.0), 0.0, {6, 11})
@example(LogitAdjustment(frequency_penalty=-2.0), 0.8, {7})
def test_penalties_and_biases_go_on_over_interruptions_of_any_kind(
    adjustment: LogitAdjustment, temperature: float, cuts: set[int]
) -> None:
    prompt, driver, params = [3, 5, 5, 8], Driver(tiny_model()), {"temperature": temperature, "adjustment": adjustment}
    whole = driver.generate(prompt, max_tokens=16, seed=segment_seed(derive_seed(77, 0), 0), **params)
    response = Continuation(prompt, SamplingParams(max_tokens=16, seed=77, **params), count_continuation=True)
    for end in [*sorted(cuts), 16]:
        segment = response.next_segment()
        if segment is None:  # the step that admits a request samples two tokens
            break
        asked = {f.name: getattr(segment.sampling_params, f.name) for f in dataclasses.fields(SamplingParams)}
        request_id = driver.add(segment.prompt_token_ids, **{**asked, "ignore_eos": True})
        driver.add([4, 4, 4], max_tokens=5)  # leaves its slot meanwhile, so that the other moves
        driver.step(end - len(response.token_ids))
        driver.pause(PauseMode.RECOMPUTE if end % 2 else PauseMode.KEEP)  # frozen first, and then aborted
        driver.collect(driver.core.abort())
        driver.core.resume()
        part = driver.responses[request_id]
        response.add(
            TokenChunk(part.tokens, part.logprobs, part.versions, StopReason(part.stop_reason)), segment.number
        )
    assert response.token_ids == whole.tokens
    np.testing.assert_allclose(response.logprobs, whole.logprobs, atol=TOLERANCE)
    # And they are of the distribution of the formulas.
    with torch.inference_mode():
        logits = tiny_model()(input_ids=torch.tensor([prompt + whole.tokens]), use_cache=False).logits[0].float()
    for place, (token, logprob) in enumerate(zip(whole.tokens, whole.logprobs, strict=True)):
        z = adjusted_logits(logits[len(prompt) + place - 1].tolist(), adjustment, prompt, whole.tokens[:place])
        expected = (torch.tensor(z) / (temperature or 1)).log_softmax(-1)[token].item()
        assert logprob == pytest.approx(expected, abs=TOLERANCE)


def test_a_bias_of_a_token_that_the_model_lacks_is_rejected() -> None:
    with pytest.raises(RequestError, match="logit_bias has token ids outside"):
        Driver(tiny_model()).add([3], adjustment=LogitAdjustment(logit_bias=((10_000, 1.0),)))


def test_the_first_token_has_the_frequencies_of_the_model() -> None:
    model, driver = tiny_model(), Driver(tiny_model(), max_num_seqs=512)
    ids = [driver.add([6, 2], max_tokens=1, seed=seed * 1_000_003) for seed in range(2048)]
    driver.run()
    counts = np.bincount([driver.responses[i].tokens[0] for i in ids], minlength=VOCAB)
    expected = np.exp([full_logprobs(model, [6, 2], [token])[0] for token in range(VOCAB)])
    assert np.abs(counts / 2048 - expected).max() < 4 * np.sqrt(0.25 / 2048)


def test_a_response_ends_with_eos_or_a_stop_token_which_is_part_of_it() -> None:
    driver = Driver(tiny_model())
    tokens = driver.generate([3, 5], max_tokens=40, seed=3).tokens
    stop = tokens[6]
    end = tokens.index(stop) + 1
    stopped = driver.generate([3, 5], max_tokens=40, seed=3, stop_token_ids=(stop, 999))
    assert (stopped.tokens, stopped.stop_reason) == (tokens[:end], "stop")
    by_eos = Driver(tiny_model(), eos_ids=(stop,))
    assert by_eos.generate([3, 5], max_tokens=40, seed=3, ignore_eos=False).tokens == tokens[:end]
    assert by_eos.generate([3, 5], max_tokens=40, seed=3).tokens == tokens


@pytest.mark.parametrize("streamed", [pytest.param(0, marks=pytest.mark.slow), 5])
def test_stop_strings_end_requests_at_their_token_whatever_happens_to_their_neighbours(streamed: int) -> None:
    tokenizer = character_tokenizer(ALPHABET)
    model, chance = tiny_model(), random.Random(0)
    driver, expected = Driver(model, tokenizer=lambda: tokenizer), {}
    for seed in range(24):  # more than there are slots, so that rows move
        prompt, least = [3 + seed % 7, 5], chance.choice([0, 0, 12])
        params = {"max_tokens": 30, "min_tokens": least, "seed": seed}
        plain = Driver(model).generate(prompt, **params).tokens
        stop = tuple(chance.choices(["".join(chance.choices(ALPHABET, k=2)), chance.choice(ALPHABET)], k=2))
        text = ResponseText(tokenizer, stop)
        ends = (count for count, token in enumerate(plain, 1) if text.feed(token, may_stop=count > least))
        end = next(ends, None)
        request_id = driver.add(prompt, streamed, stop=stop, **params)
        expected[request_id] = (plain[:end], "length" if end is None else "abort")
    assert len({reason for _, reason in expected.values()}) == 2
    while driver.core.runnable:
        driver.step(3)
        driver.pause(chance.choice([PauseMode.KEEP, PauseMode.RECOMPUTE]))
        driver.core.resume()
    found = {request_id: (response.tokens, response.stop_reason) for request_id, response in driver.responses.items()}
    assert found == expected


def test_an_engine_without_a_tokenizer_samples_on_behind_stop_strings(caplog: pytest.LogCaptureFixture) -> None:
    def missing() -> PreTrainedTokenizerBase:
        raise ModelError("no tokenizer here")

    for tokenizer in (None, missing):
        driver = Driver(tiny_model(), tokenizer=tokenizer)
        driver.core.load_tokenizer(grammars=False)
        response = driver.generate([3, 5], max_tokens=20, stop=tuple(ALPHABET))
        assert (len(response.tokens), response.stop_reason) == (20, "length")
    assert "samples on behind stop strings" in caplog.text and "no tokenizer here" in caplog.text


def test_min_tokens_takes_the_stop_tokens_out_of_the_distribution_until_it_is_reached() -> None:
    model = tiny_model()
    greedy = full_greedy(model, [3, 5], 1)[0]
    response = Driver(model).generate([3, 5], max_tokens=9, min_tokens=4, stop_token_ids=(greedy, EOS), seed=1)
    assert len(response.tokens) >= 4
    assert not {greedy, EOS} & set(response.tokens[:4])
    logits = full_logprobs(model, [3, 5], [response.tokens[0]])[0]
    allowed = 1 - np.exp([full_logprobs(model, [3, 5], [token])[0] for token in (greedy, EOS)]).sum()
    assert response.logprobs[0] == pytest.approx(logits - np.log(allowed), abs=TOLERANCE)


def test_the_context_ends_a_response_with_length() -> None:
    response = Driver(tiny_model(), max_model_len=10).generate([3] * 6, max_tokens=50)
    assert (len(response.tokens), response.stop_reason) == (4, "length")


@pytest.mark.parametrize(
    ("prompt", "word"), [([], "empty"), ([3] * CONTEXT, "max_model_len"), ([VOCAB], "vocabulary"), ([-1], "vocabulary")]
)
def test_a_bad_prompt_is_rejected_and_fails_no_other_request(prompt: list[int], word: str) -> None:
    driver = Driver(tiny_model())
    good = driver.add([3], max_tokens=5)
    with pytest.raises(RequestError, match=word):
        driver.add(prompt)
    driver.run()
    assert len(driver.responses[good].tokens) == 5


def test_before_the_first_weight_sync_requests_are_rejected() -> None:
    driver = Driver(tiny_model(), publish=False)
    assert driver.core.policy_version == -1
    with pytest.raises(RequestError, match="no weights yet"):
        driver.add([3])


@pytest.mark.parametrize(("stream_every", "chunks"), [(0, 1), (1, 8), (3, 3), (8, 1)])
def test_a_stream_has_chunks_of_the_size_asked_for_and_the_same_tokens(stream_every: int, chunks: int) -> None:
    driver = Driver(tiny_model())
    stream = driver.add([3, 5], stream_every=stream_every, max_tokens=8, seed=2, top_logprobs=2)
    whole = driver.add([3, 5], max_tokens=8, seed=2, top_logprobs=2)
    driver.run()
    got, expected = driver.responses[stream], driver.responses[whole]
    assert (got.tokens, got.stop_reason) == (expected.tokens, "length")
    assert [len(top) for top in got.top_logprobs] == [2] * 8
    np.testing.assert_allclose(got.top_logprobs, expected.top_logprobs, atol=TOLERANCE)
    assert (got.chunks, expected.chunks) == (chunks, 1)


def test_an_abort_returns_the_partial_tokens_and_frees_the_slot() -> None:
    driver = Driver(tiny_model(), max_num_seqs=2)
    running, other, waiting = (driver.add([3], max_tokens=30, seed=seed) for seed in (0, 1, 2))
    driver.step(4)
    driver.collect(driver.core.abort((running, 12345)))
    assert (driver.responses[running].stop_reason, len(driver.responses[running].tokens)) == ("abort", 5)
    assert (driver.core.running, driver.core.waiting) == (1, 1)
    driver.step()
    assert (driver.core.running, driver.core.waiting) == (2, 0)
    driver.run()
    expected = [Driver(tiny_model()).generate([3], max_tokens=30, seed=seed).tokens for seed in (1, 2)]
    assert [driver.responses[i].tokens for i in (other, waiting)] == expected


def test_aborting_all_leaves_nothing() -> None:
    driver = Driver(tiny_model(), max_num_seqs=2)
    ids = [driver.add([3], max_tokens=30) for _ in range(5)]
    driver.step(2)
    driver.collect(driver.core.abort())
    assert (driver.core.running, driver.core.waiting, driver.core.runnable) == (0, 0, False)
    assert {driver.responses[i].stop_reason for i in ids} == {"abort"}


def test_a_flood_of_prompts_is_admitted_in_bounded_prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "PREFILL_TOKENS", 20)
    driver = Driver(tiny_model(), max_num_seqs=8)
    for _ in range(6):
        driver.add([3] * 8, max_tokens=30)
    admitted = []
    for _ in range(4):
        driver.step()
        admitted.append(driver.core.running)
    assert admitted == [2, 4, 6, 6]


def test_logits_that_are_no_numbers_fail_their_requests_and_leave_no_trace_in_the_cache() -> None:
    model = tiny_model()
    broken = type(model)(model.config)
    broken.load_state_dict(model.state_dict())
    broken.model.embed_tokens.weight.data[5] = torch.nan
    driver = Driver(model)
    driver.pause(PauseMode.KEEP)
    driver.load(broken, 1)
    driver.core.resume()
    bad, fine = driver.add([5, 5, 5, 5], max_tokens=5), driver.add([3, 4], max_tokens=1, seed=0)
    driver.run()
    assert "not numbers" in driver.responses[bad].error
    assert driver.responses[fine].stop_reason == "length"
    driver.pause(PauseMode.KEEP)
    driver.load(model, 2)
    driver.core.resume()
    response = driver.generate([3], max_tokens=6, temperature=0)
    assert response.tokens == full_greedy(model, [3], 6)


def test_the_cache_grows_with_its_longest_request_and_is_cut_only_when_empty() -> None:
    cache = SlotCache(num_layers=1, num_slots=2)
    keys = torch.randn(2, 3, 5, 4)
    cache.reserve(5, empty=True)
    cache.window.move(0, 2, 5, None)
    cache.update(keys, -keys, layer_idx=0)
    capacities = [cache.capacity]
    for length, empty in [(33, False), (40, True), (400, False), (6, False), (101, True), (6, True)]:
        cache.reserve(length, empty)
        capacities.append(cache.capacity)
    assert capacities == [32, 64, 64, 416, 416, 416, 32]
    cache.window.move(0, 2, 32, torch.tensor([5, 2]))
    new = torch.randn(2, 3, 1, 4)
    got, _ = cache.update(new, new, layer_idx=0)
    assert torch.equal(got[0, :, :6], torch.cat([keys[0], new[0]], 1))
    assert torch.equal(got[1, :, :5], torch.cat([keys[1, :, :2], new[1], keys[1, :, 3:]], 1))


def test_long_and_short_requests_share_a_batch_while_the_cache_grows() -> None:
    model, driver = tiny_model(), Driver(tiny_model(), max_num_seqs=3)
    prompts = [[7] * 30, [3], [9, 4]]
    ids = [driver.add(prompt, max_tokens=n, temperature=0) for prompt, n in zip(prompts, (30, 50, 2), strict=True)]
    driver.run()
    for request_id, prompt, length in zip(ids, prompts, (30, 50, 2), strict=True):
        assert driver.responses[request_id].tokens == full_greedy(model, prompt, length)
