"""Grammars: the masks, the distribution that is sampled under them, and responses that continue where they were."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import json
import random
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_models import QWEN_SPECIAL, THINK, TOOL_CALL, byte_tokenizer
from embedded_models import EOS, TOLERANCE, VOCAB, Driver, empty_copy, full_logprobs, tiny_model
from llguidance import LLExecutor
from transformers import PreTrainedTokenizerBase
from transformers.configuration_utils import PreTrainedConfig

from skyrl_train.config.schema import AlgorithmConfig
from skyrl_train.endpoint.sessions.export import to_sequences
from skyrl_train.endpoint.sessions.session import SessionStatistics
from skyrl_train.endpoint.sessions.turns import TurnTree
from skyrl_train.errors import GeneratorOutputError, GrammarError
from skyrl_train.generators.harness.generator import AgentRun, to_output
from skyrl_train.generators.validation import to_samples
from skyrl_train.inference import grammar, grammar_trial
from skyrl_train.inference.continuation import Continuation
from skyrl_train.inference.engines.embedded import masks
from skyrl_train.inference.grammar import (
    MAX_CHARACTERS,
    GrammarMatcher,
    Grammars,
    Mask,
    advance,
    check_grammar,
    end_token_ids,
    grammar_text,
    schema_text,
)
from skyrl_train.inference.interface import SamplingParams, StopReason, StructuredOutput, TokenChunk
from skyrl_train.inference.requests import Generation
from skyrl_train.models.tiny import character_tokenizer
from skyrl_train.rollout.buffer import decode_group, encode_group
from skyrl_train.rollout.stages.logprobs import tokens_to_score
from skyrl_train.training import head
from skyrl_train.training.backend import TrainingSequence
from skyrl_train.training.batch import collate_padded
from skyrl_train.training.messages import PackedSequences
from skyrl_train.training.minibatch import build_minibatch
from skyrl_train.training.reference import TokensToScore
from skyrl_train.training.scorer import Scorer, ScoringMethod
from skyrl_train.training.sequence_parallel import SequenceRanks
from skyrl_train.types import GrammarSpan, PauseMode, RolloutGroup, TrajectoryID

LETTERS = '{}[]":, abc0123-'  # with four words and three special tokens, as many tokens as the tiny models have
WORDS = ["ab", '":', "abc", "12"]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "bc": {"enum": ["ab", "c"]},
            "c": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["a", "bc", "c"],
        "additionalProperties": False,
    }
)
KINDS = [
    StructuredOutput("json_schema", SCHEMA),
    StructuredOutput("json_object"),
    StructuredOutput("regex", "(ab|c){2,30}1?"),
    StructuredOutput("grammar", 'start: "[" pair ("," pair)* "]"\npair: /[abc]+/ ":" ("1" | start)'),
]


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = character_tokenizer(LETTERS, WORDS)
    assert (len(tokenizer), tokenizer.eos_token_id) == (VOCAB, EOS)
    return tokenizer


def grammars() -> Grammars:
    return Grammars(tiny_tokenizer(), tiny_model().config)


def allowed(matcher: GrammarMatcher) -> set[int]:
    return set(np.unpackbits(matcher.mask, bitorder="little").nonzero()[0].tolist())


# Masks --------------------------------------------------------------------------------------------------------------


def test_the_mask_allows_the_tokens_that_some_text_of_the_language_continues_with() -> None:
    """Against all texts of a small language, one letter per token."""
    pattern = re.compile(r"(ab?|c[ab]|b{2}c*)+0?")
    language = [
        "".join(t) for n in range(1, 7) for t in itertools.product("abc0", repeat=n) if pattern.fullmatch("".join(t))
    ]
    tokenizer = character_tokenizer("abc0")
    made = Grammars(tokenizer, PreTrainedConfig(vocab_size=len(tokenizer)))
    prefixes = {text[:n] for text in language for n in range(5)}
    assert len(prefixes) > 40
    for prefix in prefixes:
        matcher = made.matcher(StructuredOutput("regex", pattern.pattern), tokenizer.convert_tokens_to_ids([*prefix]))
        expected = {text[len(prefix)] for text in language if text.startswith(prefix) and text != prefix}
        ends = {"<eos>"} if prefix in language else set()
        assert {*tokenizer.convert_ids_to_tokens(sorted(allowed(matcher)))} == expected | ends, prefix


@pytest.mark.parametrize("structured", KINDS, ids=lambda structured: structured.kind)
def test_a_matcher_with_a_prefix_allows_what_the_one_that_saw_every_token_allows(structured: StructuredOutput) -> None:
    made, draw = grammars(), random.Random(0)
    for _ in range(20):
        matcher, tokens, masks = made.matcher(structured), list[int](), list[set[int]]()
        while len(tokens) < 30:
            masks.append(allowed(matcher))
            token = draw.choice(sorted(masks[-1]))
            if token == EOS:
                break
            tokens.append(token)
            matcher.consume([token])
            matcher.compute_mask()
        for place in draw.sample(range(len(masks)), min(3, len(masks))):
            assert allowed(made.matcher(structured, tokens[:place])) == masks[place]


def test_marks_are_no_text_and_stop_tokens_end_only_a_complete_text() -> None:
    tokenizer = byte_tokenizer(QWEN_SPECIAL, [*THINK, *TOOL_CALL], "<|im_end|>")
    end, other, call = (tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>", "<tool_call>"))
    made = Grammars(tokenizer, PreTrainedConfig(vocab_size=len(tokenizer) + 3, eos_token_id=[end]))
    letter = tokenizer.convert_tokens_to_ids("a")
    anything = StructuredOutput("regex", "(.|\n)*")
    assert not allowed(made.matcher(anything)) & {other, call}
    # A special stop token ends the text; one that is a letter stays a letter.
    assert allowed(made.matcher(StructuredOutput("regex", "a"), [letter], [other, letter])) == {end, other}
    assert allowed(made.matcher(StructuredOutput("regex", "a"), [], [other, letter])) == {letter}
    assert allowed(made.matcher(StructuredOutput("grammar", f'start: <[{call}]> "a"'))) == {call}
    # A model without rows for the last tokens cannot sample them.
    fewer = Grammars(tokenizer, PreTrainedConfig(vocab_size=call, eos_token_id=[end, call]))
    assert fewer.eos_ids == (end,)
    assert allowed(fewer.matcher(StructuredOutput("regex", "a"), [letter], [call])) == {end}


def test_a_model_whose_tokenizer_names_no_end_needs_one_in_its_config() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    assert end_token_ids(tokenizer, PreTrainedConfig(vocab_size=VOCAB, eos_token_id=EOS)) == (EOS,)
    without = PreTrainedConfig(vocab_size=VOCAB, eos_token_id=None)
    assert end_token_ids(tokenizer, without) == ()
    with pytest.raises(GrammarError, match="names an end token"):
        Grammars(tokenizer, without)


@pytest.mark.parametrize(
    ("structured", "message"),
    [
        (StructuredOutput("json_schema", '{"not": {"type": "string"}}'), r'compiled: Unimplemented keys: \["not"\]'),
        (StructuredOutput("json_schema", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (StructuredOutput("json_schema", '{"type": "nothing"}'), "Invalid type: nothing"),
        (StructuredOutput("json_schema", '{"$ref": "#/nowhere"}'), "nowhere"),
        (StructuredOutput("json_schema", '{"$ref": "http://localhost:1/x"}'), "not present"),
        (StructuredOutput("json_schema", "no JSON"), "compiled: expected ident"),
        (StructuredOutput("regex", "(a"), "unclosed group"),
        (StructuredOutput("regex", "(?=a)b"), "look-around"),
        (StructuredOutput("regex", "xyz"), "vocabulary cannot spell"),
        (StructuredOutput("regex", "a" * (MAX_CHARACTERS + 1)), "131073 characters; at most 131072"),
        (StructuredOutput("regex", "\ud800"), "half of a surrogate pair"),
        (StructuredOutput("grammar", "start: nothing"), 'unknown name: "nothing"'),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_named(structured: StructuredOutput, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as raised:
        grammars().matcher(structured)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 600


async def test_a_trial_ends_what_would_take_hours_to_compile() -> None:
    with pytest.raises(GrammarError, match="Unimplemented keys"):
        await check_grammar(StructuredOutput("json_schema", '{"not": {}}'))
    patterns = [{"type": "string", "pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(20)]
    with pytest.raises(GrammarError, match="more than 1 s"):
        await check_grammar(StructuredOutput("json_schema", json.dumps({"allOf": patterns})))


LOOKS_AROUND = [r"^(?!x)a", r"(?<=a)b", r"(a)\1", r"(?P<n>a)(?P=n)", r"\\(?=a)"]


@pytest.mark.parametrize("pattern", LOOKS_AROUND)
async def test_a_pattern_that_looks_around_is_skipped_unless_the_schema_is_strict(pattern: str) -> None:
    schema = {"properties": {"a": {"type": "string", "pattern": pattern}, "pattern": {"const": {"pattern": pattern}}}}
    await check_grammar(StructuredOutput("json_schema", schema_text(schema, strict=False)))
    kept = json.loads(schema_text(schema, strict=False))["properties"]
    assert kept == {"a": {"type": "string"}, "pattern": schema["properties"]["pattern"]}
    with pytest.raises(GrammarError, match=r"look-around|backreferences|unrecognized"):
        await check_grammar(StructuredOutput("json_schema", schema_text(schema, strict=True)))


@pytest.mark.parametrize("pattern", [r"\(?=a", r"a\\1", "(?:a)"])
def test_a_pattern_that_does_not_look_around_is_kept(pattern: str) -> None:
    assert json.loads(schema_text({"pattern": pattern}, strict=False))["pattern"] == pattern


@pytest.mark.parametrize("strict", [False, True])
async def test_alternatives_with_a_discriminator_are_followed(strict: bool) -> None:
    """As pydantic writes a union of models that a literal field tells apart."""
    models = {
        name: {
            "type": "object",
            "properties": {"kind": {"const": name}, "x": {"type": "integer"}},
            "required": ["kind"],
        }
        for name in "ab"
    }
    union = [{"$ref": f"#/$defs/{name}"} for name in models]
    schema = {"$defs": models, "oneOf": union}
    told_apart = {**schema, "discriminator": {"propertyName": "kind"}}
    await check_grammar(StructuredOutput("json_schema", schema_text(told_apart, strict=strict)))
    if strict:
        with pytest.raises(GrammarError, match="oneOf constraints"):
            await check_grammar(StructuredOutput("json_schema", schema_text(schema, strict=True)))


def test_a_schema_keeps_its_own_options_of_the_library() -> None:
    schema = {"x-guidance": {"whitespace_flexible": False}}
    assert json.loads(schema_text(schema, strict=True)) == schema
    options = json.loads(schema_text(schema, strict=False))["x-guidance"]
    assert options == {"lenient": True, "whitespace_flexible": False}


async def test_an_error_names_the_field_and_quotes_no_grammar() -> None:
    with pytest.raises(GrammarError) as raised:
        await check_grammar(StructuredOutput("regex", "(a"), "structured_outputs")
    assert raised.value.field == "structured_outputs" and "start:" not in str(raised.value)
    assert str(raised.value).startswith("structured_outputs: The grammar cannot be compiled: invalid regex")


async def test_a_trial_ends_what_would_take_seconds_to_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short regular expression, for whose first mask all requests of the engine would wait."""
    with pytest.raises(GrammarError, match=r"too many expressions|more than (1|0\.2) s"):
        await check_grammar(StructuredOutput("regex", "(a{1000}){1001}"))
    text = grammar.grammar_text(StructuredOutput("regex", "a+"))
    assert grammar_trial.problem_of(text) == ""
    monkeypatch.setattr(grammar_trial, "MASK_S", -1)
    assert grammar_trial.problem_of(text).startswith("its first mask takes more than")


async def test_a_trial_reads_the_tokens_of_any_model() -> None:
    await check_grammar(StructuredOutput("grammar", 'start: <[151657]> "a" <[151658]>'))
    with pytest.raises(GrammarError, match="cannot be compiled: it allows no text"):
        await check_grammar(StructuredOutput("json_schema", '{"$ref": "#"}'))


async def test_requests_with_the_same_grammar_share_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    run, commands = subprocess.run, list[list[str]]()

    def counted(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        return run(command, **options)

    monkeypatch.setattr(grammar.subprocess, "run", counted)
    monkeypatch.setattr(grammar, "_trials", {})
    checks = [asyncio.create_task(check_grammar(KINDS[0])) for _ in range(5)]
    await asyncio.sleep(0)  # all have begun
    checks[0].cancel()  # the one that began the trial
    await asyncio.gather(*checks[1:])
    await check_grammar(KINDS[0])
    assert len(commands) == 1


async def test_a_trial_that_cannot_run_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "trial.py").write_text("import no_such_library")
    monkeypatch.setattr(grammar.grammar_trial, "__file__", str(tmp_path / "trial.py"))
    monkeypatch.setattr(grammar, "_trials", {})
    with pytest.raises(GrammarError, match="No module named 'no_such_library'"):
        await check_grammar(KINDS[0])


async def test_a_grammar_that_is_too_long_is_an_error_of_its_field() -> None:
    with pytest.raises(GrammarError, match="response_format: The grammar has 131073 characters") as raised:
        await check_grammar(StructuredOutput("json_schema", " " * (MAX_CHARACTERS + 1)), "response_format")
    assert raised.value.field == "response_format"


def test_a_grammar_beyond_a_limit_says_what_to_do() -> None:
    schema = {"type": "integer", "multipleOf": 999_983, "minimum": 1, "maximum": 10**15}
    with pytest.raises(GrammarError, match=r"cannot be compiled: fuel exhausted.*\. Make the grammar simpler\.$"):
        grammars().matcher(StructuredOutput("json_schema", json.dumps(schema)))


def test_a_token_that_is_not_allowed_is_an_error() -> None:
    with pytest.raises(GrammarError, match="cannot be followed"):
        grammars().matcher(StructuredOutput("regex", "ab"), tiny_tokenizer().convert_tokens_to_ids(["b"]))


@pytest.mark.parametrize("threads", [None, 2])
def test_responses_that_advance_together_have_the_masks_that_they_have_alone(threads: int | None) -> None:
    made, draw, executor = grammars(), random.Random(1), None if threads is None else LLExecutor(threads)
    together = [made.matcher(KINDS[n % len(KINDS)]) for n in range(9)]
    alone, tokens = [made.matcher(KINDS[n % len(KINDS)]) for n in range(9)], [list[int]() for _ in range(9)]
    fails = 4
    for step in range(12):
        sampled = [(n, draw.choice(sorted(allowed(matcher)))) for n, matcher in enumerate(alone)]
        sampled = [(n, token) for n, token in sampled if token != EOS and together[n].error is None]
        if step == 6:
            sampled = [(n, EOS + 1 if n == fails else token) for n, token in sampled]
        arrays = [matcher.mask for matcher in together]
        advance([(together[n], token) for n, token in sampled], executor)
        assert all(matcher.mask is array for matcher, array in zip(together, arrays, strict=True))
        for n, token in sampled:
            if step == 6 and n == fails:
                continue
            tokens[n].append(token)
            alone[n].consume([token])
            alone[n].compute_mask()
            assert together[n].error is None and allowed(together[n]) == allowed(alone[n])
    assert "cannot be followed" in str(together[fails].error)
    assert sum(map(len, tokens)) > 60


def library_masks(made: Grammars, structured: StructuredOutput, tokens: list[int]) -> list[set[int]]:
    """The reference: the library, asked for each mask."""
    matcher, found = made._compile(grammar_text(structured)).deep_copy(), list[set[int]]()
    for token in [*tokens, None]:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        found.append(set(np.unpackbits(bits, bitorder="little").nonzero()[0].tolist()))
        if token is not None:
            assert matcher.consume_token(token)
    return found


FORCED = StructuredOutput("regex", '(abc,abc12:|ab":|\\{"abc":12,){3,9}0?')


@pytest.mark.parametrize("tokenizer_is_stable", [True, False])
@pytest.mark.parametrize("structured", [FORCED, *KINDS], ids=lambda structured: structured.value[:9])
def test_tokens_that_are_forced_together_are_those_that_are_forced_one_by_one(
    structured: StructuredOutput, tokenizer_is_stable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a tokenizer that reads the rest of a text otherwise than the whole; and with drafts that are taken back."""
    tokenize = grammar._TokenizerWrapper._tokenize

    def by_the_first_letter(self: grammar._TokenizerWrapper, text: str) -> list[int]:
        return tokenize(self, text) if text[0] not in ',"' else [self._by_bytes[letter.encode()] for letter in text]

    if not tokenizer_is_stable:
        monkeypatch.setattr(grammar._TokenizerWrapper, "_tokenize", by_the_first_letter)
    made, draw, together = grammars(), random.Random(3), 0
    for _ in range(15):
        matcher, tokens, masks = made.matcher(structured), list[int](), list[set[int]]()
        while len(tokens) < 40:
            masks.append(allowed(matcher))
            token = draw.choice(sorted(masks[-1]))
            assert matcher.count_allowed([token, token]) >= 1 or token == EOS
            if token == EOS:
                assert matcher.ended_by(token)
                break
            assert not matcher.ended_by(EOS) or EOS in masks[-1]
            tokens.append(token)
            matcher.consume([token])
            while draw.random() < 0.2 and len(matcher._forced) > matcher._taken:  # of a draft: no mask in between
                tokens.append(matcher._forced[matcher._taken])
                masks.append({tokens[-1]})
                matcher.consume(tokens[-1:])
            matcher.compute_mask()
            together += len(matcher._forced) > 1
            if draw.random() < 0.1:
                back = draw.randrange(1, len(tokens) + 1)
                matcher.rollback(back)
                matcher.compute_mask()
                del tokens[-back:], masks[len(tokens) :]
        assert masks == library_masks(made, structured, tokens)[: len(masks)]
    assert together > 0 or structured in KINDS[1:]


def test_a_text_that_the_grammar_forces_is_tokenized_once_for_all_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, tokenize = list[str](), grammar._TokenizerWrapper._tokenize

    def counted(self: grammar._TokenizerWrapper, text: str) -> list[int]:
        texts.append(text)
        return tokenize(self, text)

    monkeypatch.setattr(grammar._TokenizerWrapper, "_tokenize", counted)
    made = grammars()
    for _ in range(2):
        matcher, forced = made.matcher(StructuredOutput("regex", "abc,12:(a|b)")), list[int]()
        while len(only := allowed(matcher)) == 1:
            forced += only
            matcher.consume([*only])
            matcher.compute_mask()
        assert tiny_tokenizer().convert_ids_to_tokens(forced) == ["abc", ",", "12", ":"]
    assert len(texts) == len(set(texts)) > 1


# Sampling -----------------------------------------------------------------------------------------------------------


def driver(**options: object) -> Driver:
    return Driver(tiny_model(), tokenizer=tiny_tokenizer, **options)


def masked_logprobs(
    prompt: list[int], tokens: list[int], structured: StructuredOutput, temperature: float
) -> list[float]:
    """The reference: one plain forward pass, and a softmax over the tokens that the grammar allows at each place."""
    made, found = grammars(), []
    with torch.inference_mode():
        logits = (
            tiny_model()(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0].float() / temperature
        )
    for place, token in enumerate(tokens):
        at = sorted(allowed(made.matcher(structured, tokens[:place])))
        found.append(
            (logits[len(prompt) + place - 1, token] - logits[len(prompt) + place - 1, at].logsumexp(-1)).item()
        )
    return found


@pytest.mark.parametrize("structured", KINDS, ids=lambda structured: structured.kind)
@pytest.mark.parametrize("temperature", [0.7, pytest.param(1.0, marks=pytest.mark.slow)])
def test_behaviour_logprobs_are_those_of_the_masked_distribution(
    structured: StructuredOutput, temperature: float
) -> None:
    it, prompt = driver(), [5, 6, 7]
    asked = [
        it.add(prompt, structured=structured, temperature=temperature, seed=seed, max_tokens=40, top_logprobs=2, ignore_eos=False)
        for seed in range(4)
    ]  # fmt: skip
    free = it.add(prompt, seed=1, max_tokens=20)
    it.run()
    for request in asked:
        got = it.responses[request]
        assert got.error is None
        expected = masked_logprobs(prompt, got.tokens, structured, temperature)
        np.testing.assert_allclose(got.logprobs, expected, atol=TOLERANCE)
        text = tiny_tokenizer().decode(got.tokens, skip_special_tokens=True)
        if got.stop_reason is StopReason.STOP and structured.kind.startswith("json"):
            assert isinstance(json.loads(text), dict)
    assert any(it.responses[request].logprobs.count(0.0) for request in asked), "a forced token has probability 1"
    # A request without a grammar beside them is sampled as ever.
    got = it.responses[free]
    np.testing.assert_allclose(got.logprobs, full_logprobs(tiny_model(), prompt, got.tokens), atol=TOLERANCE)


def test_tokens_are_drawn_in_proportion_to_the_masked_distribution() -> None:
    """One token under ``[abc]``, 1,500 seeds: frequencies within five deviations of the softmax over three tokens."""
    it, prompt, structured = driver(max_num_seqs=64), [5, 6, 7], StructuredOutput("regex", "[abc]")
    letters = tiny_tokenizer().convert_tokens_to_ids(["a", "b", "c"])
    drawn = [it.add(prompt, structured=structured, seed=seed * 7919, max_tokens=1) for seed in range(1500)]
    it.run()
    counts = {letter: sum(it.responses[request].tokens == [letter] for request in drawn) for letter in letters}
    assert sum(counts.values()) == 1500
    for letter in letters:
        (logprob,) = masked_logprobs(prompt, [letter], structured, 1.0)
        share = np.exp(logprob)
        assert abs(counts[letter] - 1500 * share) < 5 * np.sqrt(1500 * share * (1 - share)) + 1


def test_a_grammar_that_becomes_too_complex_fails_its_own_response_only(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = driver().generate([5], structured=KINDS[2], seed=1, max_tokens=20)
    it, finish, masks = driver(), GrammarMatcher._finish_mask, list[GrammarMatcher]()
    other = it.add([5], structured=KINDS[2], seed=1, max_tokens=20)

    def fail_at(matcher: GrammarMatcher) -> Mask:
        if matcher is first:
            masks.append(matcher)
            if len(masks) == 4:
                raise GrammarError("too complex")
        return finish(matcher)

    fails = it.add([6], structured=KINDS[2], seed=2, max_tokens=20)
    it.core._waiting.rotate()  # the one that fails takes the first slot
    it.step()
    first = it.core._slots.sequences[0].matcher
    monkeypatch.setattr(GrammarMatcher, "_finish_mask", fail_at)
    it.run()
    assert it.responses[fails].error == "too complex" and it.responses[other].error is None
    assert it.responses[other].tokens == expected.tokens


def test_requests_that_are_sampled_one_by_one_have_their_own_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch-invariant: each request has its forward pass, beside which the mask of the one before is computed."""
    monkeypatch.setattr(masks, "_TOKENS_PER_HAND_OVER", 0)
    asked = [{"structured": kind, "seed": seed, "max_tokens": 25 + seed} for seed, kind in enumerate([*KINDS, None])]
    alone = [driver(batch_invariant=True).generate([5, 6], **each) for each in asked]
    it = driver(batch_invariant=True)
    requests = [it.add([5, 6], **each) for each in asked]
    it.step(4)
    it.pause(PauseMode.RECOMPUTE)  # with masks that are still computed
    it.core.resume()
    it.run()
    for request, expected in zip(requests, alone, strict=True):
        got = it.responses[request]
        assert (got.tokens, got.stop_reason, got.error) == (expected.tokens, expected.stop_reason, None)
        np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=TOLERANCE)


def test_a_failure_of_the_thread_that_computes_masks_is_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    it = driver()
    it.add([5], structured=KINDS[2], max_tokens=20)

    def fail(*_: object) -> None:
        raise MemoryError("no room for masks")

    monkeypatch.setattr(masks, "_TOKENS_PER_HAND_OVER", 0)
    monkeypatch.setattr(masks, "advance", fail)
    with pytest.raises(MemoryError, match="no room for masks"):
        it.step(2)
    it.core.close()  # ends the thread


def test_an_engine_without_a_tokenizer_rejects_a_grammar() -> None:
    it = Driver(tiny_model())
    with pytest.raises(GrammarError, match="no tokenizer"):
        it.add([5], structured=StructuredOutput("json_object"))


# Continuation -------------------------------------------------------------------------------------------------------


@functools.cache
def two_engines() -> list[Driver]:
    return [driver(), driver()]


def sampled(params: SamplingParams, draw: random.Random | None) -> TokenChunk:
    """A response over two engines. ``draw`` interrupts it: by an abort, by a freeze that recomputes, by an engine's death."""
    engines = [*two_engines()]
    it, response = engines[0], Continuation([5, 6, 7], params, grammar_continuation=True)
    while (segment := response.next_segment()) is not None:
        asked = vars_of(segment.sampling_params)
        request = it.add(segment.prompt_token_ids, stream_every=1, **asked)
        event = "none" if draw is None else draw.choice(["abort", "freeze", "death", "none"])
        if event != "none":
            it.step(draw.randrange(6))  # type: ignore[union-attr]
        if event == "abort":
            it.pause(PauseMode.ABORT)
            it.core.resume()
        elif event == "freeze":
            it.pause(PauseMode.RECOMPUTE)
            it.core.resume()
        if event == "death":  # with what it has streamed, and without a word at the end
            engines.reverse()
            got = it.responses[request]
            it.core.abort()
            it = engines[0]
            reason = got.stop_reason if got.stop_reason is not StopReason.ABORT else None
        else:
            it.run()
            got = it.responses[request]
            reason = got.stop_reason
        assert got.error is None
        response.add(TokenChunk(got.tokens, got.logprobs, got.versions, reason), segment.number)
    assert response.restarts == 0
    return TokenChunk(response.token_ids, response.logprobs, response.versions, response.stop_reason)


def vars_of(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in params.__dataclass_fields__}


@pytest.mark.parametrize("schedule", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 300))])
def test_any_interruptions_give_the_uninterrupted_response(schedule: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if schedule % 8 < 4:  # few masks are worth no hand-over to the thread
        monkeypatch.setattr(masks, "_TOKENS_PER_HAND_OVER", 0)
    draw = random.Random(schedule)
    params = SamplingParams(
        max_tokens=draw.randrange(1, 45),
        temperature=draw.choice([0.0, 0.7, 1.0]),
        seed=schedule,
        structured=KINDS[schedule % len(KINDS)],
    )
    got, expected = sampled(params, draw), sampled(params, None)
    assert (got.token_ids, got.stop_reason) == (expected.token_ids, expected.stop_reason)
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=TOLERANCE)


# Training -----------------------------------------------------------------------------------------------------------


def guided_sequences(structured: StructuredOutput) -> tuple[list[TrainingSequence], list[list[float]]]:
    """Three turns of an engine as training sequences, the second without a grammar; and their behaviour log-probs."""
    it, prompt, sequences, behaviour = driver(), [5, 6, 7, 8], [], []
    for seed in range(3):
        asked = {"structured": structured, "ignore_eos": False} if seed != 1 else {}
        got = it.generate(prompt, seed=seed + 1, max_tokens=12, temperature=0.7, **asked)
        span = GrammarSpan(0, len(got.tokens), structured.kind, structured.value)
        tokens = TokensToScore(prompt, got.tokens, [1] * len(got.tokens), (span,) if asked else ())
        sequences.append(tokens.training_sequence())
        behaviour.append(got.logprobs)
    # A token in the middle that is not trained (too old) is a part of the text all the same.
    sequences[0].loss_mask[6] = False
    return sequences, behaviour


@pytest.mark.parametrize("structured", [KINDS[0], KINDS[2]], ids=lambda structured: structured.kind)
@pytest.mark.parametrize("method", [ScoringMethod(True, True), ScoringMethod(False, False)], ids=["chunked", "full"])
def test_the_trainer_recomputes_log_probs_and_gradients_under_the_same_masks(
    structured: StructuredOutput, method: ScoringMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "_BLOCK_COLUMNS", 8)  # three blocks, in some of which a mask forbids everything
    sequences, behaviour = guided_sequences(structured)
    model = empty_copy(tiny_model())
    model.load_state_dict(tiny_model().state_dict())
    scorer = Scorer(model, temperature=0.7, micro_batch_tokens=200, tokenizer=tiny_tokenizer)
    masks = [sequence.loss_mask for sequence in sequences]
    (batch,) = dataclasses.replace(scorer.layout, packed=method.packed).micro_batches(sequences, range(3), masks)
    weights = torch.linspace(-1.0, 2.0, len(batch.targets))
    logprobs, entropies = scorer.logprobs_and_entropies(batch, method, differentiate_entropy=True)
    (weights * (logprobs + 0.1 * entropies)).sum().backward()
    got = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    # The reference: a softmax over the allowed tokens alone, place by place.
    model.zero_grad()
    expected, expected_entropies, sampled_from = [], [], []
    for index in batch.indices:
        sequence, made = sequences[index], grammars()
        ids = sequence.token_ids
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float() / 0.7
        for place in sequence.loss_mask.nonzero().flatten().tolist():
            at = [*range(VOCAB)]
            if sequence.grammars:
                at = sorted(allowed(made.matcher(structured, ids[4:place].tolist())))
            of_allowed = logits[place - 1, at].log_softmax(-1)
            expected.append(of_allowed[at.index(int(ids[place]))])
            expected_entropies.append(-(of_allowed.exp() * of_allowed).sum())
            sampled_from.append(behaviour[index][place - 4])
    (weights * (torch.stack(expected) + 0.1 * torch.stack(expected_entropies))).sum().backward()
    torch.testing.assert_close(logprobs, torch.stack(expected), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(entropies, torch.stack(expected_entropies), atol=TOLERANCE, rtol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, atol=5e-3, rtol=1e-3, msg=lambda text: f"{name}: {text}")  # noqa: B023
    # The importance ratio of the policy that sampled is 1; a forced token has probability 1 under every policy.
    np.testing.assert_allclose(logprobs.detach(), sampled_from, atol=TOLERANCE)
    forced = torch.tensor(sampled_from) == 0.0
    assert forced.any() and not logprobs.detach()[forced].any() and not entropies.detach()[forced].abs().gt(1e-6).any()


def test_a_response_that_does_not_follow_its_grammar_is_rejected_before_the_first_pass() -> None:
    (sequence, _, _), _ = guided_sequences(KINDS[2])
    sequence.token_ids[5] = sequence.token_ids[0]
    scorer = Scorer(tiny_model(), temperature=0.7, micro_batch_tokens=200, tokenizer=tiny_tokenizer)
    with pytest.raises(GeneratorOutputError, match="cannot be followed"):
        scorer.layout.micro_batches([sequence], [0], [sequence.loss_mask])


def test_ranks_that_share_a_row_have_the_masks_of_their_tokens() -> None:
    sequences, _ = guided_sequences(KINDS[2])
    scorer = Scorer(tiny_model(), temperature=0.7, micro_batch_tokens=200, tokenizer=tiny_tokenizer)
    (batch,) = scorer.layout.micro_batches(sequences, range(3), [sequence.loss_mask for sequence in sequences])
    ranks = [SequenceRanks(None, rank, 2, "a setting") for rank in range(2)]  # type: ignore[arg-type]
    parts = [each.slice_of(batch)[0] for each in ranks]
    rows = [part.allowed.rows for part in parts if part.allowed is not None]
    assert batch.allowed is not None and torch.cat(rows).equal(batch.allowed.rows) and batch.allowed.rows.any()
    assert [len(each) for each in rows] == [len(part.targets) for part in parts] and all(map(len, rows))


def test_a_response_whose_guided_tokens_are_all_too_old_needs_no_masks() -> None:
    (sequence, other, _), _ = guided_sequences(KINDS[2])
    masks = [torch.zeros(len(sequence), dtype=torch.bool), other.loss_mask]
    scorer = Scorer(tiny_model(), temperature=0.7, micro_batch_tokens=200, tokenizer=tiny_tokenizer)
    (batch,) = scorer.layout.micro_batches([sequence, other], [0, 1], masks)
    assert batch.allowed is None
    both, alone = scorer.logprobs(batch), scorer.logprobs(collate_padded([other], [0], [other.loss_mask]))
    torch.testing.assert_close(both, alone, atol=TOLERANCE, rtol=0)


def test_spans_of_grammars_reach_the_trainer_through_sessions_and_checkpoints() -> None:
    tree, schema = TurnTree(), KINDS[1]
    first = Generation(
        [5, 6], [7, 8], [-0.1, -0.2], [0, 0], StopReason.STOP, "", grammar=GrammarSpan(0, 2, schema.kind, "")
    )
    tree.add(None, first)
    free = Generation([5, 6, 7, 8, 9], [10], [-0.3], [0], StopReason.STOP, "")
    tree.add(0, free)
    prompt, span = [5, 6, 7, 8, 9, 10, 9], GrammarSpan(0, 3, "regex", "ab", (2,))
    last = Generation(prompt, [3, 4, 1], [0.0, -0.1, -0.1], [1, 1, 1], StopReason.STOP, "", grammar=span)
    tree.add(1, last)
    sequences = to_sequences(tree, 1.0, {})
    run = AgentRun(sequences, SessionStatistics(3, 1, 0, 0, 6, 0, 1, 0, True), 0.0, 0)
    output = to_output([run], [TrajectoryID("a", 0)])
    for wrong, message in (
        ([[], []], "has 2 entries"),
        ([[GrammarSpan(0, 9, "regex", "a")]], "not within the response"),
    ):
        with pytest.raises(GeneratorOutputError, match=f"rollout_grammars.* {message}"):
            to_samples({**output, "rollout_grammars": wrong}, 1)  # type: ignore[typeddict-item]
    (sample,) = to_samples(output, 1)
    (sequence,) = sample.sequences
    assert sequence.response_ids == [7, 8, 9, 10, 9, 3, 4, 1]
    assert sequence.grammars == (GrammarSpan(0, 2, schema.kind, ""), GrammarSpan(5, 8, "regex", "ab", (2,)))
    group = RolloutGroup(0, "u", "", (sample,), 0)
    assert decode_group(encode_group(group)) == group
    trained = build_minibatch([group], 1, AlgorithmConfig()).sequences
    assert [span.start for span in trained[0].grammars] == [2, 7]
    (arrived,) = PackedSequences.of(trained).unpack()
    assert arrived.grammars == trained[0].grammars
    assert tokens_to_score(group)[0].training_sequence().grammars == trained[0].grammars
