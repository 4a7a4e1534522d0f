"""Messages to tokens: sampled tokens stay as they are, and the rest equals the output of the template."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from skyrl_train.config.schema import BuildModelConfig, GeneratorConfig
from skyrl_train.errors import ConfigError
from skyrl_train.inference.chat import ChatRenderer
from skyrl_train.models.folder import load_tokenizer
from skyrl_train.models.tiny import build_model_folder, character_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .?!\n"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# At the end of a conversation, a turn ends with a token more (Phi), with one at all, or with another one (Harmony).
PHI = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|endoftext|>{% endif %}"
)
LAST_ONLY = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|im_end|>{% endif %}"
)
HARMONY = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% if m['role'] == 'assistant' and loop.last and not add_generation_prompt %}<|endoftext|>{% else %}<|im_end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# There is a generation prompt behind a question only (DeepSeek V3.1).
QUESTIONS_ONLY = CHATML.replace(
    "{% if add_generation_prompt %}", "{% if add_generation_prompt and messages[-1]['role'] == 'user' %}"
)
# A space, which not all answers have, stands before the end token.
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|im_start|>{{ m['content'] }}"
    "{% else %} {{ m['content'] }} <|im_end|>{% endif %}{% endfor %}"
)
FORGETFUL = "{{ messages[-1]['content'] }}"
STRICT = "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}x{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN_MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


def make_tokenizer(template: str | None, marks: list[str] = []) -> PreTrainedTokenizerFast:  # noqa: B006 - read only
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, "<unk>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(marks)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", unk_token="<unk>", chat_template=template
    )


TOKENIZERS = {
    "characters": character_tokenizer(LETTERS),
    "chatml": make_tokenizer(CHATML),
    "phi": make_tokenizer(PHI),
    "last only": make_tokenizer(LAST_ONLY),
    "harmony": make_tokenizer(HARMONY),
    "questions only": make_tokenizer(QUESTIONS_ONLY),
    "llama 2": make_tokenizer(LLAMA2),
    "no template": make_tokenizer(None),
}
ASK = [{"role": "user", "content": "How many?"}]
MORE = [{"role": "user", "content": "Try again."}]


def tokens(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_arguments_of_the_template_hold_for_every_call_that_names_no_other() -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ '7' if enable_thinking else '8' }}"
    tokenizer = make_tokenizer(template)
    renderer = ChatRenderer(tokenizer, "", template_kwargs={"enable_thinking": True})
    assert renderer.render(ASK)[-1] == renderer.encode("7")[-1]
    assert renderer.render(ASK, template_kwargs={"enable_thinking": False})[-1] == renderer.encode("8")[-1]
    assert ChatRenderer(tokenizer, "").render(ASK)[-1] == renderer.encode("8")[-1]


def test_a_template_of_a_file_replaces_the_familys(tmp_path: Path) -> None:
    config = GeneratorConfig(chat_template="mine.jinja", chat_template_kwargs={"mark": "7"})
    tokenizer = make_tokenizer("{% for m in messages %}{{ m['content'] }}{% endfor %}{{ mark }}")
    renderer = ChatRenderer.configured(config, tokenizer, "Qwen/Qwen3-0.6B")
    assert renderer.render(ASK)[-1] == renderer.encode("7")[-1]
    folder = tmp_path / "model"
    build_model_folder(
        BuildModelConfig(hidden_size=16, num_heads=2, num_layers=1, intermediate_size=16), folder, seed=0
    )
    (tmp_path / "mine.jinja").write_text("9{{ messages[0]['content'] }}")
    opened = load_tokenizer(str(folder), str(tmp_path / "mine.jinja"))
    assert opened.apply_chat_template(ASK, tokenize=False) == f"9{ASK[0]['content']}"
    with pytest.raises(ConfigError, match=r"generator\.chat_template=.*absent.*Name a file with a Jinja template"):
        load_tokenizer(str(folder), str(tmp_path / "absent"))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("characters", "How many?"),
        ("chatml", "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"),
        ("no template", "How many?"),
    ],
)
def test_a_prompt_is_rendered_with_the_generation_prompt(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    assert ChatRenderer(tokenizer, "").render(ASK) == tokens(tokenizer, text)


@pytest.mark.parametrize(
    ("kind", "sampled", "added"),
    [
        ("characters", "7<eos>", "Try again."),
        ("characters", "7", "Try again."),
        ("no template", "7<|im_end|>", "Try again."),
        # The turn's closing is added as far as it was not sampled: all of it, all but the end token, nothing.
        ("chatml", "7", "<|im_end|>\n<|im_start|>user\nTry again.<|im_end|>\n<|im_start|>assistant\n"),
        ("chatml", "7<|im_end|>", "\n<|im_start|>user\nTry again.<|im_end|>\n<|im_start|>assistant\n"),
        ("chatml", "7<|im_end|>\n", "<|im_start|>user\nTry again.<|im_end|>\n<|im_start|>assistant\n"),
        ("phi", "7<|im_end|>", "<|im_start|>user\nTry again.<|im_end|><|im_start|>assistant\n"),
        ("phi", "7<|im_end|><|endoftext|>", "<|im_start|>user\nTry again.<|im_end|><|im_start|>assistant\n"),
        ("phi", "7<|endoftext|>", "<|im_start|>user\nTry again.<|im_end|><|im_start|>assistant\n"),
        ("last only", "7<|im_end|>", "<|im_start|>user\nTry again.<|im_start|>assistant\n"),
        ("harmony", "7<|endoftext|>", "<|im_start|>user\nTry again.<|im_end|><|im_start|>assistant\n"),
        (
            "questions only",
            "7<|im_end|>\n",
            "<|im_start|>user\nTry again.<|im_end|>\n<|im_start|>assistant\n",
        ),
        ("llama 2", "7", " <|im_end|><|im_start|>Try again."),
        ("llama 2", "7 <|im_end|>", "<|im_start|>Try again."),
        ("llama 2", "7<|im_end|>", "<|im_start|>Try again."),
        # A newline in the answer is no closing.
        ("chatml", "7\n", "<|im_end|>\n<|im_start|>user\nTry again.<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_the_next_turn_equals_the_templates_output(kind: str, sampled: str, added: str) -> None:
    tokenizer = TOKENIZERS[kind]
    renderer = ChatRenderer(tokenizer, "")
    prompt, response = renderer.render(ASK), tokens(tokenizer, sampled)
    assert renderer.extend(prompt, response, MORE) == prompt + response + tokens(tokenizer, added)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_the_extension_begins_with_the_prompt_and_exactly_the_sampled_tokens(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    renderer = ChatRenderer(tokenizer, "")
    response = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), min_size=1, max_size=20))
    contents = data.draw(st.lists(st.text(LETTERS, max_size=10), min_size=1, max_size=3))
    prompt = renderer.render(ASK)
    extended = renderer.extend(prompt, response, [{"role": "user", "content": text} for text in contents])
    assert extended[: len(prompt) + len(response)] == prompt + response


def test_a_conversation_extended_turn_by_turn_is_the_one_rendered_at_once() -> None:
    tokenizer = TOKENIZERS["chatml"]
    renderer = ChatRenderer(tokenizer, "")
    ids, messages = renderer.render(ASK), list(ASK)
    for answer in ("seven", "eight", "nine"):
        ids = renderer.extend(ids, tokens(tokenizer, answer + "<|im_end|>"), MORE)
        messages += [{"role": "assistant", "content": answer}, *MORE]
    assert ids == renderer.render(messages)


def test_no_new_message_is_a_new_turn_of_the_assistant() -> None:
    tokenizer = TOKENIZERS["chatml"]
    extended = ChatRenderer(tokenizer, "").extend([5], tokens(tokenizer, "7<|im_end|>"), [])
    assert extended == [5, *tokens(tokenizer, "7<|im_end|>\n<|im_start|>assistant\n")]


@pytest.mark.parametrize(
    ("kind", "ending"),
    [
        ("characters", "It is"),
        ("no template", "It is"),
        ("chatml", "<|im_end|>\n<|im_start|>user\nTry again.<|im_end|>\n<|im_start|>assistant\nIt is"),
    ],
)
def test_a_prefill_ends_the_prompt_rendered_at_once_or_turn_by_turn(kind: str, ending: str) -> None:
    tokenizer, prefill = TOKENIZERS[kind], {"role": "assistant", "content": "It is"}
    renderer = ChatRenderer(tokenizer, "")
    rendered = renderer.render([*ASK, prefill], continue_final=True)
    if kind != "no template":
        arguments = {"continue_final_message": True, "return_dict": False}
        assert rendered == tokenizer.apply_chat_template([*ASK, prefill], **arguments)
    assert rendered[-5:] == tokens(tokenizer, "It is")
    prompt, response = renderer.render(ASK), tokens(tokenizer, "7")
    extended = renderer.extend(prompt, response, [*MORE, prefill], continue_final=True)
    added = ending if kind == "chatml" else f"Try again.{ending}"
    assert extended == prompt + response + tokens(tokenizer, added)


def test_a_family_continues_a_message_with_the_tokenizers_template_or_not_at_all() -> None:
    conversation = [*ASK, {"role": "assistant", "content": "It is"}]
    tokenizer = make_tokenizer(CHATML, QWEN_MARKS)
    renderer = ChatRenderer(tokenizer, "Qwen/Qwen3-0.6B")
    assert renderer.render(conversation, continue_final=True) == [
        *renderer.render(ASK),
        *tokens(tokenizer, "It is"),
    ]
    with pytest.raises(ConfigError, match="has no chat template"):
        ChatRenderer(make_tokenizer(None, QWEN_MARKS), "Qwen/Qwen3-0.6B").render(conversation, continue_final=True)


@pytest.mark.parametrize(
    ("prefill", "reasoning", "content"),
    [("So", None, "hm</think>ok"), ("<think>So", "hm", "ok"), ("<think>So</think>", None, "hm</think>ok")],
)
def test_a_prefill_may_open_reasoning(prefill: str, reasoning: str | None, content: str) -> None:
    tokenizer = make_tokenizer(CHATML, QWEN_MARKS)
    renderer = ChatRenderer(tokenizer, "Qwen/Qwen3-0.6B")
    prompt = renderer.render([*ASK, {"role": "assistant", "content": prefill}], continue_final=True)
    parser = renderer.parser(prompt, (), prefill)
    parser.feed(tokens(tokenizer, "hm</think>ok<|im_end|>"))
    message = parser.finish()[1]
    assert (message.reasoning_content, message.content) == (reasoning, content)


def test_a_known_family_is_rendered_by_its_own_renderer_and_keeps_its_reasoning() -> None:
    tokenizer = make_tokenizer(None, QWEN_MARKS)
    renderer = ChatRenderer(tokenizer, "Qwen/Qwen3-0.6B")
    prompt = renderer.render(ASK)
    assert prompt == tokens(tokenizer, "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n")
    response = tokens(tokenizer, "<think>\nhm\n</think>\n\n7<|im_end|>")
    added = tokens(tokenizer, "\n<|im_start|>user\nTry again.<|im_end|>\n<|im_start|>assistant\n")
    assert renderer.extend(prompt, response, MORE) == prompt + response + added


def test_messages_that_run_together_without_a_template_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    renderer = ChatRenderer(make_tokenizer(None), "mine")
    prompt = renderer.render(ASK)
    assert not caplog.messages, "a prompt of one message needs no marks"
    for content in ("7", "8"):
        renderer.extend(prompt, renderer.encode("9"), [{"role": "user", "content": content}])
    renderer.render([*ASK, *ASK])
    (said,) = caplog.messages
    assert "'mine' has no chat template" in said and "generator.chat_template=FILE" in said


def test_messages_that_the_template_rejects_are_an_error() -> None:
    with pytest.raises(ConfigError, match="drops earlier answers"):
        ChatRenderer(make_tokenizer(FORGETFUL), "a/model").extend([5], [6], MORE)
    with pytest.raises(ConfigError, match=r"'a/model' refuses a conversation of \['tool'\]: no tools"):
        ChatRenderer(make_tokenizer(STRICT), "a/model").render([{"role": "tool", "content": "4"}])
    with pytest.raises(ConfigError, match="must not be empty"):
        ChatRenderer(TOKENIZERS["characters"], "").render([{"role": "user", "content": ""}])


@pytest.mark.parametrize("statement", ["import skyrl_train.inference.chat", "import skyrl_train.rollout.data.dataset"])
def test_importing_is_cheap(statement: str) -> None:
    heavy = "{'torch', 'transformers', 'renderers', 'datasets', 'pyarrow', 'skyrl_gym', 'reasoning_gym'}"
    program = f"{statement}; import sys; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_cache_of_rendered_conversations_is_bounded_in_size_too(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = character_tokenizer("long short")
    applied, rendered = tokenizer.apply_chat_template, []

    def counted(messages: list[dict[str, str]], **kwargs: object) -> object:
        rendered.append(len(messages[0]["content"]))
        return applied(messages, **kwargs)

    monkeypatch.setattr(tokenizer, "apply_chat_template", counted)
    renderer = ChatRenderer(tokenizer, "")
    for content in ("short", "short", "long " * 20_000, "long " * 20_000):
        renderer.render([{"role": "user", "content": content}])
    assert rendered == [5, 100_000, 100_000]


def test_messages_that_come_again_are_rendered_once_whatever_the_answer_before_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = make_tokenizer(CHATML)
    applied, rendered = tokenizer.apply_chat_template, []

    def counted(messages: list[dict[str, str]], **kwargs: object) -> object:
        rendered.append([message["content"] for message in messages[2:]])  # behind the answer that stands for all
        return applied(messages, **kwargs)

    monkeypatch.setattr(tokenizer, "apply_chat_template", counted)
    renderer = ChatRenderer(tokenizer, "")
    for answer in ("7", "8<|im_end|>", "9<|im_end|>\n"):
        for content in ("higher", "lower"):
            new, response = [{"role": "user", "content": content}], tokens(tokenizer, answer)
            assert renderer.extend([5], response, new) == ChatRenderer(TOKENIZERS["chatml"], "").extend(
                [5], response, new
            )
    assert rendered == [["higher"], *[[]] * 4, ["lower"]]  # nothing: how an answer ends
