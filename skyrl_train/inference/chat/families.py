"""Selects the renderer of the ``renderers`` library that fits a model, if there is one.

A hub name that the library lists selects its family. For a folder, the architecture in ``config.json`` suggests a family,
which is used only if its renderer produces the same tokens as the folder's own chat template.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_train.errors import ConfigError

if TYPE_CHECKING:
    from renderers import Renderer
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# Architectures with one chat format. The token check avoids importing the library for small models with another vocabulary.
_BY_MODEL_TYPE = {
    "qwen3": (("qwen3",), "<|im_start|>"),
    "qwen3_moe": (("qwen3",), "<|im_start|>"),
    "glm4_moe": (("glm-4.5",), "<|assistant|>"),
    "deepseek_v3": (("deepseek-v3", "deepseek-r1"), "<｜Assistant｜>"),
    "minimax_m2": (("minimax-m2",), "]~b]"),
}
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
}
_ASK = {"role": "user", "content": "How many?"}
_CALL = {"id": "c", "type": "function", "function": {"name": "probe", "arguments": {"x": 1}}}
_PROBES: tuple[tuple[list[Any], list[Any] | None], ...] = (
    ([_ASK], None),
    ([{"role": "system", "content": "Be brief."}, _ASK, {"role": "assistant", "content": "Two."}, _ASK], None),
    (
        [
            _ASK,
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "content": "3", "tool_call_id": "c", "name": "probe"},
        ],
        [_PROBE_TOOL],
    ),
)


class Family:
    """A model family of the library. Creates one renderer per set of template arguments."""

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self.name = name
        self._tokenizer = tokenizer
        self._made = lru_cache(maxsize=16)(self._make)

    def takes(self, argument: str) -> bool:
        """Return whether the family's chat template has this argument."""
        from renderers import config_from_name

        config = config_from_name(self.name)
        return config is not None and argument in type(config).template_field_names()

    def renderer(self, template_kwargs: Mapping[str, Any]) -> Renderer:
        """Return the renderer for these arguments of the chat template.

        Raises:
            ConfigError: the family's template has no such argument, or the value is impossible.
        """
        return self._made(json.dumps(dict(template_kwargs), sort_keys=True))

    def _make(self, template_kwargs: str) -> Renderer:
        from renderers import config_from_name, create_renderer
        from renderers.base import merge_chat_template_kwargs

        config = config_from_name(self.name)
        if config is None:
            raise ConfigError(f"The renderers library has no family {self.name!r}.")
        # "all": the bridge to a new turn must keep the reasoning of earlier turns.
        config = type(config)(thinking_retention="all")
        try:
            return create_renderer(self._tokenizer, merge_chat_template_kwargs(config, json.loads(template_kwargs)))
        except ValueError as error:
            raise ConfigError(f"chat template arguments of {self.name!r}: {error}") from error


def find_family(tokenizer: PreTrainedTokenizerBase, name_or_path: str) -> Family | None:
    """Return the family of a hub name or a model folder; None: only the chat template is known."""
    if not name_or_path:
        return None
    folder = Path(name_or_path)
    if folder.is_dir():
        return _family_of_folder(tokenizer, folder)
    # Imported late: it takes seconds, and a folder of another architecture never needs it.
    from renderers.base import MODEL_RENDERER_MAP

    name = MODEL_RENDERER_MAP.get(name_or_path)
    return None if name is None else Family(name, tokenizer)


def _family_of_folder(tokenizer: PreTrainedTokenizerBase, folder: Path) -> Family | None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    model_type = config.get("model_type") if isinstance(config, dict) else None
    candidates, mark = _BY_MODEL_TYPE.get(model_type if isinstance(model_type, str) else "", ((), ""))
    if not candidates or not tokenizer.chat_template or tokenizer.backend_tokenizer.token_to_id(mark) is None:
        return None
    families = (Family(name, tokenizer) for name in candidates)
    family = next((family for family in families if _writes_like_the_template(family, tokenizer)), None)
    logger.info("chat format of %s: %s", folder, family.name if family else "its own template")
    return family


def _writes_like_the_template(family: Family, tokenizer: PreTrainedTokenizerBase) -> bool:
    try:
        renderer = family.renderer({})
        return all(
            list(renderer.render_ids(messages, tools=tools, add_generation_prompt=True))
            == list(tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False))
            for messages, tools in _PROBES
        )
    except Exception:  # an unknown template may fail in any way; then it does not match
        logger.debug("%s does not fit", family.name, exc_info=True)
        return False
