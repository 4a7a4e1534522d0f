"""A model that answers like an assistant, without training: each token decides the next one.

The chat template ends a prompt with ``<|answer|>`` or, if tools were given and no answer precedes, with ``<|call|>``.
Attention and MLP are zero, so the logits depend on the last token only. From ``<|answer|>`` follows a sentence, from
``<|call|>`` a call of ``get_weather``. A grammar can forbid both: the next most likely tokens then close strings, arrays and
objects, so that a forced call or a document is short.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ANSWER = ("It is", " sunny", " in Paris.")
CALL = ("<tool_call>", '\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n', "</tool_call>")
MARKED = "[[ ## answer ## ]]\nIt is sunny in Paris.\n\n[[ ## completed ## ]]"  # the form that dspy asks for
END = "<|im_end|>"
CHAINS = [["<|answer|>", *ANSWER, END], ["<|call|>", *CALL, END], ["<|marked|>", MARKED, END]]
CONTEXT = 32_768  # one token per byte, and some frameworks write long instructions
# Logits behind a token of no chain; all other tokens have 0. Steps of 10 leave the less likely token a chance of 5 in 100,000: a
# comma in place of a brace adds an argument, which tools refuse.
LIKELY = {END: 80.0, '"': 70.0, "}": 60.0, "]": 60.0, ",": 50.0, "1": 40.0, "{": 30.0, "f": 20.0}
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Calls are <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{{ "<|marked|>" if "[[ ## answer ## ]]" in (messages[-1].content or "")
   else "<|call|>" if tools and messages[-1].role != "tool" and not messages | selectattr("role", "equalto", "assistant") | list
   else "<|answer|>" }}
{%- endif %}"""


def _as_bytes(text: str) -> str:
    """Return ``text`` as the vocabulary writes it."""
    return text.replace(" ", "Ġ").replace("\n", "Ċ")


def build(folder: Path) -> None:
    """Write the model and its tokenizer (bytes, and the tokens of the chains) to ``folder``."""
    # Without merges, text is encoded as bytes; the words are only sampled.
    words = [_as_bytes(word) for word in (*ANSWER, CALL[1], MARKED)]
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *words]
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", END, "<|answer|>", "<|call|>", "<|marked|>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(CALL[at], special=False, normalized=False) for at in (0, 2)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, chat_template=TEMPLATE, clean_up_tokenization_spaces=False
    )
    config = Qwen3Config(
        vocab_size=len(fast), hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        intermediate_size=16, max_position_embeddings=CONTEXT, eos_token_id=fast.eos_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for weights in (model.model.layers[0].self_attn.o_proj, model.model.layers[0].mlp.down_proj):
            weights.weight.zero_()
        embedding, head = model.model.embed_tokens.weight.zero_(), model.lm_head.weight.zero_()
        embedding[:, 0] = 1  # becomes 8 behind the norm, or less than 6 for a token of a chain
        head[fast.convert_tokens_to_ids(list(LIKELY)), 0] = torch.tensor(list(LIKELY.values())) / 8
        for chain in CHAINS:
            steps = fast.convert_tokens_to_ids([_as_bytes(text) for text in chain])
            for token, following in pairwise(steps):
                embedding[token, 1 + token % 63] += 1
                head[following, 1 + token % 63] += 20
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
