"""Sessions with the real renderer: an ordinary template, and a vocabulary that has two ways to write a word."""

from __future__ import annotations

import pytest
from session_worlds import assistant, choice, user
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from skyrl_train.endpoint.sessions import Session
from skyrl_train.inference.chat import ChatRenderer

TEMPLATE = (
    "{% if tools %}T{{ tools | length }}{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETFUL = "{{ messages[-1]['content'] }}<|assistant|>"
MARKS = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
LETTERS = "abcdefghijklmnopqrstuvwxyzXZ0123456789T? "


def make_renderer(template: str = TEMPLATE) -> tuple[ChatRenderer, PreTrainedTokenizerFast]:
    vocabulary = {token: index for index, token in enumerate([*MARKS, "<unk>", *LETTERS, "ab"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(MARKS)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=template)
    return ChatRenderer(fast, ""), fast


@pytest.mark.parametrize(
    ("tokens", "drifted"),
    [
        (["ab", "c", "<|end|>"], 0),
        (["a", "b", "c", "<|end|>"], 2),
        (["c", "a", "b"], 2),
        (["a", "b", "c", "a", "b"], 5),
    ],
)
def test_the_sampled_tokens_stay_and_the_differing_ones_are_counted(tokens: list[str], drifted: int) -> None:
    renderer, tokenizer = make_renderer()
    session = Session("s", renderer)
    plan = session.plan([user("hi")])
    sampled = list(tokenizer.convert_tokens_to_ids(tokens))
    text = "".join(token for token in tokens if token != "<|end|>")
    session.record(plan, choice(plan, text, token_ids=sampled))
    following = session.plan([user("hi"), assistant(text), user("more")])
    session.record(following, choice(following, "c", token_ids=[9]))
    assert following.reused_tokens == len(plan.prompt_token_ids) + len(sampled)
    assert following.prompt_token_ids[: following.reused_tokens] == plan.prompt_token_ids + sampled
    added = tokenizer.decode(following.prompt_token_ids[following.reused_tokens :])
    assert added.endswith("<|user|>more<|end|><|assistant|>")
    assert session.statistics().drifted_tokens == drifted


def test_other_tools_are_rendered_anew() -> None:
    renderer, tokenizer = make_renderer()
    session = Session("s", renderer)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    plan = session.plan([user("hi")], [tool])
    session.record(plan, choice(plan, "ab", token_ids=tokenizer.convert_tokens_to_ids(["a", "b", "<|end|>"])))
    history = [user("hi"), assistant("ab"), user("more")]
    assert session.plan(history, [tool]).reused_tokens > 0
    other = session.plan(history, [tool, tool])
    assert (other.reused_tokens, other.drifted) == (0, True)
    assert tokenizer.decode(other.prompt_token_ids).startswith("T2")


def test_a_template_that_drops_answers_begins_a_branch_and_counts_it() -> None:
    renderer, tokenizer = make_renderer(FORGETFUL)
    session = Session("s", renderer)
    plan = session.plan([user("hi")])
    session.record(plan, choice(plan, "ab", token_ids=tokenizer.convert_tokens_to_ids(["ab"])))
    following = session.plan([user("hi"), assistant("ab"), user("more")])
    assert tokenizer.decode(following.prompt_token_ids) == "more<|assistant|>"
    assert (following.reused_tokens, following.drifted) == (0, True)
