"""Requests that outlive weight updates, with real vLLM: they give the result of an uninterrupted request."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from vllm_engines import ALPHABET, CONTEXT, TOLERANCE, Served, full_logprobs, greedy_after, request, tiny_model
from vllm_engines import token_logprobs as reference

from skyrl_train.config.schema import TrainerConfig
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.continuation import Continuation
from skyrl_train.inference.engines.vllm.requests import EngineRequest, RequestTracker
from skyrl_train.inference.grammar import Grammars
from skyrl_train.inference.interface import (
    InferenceEngineOutput,
    SamplingParams,
    StopReason,
    StructuredOutput,
    TokenChunk,
)
from skyrl_train.inference.requests import GenerationRequest
from skyrl_train.models.tiny import character_tokenizer
from skyrl_train.training.backend import TrainingSequence
from skyrl_train.training.local_backend import LocalBackend
from skyrl_train.types import GrammarSpan, PauseMode

pytestmark = pytest.mark.asyncio(loop_scope="session")


def client_of(*engines: Served) -> InferenceEngineClient:
    """A client of engines that run already."""
    return InferenceEngineClient([one.engine for one in engines], character_tokenizer(ALPHABET), engines[0].folder)


def random_requests(chance: random.Random) -> list[tuple[list[int], int]]:
    """Prompts and numbers of tokens, some of them many."""
    return [
        ([chance.randrange(3, 40) for _ in range(chance.choice([1, 5, 30, 140]))], chance.choice([1, 7, 60, 150]))
        for _ in range(10)
    ]


async def interrupted(
    client: InferenceEngineClient, served: Served, modes: list[PauseMode], chance: random.Random, calls: asyncio.Future
) -> int:
    """Publishes the same weights again and again, at random moments, until ``calls`` are done; returns how often."""
    updates = 0
    while not calls.done():
        update = await served.gather(tiny_model(0))
        await asyncio.wait([calls], timeout=chance.random() * 0.05)
        await client.load_weights(update, chance.choice(modes))
        updates += 1
    return updates


@pytest.mark.parametrize(
    ("modes", "seed"),
    [
        pytest.param([PauseMode.ABORT], 0, id="abort"),
        pytest.param([PauseMode.ABORT], 1, id="abort again", marks=pytest.mark.slow),
        pytest.param([PauseMode.KEEP], 0, id="keep", marks=pytest.mark.slow),
        pytest.param([PauseMode.KEEP], 1, id="keep again", marks=pytest.mark.slow),
        pytest.param(list(PauseMode), 0, id="all"),
        pytest.param(list(PauseMode), 1, id="all again", marks=pytest.mark.slow),
    ],
)
async def test_any_schedule_of_interruptions_gives_the_uninterrupted_outcome(
    vllm: Served, modes: list[PauseMode], seed: int
) -> None:
    chance = random.Random(seed)
    client, asked = client_of(vllm), random_requests(chance)
    calls = asyncio.gather(*(client.generate(request(prompt, max_tokens=length)) for prompt, length in asked))
    updates = await interrupted(client, vllm, modes, chance, calls)
    outputs = await calls
    versions = [set(output["response_versions"][0]) for output in outputs]
    assert updates > 1 and max(map(len, versions)) > 1, "nothing was interrupted, so this shows nothing"
    for (prompt, length), output in zip(asked, outputs, strict=True):
        check(output, prompt, length)


def check(output: InferenceEngineOutput, prompt: list[int], length: int) -> None:
    """Against the uninterrupted outcome, which the plain model gives as well."""
    tokens, logprobs = output["response_ids"][0], output["response_logprobs"][0]
    assert len(tokens) == length
    assert tokens == greedy_after(tiny_model(0), prompt, tokens)
    assert output["stop_reasons"] == ["length"]
    assert logprobs == pytest.approx(reference(tiny_model(0), prompt, tokens), abs=TOLERANCE)
    assert output["response_versions"][0] == sorted(output["response_versions"][0])


GRAMMARS = [
    StructuredOutput("regex", "(([a-c]{3}|7)x){9,30}"),
    StructuredOutput("regex", "[a-f0-9]{20,90}[.]"),
    StructuredOutput("grammar", 'start: "[" pair ("," pair)* "]"\npair: /[abc]+/ ":" ("1" | start)'),
    StructuredOutput(
        "json_schema",
        '{"type": "array", "minItems": 4, "items": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}, '
        '"n": {"type": "integer"}}, "required": ["a", "n"], "additionalProperties": false}, "x-guidance": '
        '{"whitespace_flexible": false}}',
    ),
]
SCHEDULES = 12  # of one round: each response begins at another place, and meets other interruptions


async def interrupted_under_grammars(vllm: Served, client: InferenceEngineClient, chance: random.Random) -> bool:
    """Compares responses with the uninterrupted ones; returns whether an update has interrupted any of them."""
    asked = [
        GenerationRequest(
            [chance.randrange(3, 40) for _ in range(chance.choice([1, 5, 30, 140]))],
            SamplingParams(
                max_tokens=chance.randrange(10, 130), temperature=0.0, structured=GRAMMARS[n % len(GRAMMARS)]
            ),
        )
        for n in range(SCHEDULES)
    ]
    modes = chance.choice([[PauseMode.ABORT], [mode for mode in PauseMode if mode is not PauseMode.WAIT]])
    calls = asyncio.gather(*map(client.complete, asked))
    while not calls.done():
        update = await vllm.gather(tiny_model(0))
        # Some tokens between two updates, however slow the machine is: each abort begins the prompts again.
        progress = asyncio.create_task(vllm.sampled(chance.randrange(1, 100)))
        await asyncio.wait([calls, progress], return_when=asyncio.FIRST_COMPLETED)
        progress.cancel()
        await client.load_weights(update, chance.choice(modes))
    responses = await calls
    grammars = Grammars(character_tokenizer(ALPHABET), tiny_model(0).config)
    for each, got in zip(asked, responses, strict=True):
        assert got.restarts == 0 and each.params.structured is not None
        logits = full_logprobs(tiny_model(0), each.prompt_token_ids, got.token_ids)
        expected = []
        for row, mask in zip(logits, grammars.replay(each.params.structured, got.token_ids), strict=True):
            allowed = torch.from_numpy(np.unpackbits(mask, bitorder="little")[: len(row)]).bool()
            best = row.masked_fill(~allowed, -torch.inf).log_softmax(-1).max(-1)
            expected.append((int(best.indices), float(best.values)))
        assert got.token_ids == [token for token, _ in expected], "the most likely token of those that are allowed"
        assert got.logprobs == pytest.approx([logprob for _, logprob in expected], abs=TOLERANCE)
        ended = got.token_ids[-1] == 1
        assert got.stop_reason is (StopReason.STOP if ended else StopReason.LENGTH)
        assert ended or len(got.token_ids) == each.params.max_tokens
    return max(len(set(got.versions)) for got in responses) > 1


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 25))])
async def test_any_schedule_of_interruptions_gives_the_uninterrupted_response_under_a_grammar(
    vllm: Served, seed: int
) -> None:
    chance, client = random.Random(seed), client_of(vllm)
    # On a busy machine all responses may end before the first update, which shows nothing: then others are asked for.
    while not await interrupted_under_grammars(vllm, client, chance):
        pass


async def test_engine_and_trainer_agree_over_a_conversation_interrupted_twice(vllm: Served) -> None:
    """Three turns; in the second and third, other weights arrive in the middle. Each token is scored by its version's."""
    client, seeds = client_of(vllm), {vllm.version: 0}
    backends = {seed: LocalBackend(vllm.folder, TrainerConfig(), 1, 0.9, 0) for seed in range(3)}
    for seed, backend in backends.items():
        for (_, mine), (_, theirs) in zip(backend.named_weights(), tiny_model(seed).named_parameters(), strict=True):
            mine.data.copy_(theirs.data)
    conversation, sampled = [7, 8, 9], []
    for turn in range(3):
        params = {"max_tokens": 50, "temperature": 0.9, "seed": turn}
        if turn:
            update = await vllm.gather(tiny_model(turn))
            seeds[vllm.version] = turn
        call = asyncio.create_task(client.generate(request(conversation, **params)))
        if turn:
            await vllm.sampled(5)
            await client.load_weights(update, PauseMode.ABORT if turn == 1 else PauseMode.RECOMPUTE)
        output = await call
        first = len(conversation)
        conversation = [*conversation, *output["response_ids"][0], 20 + turn, 30 + turn]
        spans = zip(output["response_logprobs"][0], output["response_versions"][0], strict=True)
        sampled += [(first + index, logprob, version) for index, (logprob, version) in enumerate(spans)]
    assert len({version for _, _, version in sampled}) == 3
    scores = {seed: score(backend, conversation) for seed, backend in backends.items()}
    for position, logprob, version in sampled:
        # The engine sampled at temperature 0.9, the trainer scores at it.
        assert logprob == pytest.approx(scores[seeds[version]][position].item(), abs=TOLERANCE)


async def test_engine_and_trainer_agree_over_a_response_with_a_grammar_that_is_interrupted(vllm: Served) -> None:
    client, words = client_of(vllm), StructuredOutput("regex", "(([a-c]{3}|7)x){100}")
    update = await vllm.gather(tiny_model(1))
    params = SamplingParams(max_tokens=480, temperature=0.9, seed=1, structured=words)
    call = asyncio.create_task(client.complete(GenerationRequest([7, 8, 9], params)))
    await vllm.sampled(5)
    await client.load_weights(update, PauseMode.ABORT)
    got = await call
    assert (got.segments, got.restarts, len(set(got.versions)), got.stop_reason) == (2, 0, 2, StopReason.STOP)
    assert re.fullmatch(words.value, got.text) and got.grammar is not None
    tokens = [*got.prompt_token_ids, *got.token_ids]
    for seed, version in zip((0, 1), sorted(set(got.versions)), strict=True):
        backend = LocalBackend(vllm.folder, TrainerConfig(), 1, 0.9, 0)
        for (_, mine), (_, theirs) in zip(backend.named_weights(), tiny_model(seed).named_parameters(), strict=True):
            mine.data.copy_(theirs.data)
        scores = score(backend, tokens, (got.grammar.moved(3),))[3:].tolist()
        sampled = zip(scores, got.logprobs, got.versions, strict=True)
        pairs = [(score, logprob) for score, logprob, of in sampled if of == version]
        assert [logprob for _, logprob in pairs] == pytest.approx([score for score, _ in pairs], abs=TOLERANCE)
    await vllm.sync_weights(0)


def score(backend: LocalBackend, tokens: list[int], grammars: tuple[GrammarSpan, ...] = ()) -> torch.Tensor:
    """The trainer's log-prob of each token, [T]."""
    zeros = torch.zeros(len(tokens))
    sequence = TrainingSequence(
        token_ids=torch.tensor(tokens),
        loss_mask=torch.arange(len(tokens)) > 0,
        advantages=zeros,
        behaviour_logprobs=zeros,
        versions=torch.zeros(len(tokens), dtype=torch.int64),
        group_index=0,
        grammars=grammars,
    )
    assert len(tokens) < CONTEXT
    return backend.forward_logprobs([sequence])[0]


async def test_stop_strings_end_a_response_in_vllm_so_its_tokens_come_in_large_pieces(
    vllm: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    await vllm.sync_weights()
    client, tokenizer = client_of(vllm), character_tokenizer(ALPHABET)
    plain = (await client.generate(request(max_tokens=200)))["response_ids"][0]
    visible = [index for index, token in enumerate(plain) if token > 2]  # special tokens have no text
    text = tokenizer.decode([plain[index] for index in visible])
    # Two characters that occur late and nowhere before.
    place = next(index for index in range(30, len(text) - 1) if text.find(text[index : index + 2]) == index)
    length, pieces = visible[place + 1] + 1, list[int]()
    monkeypatch.setattr(Continuation, "add", counted(Continuation.add, pieces))
    before = (await vllm.engine.health()).generated_tokens
    output = await client.generate(request(max_tokens=200, stop=[text[place : place + 2]]))
    assert output["response_ids"] == [plain[:length]] and output["stop_reasons"] == ["stop"]
    assert output["responses"] == [text[:place]]
    assert (await vllm.engine.health()).generated_tokens - before == length, "vLLM sampled nothing behind it"
    if vllm.engine.capabilities.chunked_streaming:
        assert sum(pieces) == length and len(pieces) <= 4


async def test_a_response_continues_where_only_vllm_has_found_a_stop_string(
    vllm: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    await vllm.sync_weights()
    plain = await client_of(vllm).generate(request(max_tokens=40))
    # vLLM ends the response at a string that the client does not look for: one of its first characters.
    first = next(token for token in plain["response_ids"][0] if token > 2)
    stop = character_tokenizer(ALPHABET).decode([first])
    run = RequestTracker.chunks

    def with_stop(tracker: RequestTracker, asked: EngineRequest) -> object:
        return run(tracker, dataclasses.replace(asked, params=dataclasses.replace(asked.params, stop=(stop,))))

    monkeypatch.setattr(RequestTracker, "chunks", with_stop)
    output = await client_of(vllm).generate(request(max_tokens=40))
    assert output["response_ids"] == plain["response_ids"] and output["stop_reasons"] == ["length"]


def counted(add: Callable[..., None], pieces: list[int]) -> Callable[..., None]:
    """Notes the tokens of each call."""

    def note(self: Continuation, chunk: TokenChunk, segment: int) -> None:
        pieces.append(len(chunk.token_ids))
        add(self, chunk, segment)

    return note
