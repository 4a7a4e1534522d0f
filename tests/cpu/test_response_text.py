"""The text of a response while it is sampled, for a vocabulary of bytes."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from skyrl_train.inference.response_text import ResponseText


@pytest.fixture(scope="module")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token per byte, so that characters come in pieces."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@settings(max_examples=150, deadline=None)
@given(text=st.text("aé€😀b ", max_size=30), stop=st.lists(st.text("aé€😀", min_size=1, max_size=3), max_size=2))
def test_pieces_joined_are_the_text_before_the_first_stop_string_and_nothing_is_taken_back(
    byte_tokenizer: PreTrainedTokenizerFast, text: str, stop: list[str]
) -> None:
    response = ResponseText(byte_tokenizer, tuple(stop))
    shown, whole = "", text
    for token_id in byte_tokenizer.encode(text, add_special_tokens=False):
        matched = response.feed(token_id, may_stop=True)
        shown += response.take()
        assert text.startswith(shown)
        if matched:
            break
    ends = sorted((text.find(s) + len(s), text.find(s), s) for s in stop if s in text)
    if ends:
        assert response.stop_string in {s for end, _, s in ends if end == ends[0][0]}
        assert response.text_end is not None
        whole = text[: response.text_end]
        assert response.text_end == min(start for end, start, _ in ends if end == ends[0][0])
    else:
        assert response.stop_string is None
    shown += response.rest(whole)
    assert shown == whole


def test_stray_bytes_without_end_cost_no_more_than_their_number(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    stray = byte_tokenizer.encode("€", add_special_tokens=False)[1]

    def seconds(tokens: int) -> float:
        response = ResponseText(byte_tokenizer, ("stop",))
        began = time.process_time()
        for _ in range(tokens):
            response.feed(stray, may_stop=True)
        assert len(response.take()) > tokens - 20
        return time.process_time() - began

    seconds(100)
    assert seconds(8000) < 20 * seconds(1000)  # the square would be 64 times as much
