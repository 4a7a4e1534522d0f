"""Messages between processes arrive as they were sent, without Python code for each of their fields."""

from __future__ import annotations

import pickle
import pickletools
from typing import Any

import pytest

from skyrl_train.errors import ConfigError
from skyrl_train.inference.interface import LogitAdjustment, SamplingParams, StopReason, StructuredOutput, TokenChunk
from skyrl_train.workers.messages import Call, Cancel, Item, Result

PARAMS = SamplingParams(
    max_tokens=9,
    min_tokens=2,
    temperature=0.5,
    top_p=0.9,
    top_k=4,
    min_p=0.1,
    n=3,
    seed=1 << 61,
    stop=("x",),
    stop_token_ids=(3, 4),
    ignore_eos=True,
    top_logprobs=2,
    structured=StructuredOutput("regex", "a+", 3),
    adjustment=LogitAdjustment(presence_penalty=0.5, logit_bias=((1, 2.0),)),
)
CHUNK = TokenChunk([1, 2], [-0.5, -1.0], [3, 4], StopReason.LENGTH, [[(1, -0.5)], [(2, -1.0)]], 7)


@pytest.mark.parametrize(
    "message",
    [
        PARAMS,
        CHUNK,
        Call(1, "generate", ([5], PARAMS, 2)),
        Cancel(1, report_end=True),
        Item(1, CHUNK),
        Result(2, CHUNK),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_arrives_as_it_was_sent_and_brings_no_state(message: Any) -> None:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    assert pickle.loads(data) == message
    # BUILD would set the fields of an object one by one: in Python, for a frozen dataclass with slots. The two that only rare
    # requests have are such objects.
    builds = sum(opcode.name == "BUILD" for opcode, _, _ in pickletools.genops(data))
    assert builds == (2 if PARAMS in (message, *getattr(message, "arguments", ())) else 0)


def test_what_arrives_is_checked_like_what_is_made_here() -> None:
    data = pickle.dumps(SamplingParams(max_tokens=77), protocol=pickle.HIGHEST_PROTOCOL)
    with pytest.raises(ConfigError, match="max_tokens must be at least 1"):
        pickle.loads(data.replace(b"K\x4d", b"K\x00"))  # an integer of one byte: 77, then 0
