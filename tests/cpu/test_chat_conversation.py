"""Messages, tools and template arguments: valid ones are normalized, and errors name the invalid field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chat_models import CHATML, FAMILIES, QWEN_SPECIAL, RESPONSE, THINK, TOOL_CALL, byte_tokenizer, chat_renderer
from chat_models import chat_tokenizer as tokenizer_of
from renderers.qwen3 import _TOOLS_FOOTER, _TOOLS_HEADER
from transformers import PreTrainedTokenizerFast

from skyrl_train.errors import ConfigError
from skyrl_train.inference.chat import ChatRenderer

QWEN = "Qwen/Qwen3-0.6B"
ASK = {"role": "user", "content": "How many?"}
TOOL = {"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {}}}}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "count", "arguments": '{"of": "cats"}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "7"}]}
# Writes everything that it is given.
OPEN = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}){% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ opening }}{% endif %}"
)
# As Qwen3's template writes it, as far as the probes look.
QWEN3 = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}"
    + _TOOLS_HEADER
    + "{% for t in tools %}{{ '\n' + t | tojson }}{% endfor %}{{ '\n' }}"
    + _TOOLS_FOOTER.removeprefix("\n")
    + "<|im_end|>\n{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    """{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}"""
    "<|im_end|>\n{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def renderer(template: str) -> ChatRenderer:
    return ChatRenderer(qwen_like(template), "")


def qwen_like(template: str) -> PreTrainedTokenizerFast:
    return byte_tokenizer(QWEN_SPECIAL, [*THINK, *TOOL_CALL, *RESPONSE], "<|im_end|>", template)


def text(chat: ChatRenderer, *args: object, **kwargs: object) -> str:
    return str(tokenizer_of(QWEN).decode(chat.render(*args, **kwargs)))  # type: ignore[arg-type]


def test_tools_calls_and_results_are_rendered_by_the_template() -> None:
    said = text(renderer(OPEN), [ASK, CALLED, RESULT], [TOOL])
    assert said == (
        "[count]<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n(count of=cats)<|im_end|>\n"
        "<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_calls_and_results_are_rendered_by_a_known_family() -> None:
    said = text(chat_renderer(QWEN), [ASK, CALLED, RESULT], [TOOL])
    assert '"name": "count"' in said and '<tool_call>\n{"name": "count", "arguments": {"of": "cats"}}' in said
    assert said.endswith("<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("family", [QWEN, "zai-org/GLM-4.5-Air", "generic with mark tokens"])
def test_a_tool_result_extends_the_sampled_tokens(family: str) -> None:
    chat = chat_renderer(family)
    prompt = chat.render([ASK], [TOOL])
    response = list(tokenizer_of(family)("<tool_call>x</tool_call>", add_special_tokens=False)["input_ids"])
    extended = chat.extend(prompt, response, [RESULT], [TOOL])
    assert extended[: len(prompt) + len(response)] == prompt + response
    assert "7" in tokenizer_of(family).decode(extended[len(prompt) + len(response) :])


def test_a_mark_of_the_next_role_that_ended_the_answer_is_not_repeated() -> None:
    """As GLM has it: no token ends a turn but the mark of the next one."""
    chat = renderer(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    prompt, answer = chat.render([ASK]), chat.encode("Two.")
    (mark,) = chat.encode("<|im_start|>")
    following = chat.extend(prompt, answer, [ASK])
    assert chat.extend(prompt, [*answer, mark], [ASK]) == following
    assert following[len(prompt) + len(answer)] == mark


def test_arguments_of_the_template_reach_it() -> None:
    assert text(renderer(OPEN), [ASK], template_kwargs={"opening": "<think>"}).endswith("assistant\n<think>")
    assert text(chat_renderer(QWEN), [ASK], (), {"enable_thinking": False}).endswith("<think>\n\n</think>\n\n")
    prompt = renderer(OPEN).render([ASK])
    extended = renderer(OPEN).extend(prompt, [5], [ASK], (), {"opening": "!"})
    assert str(tokenizer_of(QWEN).decode(extended)).endswith("assistant\n!")


@pytest.mark.parametrize("key", ["tokenize", "chat_template", "messages", "tools", "add_generation_prompt"])
def test_arguments_that_the_renderer_sets_are_rejected(key: str) -> None:
    with pytest.raises(ConfigError, match=f"'{key}' is set by the renderer"):
        renderer(OPEN).render([ASK], (), {key: "{{ 1 }}"})


def test_an_argument_that_a_family_does_not_have_is_rejected() -> None:
    with pytest.raises(ConfigError, match="chat template arguments of 'qwen3'"):
        chat_renderer(QWEN).render([ASK], (), {"thinking_budget": 5})


def test_an_argument_that_follows_from_a_field_of_an_api_is_ignored_by_a_family_without_it() -> None:
    qwen, llama = chat_renderer(QWEN), chat_renderer("meta-llama/Llama-3.2-1B-Instruct")
    assert qwen.render([ASK], (), {"reasoning_effort": "high"}) == qwen.render([ASK])
    silent = {"enable_thinking": False}
    assert qwen.render([ASK], (), {"reasoning_effort": "none", **silent}) == qwen.render([ASK], (), silent)
    assert llama.render([ASK], (), silent) == llama.render([ASK])


def test_developer_is_system_where_the_template_does_not_know_it() -> None:
    developer = {"role": "developer", "content": "Be brief."}
    assert text(renderer(CHATML), [developer]).startswith("<|im_start|>system\nBe brief.")
    assert text(chat_renderer(QWEN), [developer, ASK]).startswith("<|im_start|>system\nBe brief.")
    assert text(renderer("{# developer #}" + CHATML), [developer]).startswith("<|im_start|>developer")


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "How "}, {"type": "input_text", "text": "many?"}]
    assert renderer(CHATML).render([{"role": "user", "content": parts}]) == renderer(CHATML).render([ASK])


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ("hi", r"messages\[1\] must be an object"),
        ({"content": "x"}, r"messages\[1\]\.role is missing"),
        ({"role": "critic", "content": "x"}, r"messages\[1\]\.role 'critic' is unknown; use one of system, developer"),
        ({"role": "user"}, r"messages\[1\]\.content is missing"),
        ({"role": "user", "content": 5}, r"messages\[1\]\.content must be a string or a list"),
        ({"role": "user", "content": "\ud800"}, r"messages\[1\]\.content is not valid Unicode"),
        ({"role": "user", "content": ["x"]}, r"messages\[1\]\.content\[0\] must be an object"),
        (
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]},
            r"messages\[1\]\.content\[1\]: parts of type 'image_url' are not supported",
        ),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, r"messages\[1\]\.content\[0\]\.text must be"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, r"messages\[1\]\.tool_call_id must be a string"),
        ({"role": "user", "content": "x", "tool_calls": [{}]}, r"messages\[1\]\.tool_calls belongs to assistant"),
        ({"role": "assistant", "tool_calls": {}, "content": 1}, r"messages\[1\]\.content must be"),
        ({"role": "assistant", "tool_calls": "x"}, r"messages\[1\]\.tool_calls must be a list"),
        ({"role": "assistant", "tool_calls": [{}]}, r"messages\[1\]\.tool_calls\[0\]\.function is missing"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            r"messages\[1\]\.tool_calls\[0\]\.function\.arguments is not JSON",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
            r"messages\[1\]\.tool_calls\[0\]\.function\.arguments must be a JSON object",
        ),
    ],
)
def test_a_malformed_message_is_rejected_by_index_and_field(message: object, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        chat_renderer(QWEN).render([ASK, message])  # type: ignore[list-item]


def test_an_empty_conversation_and_values_that_are_not_json_are_errors() -> None:
    with pytest.raises(ConfigError, match="messages is empty"):
        chat_renderer(QWEN).render([])
    with pytest.raises(ConfigError, match="must consist of JSON values"):
        renderer(CHATML).render([{**ASK, "extra": object()}])


def test_a_call_without_arguments_has_none() -> None:
    for arguments in (None, "", {}):
        call = {"function": {"name": "f", "arguments": arguments}}
        assert "(f)" in text(renderer(OPEN), [ASK, {"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize("arguments", ['{"of": "\\uD83D"}', '{"\\udc00": ["cats", "\\ud83d"]}'])
def test_arguments_with_half_a_surrogate_pair_that_a_model_wrote_can_be_rendered(arguments: str) -> None:
    function = {"name": "count", "arguments": arguments}
    called = {**CALLED, "tool_calls": [{"id": "c1", "type": "function", "function": function}]}
    assert "\ufffd" in text(renderer(OPEN), [ASK, called, RESULT])
    assert "\ufffd" in text(chat_renderer(QWEN), [ASK, called, RESULT])


def test_a_template_that_fails_is_rejected_with_its_own_words() -> None:
    with pytest.raises(ConfigError, match=r"refuses a conversation of \['user'\]"):
        renderer("{{ messages[0].content + 5 }}").render([ASK])


# Folders ----------------------------------------------------------------------------------------------------------


def folder(path: Path, config: object, template: str) -> ChatRenderer:
    path.mkdir()
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return ChatRenderer(qwen_like(template), str(path))


def test_a_copy_of_a_known_model_is_recognised_only_by_writing_the_same_tokens(tmp_path: Path) -> None:
    copy = folder(tmp_path / "copy", {"model_type": "qwen3"}, QWEN3)
    assert copy.stop_token_ids == chat_renderer(QWEN).stop_token_ids
    assert len(copy.stop_token_ids) == 2  # the family's; the tokenizer has one
    other = folder(tmp_path / "other", {"model_type": "qwen3"}, QWEN3.replace("tool_response", "result"))
    assert len(other.stop_token_ids) == 1
    assert len(folder(tmp_path / "unknown", {"model_type": "mamba"}, QWEN3).stop_token_ids) == 1
    assert len(folder(tmp_path / "broken", "{", QWEN3).stop_token_ids) == 1


def test_every_family_of_these_tests_stops_at_its_own_tokens() -> None:
    for family in FAMILIES:
        names = [tokenizer_of(family).convert_ids_to_tokens(index) for index in chat_renderer(family).stop_token_ids]
        assert tokenizer_of(family).eos_token in names
