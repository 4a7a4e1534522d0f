"""Small byte-level tokenizers with the marks of real chat formats, and renderers that use them."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from skyrl_train.inference.chat import ChatRenderer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES = "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}<tool_call>{% endif %}" + CHATML
THINKING = HERMES + "{% if add_generation_prompt %}<think>\n{% endif %}"

THINK = ["<think>", "</think>"]
TOOL_CALL = ["<tool_call>", "</tool_call>"]
RESPONSE = ["<tool_response>", "</tool_response>"]
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
GLM_MARKS = ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
GLM_SPECIAL = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"]
DEEPSEEK_MARKS = [
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
]
DEEPSEEK_SPECIAL = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
KIMI_MARKS = [
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
]
KIMI_SPECIAL = ["<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>", "[BOS]", "[EOS]"]
LLAMA_SPECIAL = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
]
MINIMAX_MARKS = [*THINK, "<minimax:tool_call>", "</minimax:tool_call>"]
INKLING_SPECIAL = [
    *(f"<|message_{role}|>" for role in ("user", "model", "system", "tool")),
    *(f"<|content_{kind}|>" for kind in ("text", "thinking", "image", "audio_input", "xml", "model_end_sampling")),
    "<|content_invoke_tool_json|>",
    "<|content_invoke_tool_text|>",
    "<|end_message|>",
    "<|audio_end|>",
    "<|unused_200054|>",
    "<|unused_200053|>",
    "<|endoftext|>",
]
QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *VISION]


def byte_tokenizer(
    special: list[str], marks: list[str], end: str, template: str | None = None
) -> PreTrainedTokenizerFast:
    """One token per byte, so that most characters take several; ``special`` tokens are left out of decoded text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)  # 1 is a control character
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in marks])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, chat_template=template, clean_up_tokenization_spaces=False
    )


def _qwen(template: str | None = None, extra: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    return byte_tokenizer([*QWEN_SPECIAL, *extra], [*THINK, *TOOL_CALL, *RESPONSE], "<|im_end|>", template)


# Hub name (empty: the generic path) -> its tokenizer.
FAMILIES = {
    "Qwen/Qwen3-0.6B": _qwen,
    "Qwen/Qwen3.5-4B": _qwen,
    "zai-org/GLM-4.5-Air": lambda: byte_tokenizer(
        [*GLM_SPECIAL, "/nothink"], [*THINK, *TOOL_CALL, *RESPONSE, *GLM_MARKS], "<|endoftext|>"
    ),
    "zai-org/GLM-5": lambda: byte_tokenizer(GLM_SPECIAL, [*THINK, *TOOL_CALL, *RESPONSE, *GLM_MARKS], "<|endoftext|>"),
    "deepseek-ai/DeepSeek-V3": lambda: byte_tokenizer(DEEPSEEK_SPECIAL, DEEPSEEK_MARKS, "<｜end▁of▁sentence｜>"),
    "deepseek-ai/DeepSeek-R1": lambda: byte_tokenizer(DEEPSEEK_SPECIAL, DEEPSEEK_MARKS, "<｜end▁of▁sentence｜>"),
    "moonshotai/Kimi-K2-Instruct": lambda: byte_tokenizer([*KIMI_SPECIAL, *KIMI_MARKS], [], "<|im_end|>"),
    "MiniMaxAI/MiniMax-M2": lambda: byte_tokenizer(
        ["]~!b[", "]~b]", "[e~["], [*MINIMAX_MARKS, "<response>", "</response>"], "[e~["
    ),
    "meta-llama/Llama-3.2-1B-Instruct": lambda: byte_tokenizer(LLAMA_SPECIAL, [], "<|eot_id|>"),
    "poolside/Laguna-XS.2": lambda: byte_tokenizer(
        ["〈|EOS|〉", "<assistant>", "</assistant>", "<system>", "</system>", "<user>", "</user>"],
        [*THINK, *TOOL_CALL, *RESPONSE],
        "</assistant>",
    ),
    "thinkingmachines/Inkling": lambda: byte_tokenizer(INKLING_SPECIAL, [], "<|content_model_end_sampling|>"),
    "generic with mark tokens": lambda: _qwen(THINKING),
    "generic without mark tokens": lambda: byte_tokenizer(QWEN_SPECIAL, [], "<|im_end|>", THINKING),
    "nothing known": lambda: byte_tokenizer(["<eos>"], [], "<eos>"),
}


@functools.cache
def chat_tokenizer(name: str) -> PreTrainedTokenizerFast:
    return FAMILIES[name]()


@functools.cache
def chat_renderer(name: str) -> ChatRenderer:
    return ChatRenderer(chat_tokenizer(name), name if "/" in name else "")


def encode(name: str, text: str) -> list[int]:
    return list(chat_tokenizer(name)(text, add_special_tokens=False)["input_ids"])
