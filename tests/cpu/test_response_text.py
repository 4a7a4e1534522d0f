"""The text of a response while it is sampled, for vocabularies of bytes, of characters with byte fallback, and of words."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import pytest
from chat_models import byte_tokenizer
from hypothesis import example, given
from hypothesis import strategies as st
from scripted import ScriptedEngine, scripted_update
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from skyrl_train.inference.chat.pieces import Mark, PieceReader, Vocabulary
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.interface import SamplingParams
from skyrl_train.inference.requests import GenerationRequest
from skyrl_train.inference.response_text import REPLACEMENT, IncrementalText, ResponseText, text_of
from skyrl_train.types import PauseMode

SPECIAL, THINK, ADDED = "<eos>", "<think>", "<é added>"
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
GEMMA = LLAMA[:3]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = ["▁", "a", "b", "▁a", "▁▁", "ab", "x", "é", "€", "▁€x"]


def _with_marks(backend: Tokenizer) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([AddedToken(SPECIAL, special=True, normalized=False)])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in (THINK, ADDED)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL)


def _of_words(words: list[str], decoder: decoders.Decoder | None) -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(["<unk>", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    if decoder is not None:
        backend.decoder = decoder
    return _with_marks(backend)


VOCABULARIES: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "bytes": lambda: byte_tokenizer([SPECIAL], [THINK, ADDED], SPECIAL),
    "fallback, first space stripped": lambda: _of_words([*BYTES, *LETTERS], decoders.Sequence(LLAMA)),
    "fallback": lambda: _of_words([*BYTES, *LETTERS], decoders.Sequence(GEMMA)),
    "characters": lambda: _of_words(list("ab xé€😀"), decoders.Fuse()),
    "metaspace": lambda: _of_words(LETTERS, decoders.Metaspace()),
    "words": lambda: _of_words(["ab", "##a", "b", "x", "é"], decoders.WordPiece(cleanup=False)),
    "word ends": lambda: _of_words(["a", "b</w>", "x", "é</w>"], decoders.BPEDecoder()),
    "no decoder": lambda: _of_words(["a", "b", "é"], None),
}


@functools.cache
def vocabulary(name: str) -> PreTrainedTokenizerFast:
    return VOCABULARIES[name]()


def ids(name: str, tokens: Sequence[str]) -> list[int]:
    return [vocabulary(name).convert_tokens_to_ids(token) for token in tokens]


def by_tokenizer(name: str, token_ids: Sequence[int]) -> str:
    return str(vocabulary(name).decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@st.composite
def responses(draw: st.DrawFn, names: Sequence[str] = tuple(VOCABULARIES)) -> tuple[str, list[int]]:
    """A vocabulary and any tokens: also those of no character, special ones, and rows that no token belongs to."""
    name = draw(st.sampled_from(names))
    size = len(vocabulary(name))
    bytes_of_a_character = st.sampled_from(["é", "€", "😀", "\n", "a"]).map(lambda c: ids(name, _as_bytes(name, c)))
    token = st.integers(0, size + 1).map(lambda index: [index])
    rare = st.sampled_from([SPECIAL, THINK, ADDED]).map(lambda text: ids(name, [text]))
    parts = [token, rare, bytes_of_a_character] if "<0x0A>" in vocabulary(name).get_vocab() else [token, rare]
    return name, [index for part in draw(st.lists(st.one_of(parts), max_size=25)) for index in part]


def _as_bytes(name: str, character: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in character.encode()]


CHARACTER_CUT_BY_A_BYTE = ("fallback", ["<0x0A>", "<0xF0>", "b"])


@given(responses())
@example((CHARACTER_CUT_BY_A_BYTE[0], ids(*CHARACTER_CUT_BY_A_BYTE)))
def test_pieces_joined_are_the_whole_text_and_valid_text_is_the_tokenizers_own(response: tuple[str, list[int]]) -> None:
    name, token_ids = response
    decoder = IncrementalText(vocabulary(name))
    joined = "".join([*map(decoder.feed, token_ids), decoder.flush()])
    assert joined == text_of(vocabulary(name), token_ids)
    special = ids(name, [SPECIAL])[0]
    if REPLACEMENT not in joined or (name == "bytes" and special not in token_ids):
        assert joined == by_tokenizer(name, token_ids)


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (["<0x0A>", "<0xF0>", "b"], "\n�b"),
        (["a", "<0x0A>", "<0xE2>", "▁a"], "a\n� a"),
        (["<0x0A>", "<0x0A>", "<0x9F>", "b"], "\n\n�b"),
        (["<0xE2>", SPECIAL, "<0x82>", "<0xAC>"], "���"),
        (["<0x20>", "▁a"], "  a"),
    ],
)
def test_stray_bytes_spoil_nothing_but_themselves(tokens: list[str], text: str) -> None:
    assert text_of(vocabulary("fallback"), ids("fallback", tokens)) == text


def test_a_line_break_of_a_fallback_vocabulary_is_text_at_once() -> None:
    text = ResponseText(vocabulary("fallback"), ("\n",))
    a, line_break = ids("fallback", ["a", "<0x0A>"])
    assert not text.feed(a, may_stop=True)
    assert text.feed(line_break, may_stop=True)


@given(
    response=responses(),
    stop=st.lists(st.text("ab xé€\n�", min_size=1, max_size=3), max_size=2),
    reads=st.randoms(use_true_random=False),
)
def test_returned_text_ends_before_the_first_stop_string(
    response: tuple[str, list[int]], stop: list[str], reads: object
) -> None:
    name, token_ids = response
    text = ResponseText(vocabulary(name), tuple(stop))
    handed_out, fed = [], 0
    for token_id in token_ids:
        fed += 1
        matched = text.feed(token_id, may_stop=True)
        if reads.random() < 0.5:  # type: ignore[attr-defined]
            handed_out.append(text.take())
        if matched:
            break
    whole = text.whole()
    assert text.whole() == whole
    assert "".join([*handed_out, text.rest(whole)]) == whole
    spelt = text_of(vocabulary(name), token_ids[:fed])
    if text.text_end is None:
        assert whole == spelt
        before = IncrementalText(vocabulary(name))
        certain = "".join(map(before.feed, token_ids))
        assert not any(s in certain for s in stop)
    else:
        assert text.stop_string in stop
        assert spelt.startswith(whole + text.stop_string)
        assert len(whole) == min(spelt.find(s) for s in stop if s in spelt)


@given(response=responses(("bytes", "fallback, first space stripped", "fallback", "characters", "metaspace")))
def test_the_pieces_of_a_message_show_the_text_of_the_response(response: tuple[str, list[int]]) -> None:
    name, token_ids = response
    known = [token_id for token_id in token_ids if token_id < len(vocabulary(name))]
    reader = PieceReader(Vocabulary(vocabulary(name)), {THINK: Mark.THINK, "ab": Mark.THINK_END}, frozenset())
    pieces = [piece for token_id in known for piece in reader.feed(token_id)] + reader.flush()
    text = text_of(vocabulary(name), known)
    assert sum(piece.shown for piece in pieces) == len(text)
    assert "".join(piece.text for piece in pieces if not piece.special) == text


async def test_a_response_reads_the_same_whether_it_is_streamed_or_not_and_with_stop_strings_or_without() -> None:
    tokens = [
        *ids("fallback", ["a", "<0x0A>", "<0xE2>", "▁a", "<0x9F>"]),
        *ids("fallback", ["<0xE2>", SPECIAL, "<0x82>"]),
    ]
    engine = ScriptedEngine(lambda so_far, seed: tokens[len(so_far) - 1], free_running=True, eos=-1)
    client = InferenceEngineClient([engine], vocabulary("fallback"))
    await client.receive_weights(scripted_update(0))
    await client.load_weights(scripted_update(0), PauseMode.KEEP)
    request = GenerationRequest([5], SamplingParams(max_tokens=len(tokens)))
    stopping = dataclasses.replace(request, params=dataclasses.replace(request.params, stop=("zz",)))
    streamed = [chunk async for chunk in client.stream(request)]
    texts = {
        (await client.complete(request)).text,
        (await client.complete(stopping)).text,
        "".join(chunk.text for chunk in streamed),
        streamed[-1].generation.text if streamed[-1].generation is not None else "",
    }
    assert texts == {"a\n� a���"}


@pytest.mark.parametrize("name", ["bytes", "fallback"])
def test_stray_bytes_without_end_cost_no_more_than_their_number(name: str) -> None:
    stray = ids(name, ["<0x82>"])[0] if name == "fallback" else vocabulary(name).encode("€")[1]

    def seconds(tokens: int) -> float:
        response = ResponseText(vocabulary(name), ("stop",))
        began = time.process_time()
        for _ in range(tokens):
            response.feed(stray, may_stop=True)
        assert len(response.take()) == tokens
        return time.process_time() - began

    seconds(100)
    assert seconds(8000) < 20 * seconds(1000)  # the square would be 64 times as much
