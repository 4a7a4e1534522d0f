"""Renders messages to tokens and parses responses. Sampled tokens are never decoded and encoded again.

render(messages) ─────────────────────────────> prompt tokens
extend(prompt tokens, sampled tokens, new messages)
    = prompt tokens + sampled tokens            verbatim
    + the end of the assistant's turn           if the sampled tokens lack it
    + new messages + generation prompt
parser(prompt tokens).feed(sampled tokens) ───> reasoning, content, tool calls
"""

from __future__ import annotations

import inspect
import json
import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from skyrl_train.errors import ConfigError
from skyrl_train.inference.chat.conversation import normalize_messages
from skyrl_train.inference.chat.families import find_family
from skyrl_train.inference.chat.formats import (
    FAMILY_TOOL_FORMATS,
    MessageFormat,
    guess_formats,
    message_format,
)
from skyrl_train.inference.chat.parsing import MessageBuilder, ResponseParser, StreamParser, WholeParser
from skyrl_train.inference.chat.pieces import PieceReader, Vocabulary
from skyrl_train.inference.grammar import after_reasoning, either
from skyrl_train.inference.interface import StructuredOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from skyrl_train.config.schema import GeneratorConfig

logger = logging.getLogger(__name__)

# A placeholder answer, rendered to see what a template puts after it. Letters and digits survive every template's
# trimming, and no template and no system prompt contains this text.
_ANSWER = "q7Zk3vX9"
_USER = {"role": "user", "content": "?"}
# Tokens at the end of a prompt in which an opening reasoning mark, with white space, is looked for.
_REASONING_MARK_TOKENS = 24
# Rendered conversations are cached for the samples of a group, which share their prompt; what follows an answer is cached too,
# because environments and tools repeat their messages. Longer keys are not, so that a cache holds at most 4 million characters.
_CACHED_CONVERSATIONS = 64
_CACHED_CHARACTERS = 65_536
_NO_KWARGS: Mapping[str, Any] = MappingProxyType({})
_KNOW_DEVELOPER = frozenset({"deepseek-v4", "gemma4", "gpt-oss"})
# Arguments that follow from fields of the APIs. A family without one ignores it, as a Jinja template does.
_API_ARGUMENTS = frozenset({"enable_thinking", "reasoning_effort"})

Messages = Sequence[Mapping[str, Any]]
T = TypeVar("T")


class ChatRenderer:
    """Renders conversations with the model's own chat format, and parses its responses.

    The ``renderers`` library renders the model families that it knows (by hub name, or recognised in a folder). Any other
    chat template is rendered with a placeholder to find the text between an answer and the next generation prompt.
    Without a template, a conversation is the concatenation of its contents.

    Earlier turns stay exactly as sampled, including reasoning that the template would drop from history: the tokens seen
    are the tokens trained on.

    Args:
        tool_parser: the format of tool calls by name (``formats.TOOL_FORMATS``, ``"none"``); None: the family's, else
            the one that template and vocabulary indicate, else JSON in ``<tool_call>``.
        reasoning_parser: ``"think"`` or ``"none"``; None: the family's, else by template and vocabulary.
        template_kwargs: arguments of the chat template in each call, such as ``{"enable_thinking": False}``; a call's own win.
        family: False: the tokenizer's template was replaced, so that the model's family says nothing.

    Raises:
        ConfigError: a parser's name is unknown.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model_name_or_path: str,
        *,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        template_kwargs: Mapping[str, Any] = _NO_KWARGS,
        family: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._name = model_name_or_path
        self._family = find_family(tokenizer, model_name_or_path) if family else None
        template = tokenizer.chat_template  # several named ones, in some tokenizers
        self._template = "\n".join(template.values()) if isinstance(template, dict) else str(template or "")
        self._parsers = (tool_parser, reasoning_parser)
        self._template_kwargs = dict(template_kwargs)
        message_format(tool_parser or "none", reasoning_parser or "none")  # reject unknown names early
        self._render = _cached(self._render_json)
        self._following = _cached(self._following_json)
        self._closing = _cached(self._closing_json)
        self._warned_of_tools = False
        self._warned_of_marks = False

    @classmethod
    def configured(cls, config: GeneratorConfig, tokenizer: PreTrainedTokenizerBase, model_path: str) -> ChatRenderer:
        """Return the renderer of a run, for a tokenizer with the template of ``generator.chat_template``.

        Raises:
            ConfigError: a parser's name is unknown.
        """
        return cls(
            tokenizer,
            model_path,
            tool_parser=config.chat.tool_parser,
            reasoning_parser=config.chat.reasoning_parser,
            template_kwargs=config.chat_template_kwargs,
            family=config.chat_template is None,
        )

    # Messages to tokens -------------------------------------------------------------------------------------------

    def render(
        self,
        messages: Messages,
        tools: Messages = (),
        template_kwargs: Mapping[str, Any] = _NO_KWARGS,
        continue_final: bool = False,
    ) -> list[int]:
        """Return the tokens of ``messages`` and the generation prompt.

        Args:
            messages: in OpenAI's chat shape.
            tools: OpenAI tool specifications, shown to the model.
            template_kwargs: further arguments of the chat template.
            continue_final: the response continues the last message, which is the assistant's: instead of a generation prompt, the
                prompt ends with the last character of that message, as transformers' ``continue_final_message`` has it.

        Raises:
            ConfigError: a message is malformed, the template rejects the messages, nothing is left to encode, or the chat format
                of a family cannot continue a message because the tokenizer has no chat template.
        """
        if not messages:
            raise ConfigError("messages is empty; a conversation needs at least one message.")
        key = _json([self.normalize(messages), list(tools), self._checked(template_kwargs), continue_final])
        return list(self._render(key))

    def _render_json(self, key: str) -> array[int]:
        messages, tools, template_kwargs, continue_final = json.loads(key)
        if self._family is not None and not continue_final:
            renderer = self._family.renderer(template_kwargs)
            try:
                ids = list(renderer.render_ids(messages, tools=tools or None, add_generation_prompt=True))
            except (ValueError, TypeError, LookupError, AttributeError, AssertionError, NotImplementedError) as error:
                raise ConfigError(
                    f"The chat format {self._family.name!r} of {self._name!r} refuses a conversation of "
                    f"{_roles(messages)}: {error}"
                ) from error
        elif self._template:
            ids = self.encode(self._apply(messages, tools, template_kwargs, _end(continue_final)))
        elif self._family is not None:
            raise ConfigError(
                f"The chat format {self._family.name!r} of {self._name!r} cannot continue a message of the assistant: the "
                "tokenizer has no chat template. End the conversation with another message."
            )
        else:
            if len(messages) > 1:
                self._warn_of_marks()
            ids = list(self._tokenizer(_contents(messages), add_special_tokens=True)["input_ids"])
            if len(ids) > 1 and ids[-1] == self._tokenizer.eos_token_id:
                ids.pop()  # some tokenizers append an end token, which would end the prompt before the answer
        if not ids:
            raise ConfigError(f"The conversation {messages!r:.200} has no tokens; a prompt must not be empty.")
        return array("i", ids)

    def extend(
        self,
        prompt_token_ids: Sequence[int],
        response_ids: Sequence[int],
        new_messages: Messages,
        tools: Messages = (),
        template_kwargs: Mapping[str, Any] = _NO_KWARGS,
        continue_final: bool = False,
    ) -> list[int]:
        """Return the next turn's prompt, which begins with ``prompt_token_ids + response_ids``.

        Args:
            continue_final: as for :meth:`render`.

        Raises:
            ConfigError: a message is malformed, or the template rejects the messages or rewrites answers so that it
                cannot be extended.
        """
        # 1. A family's renderer bridges to the next turn itself. 2. Another template is rendered after a placeholder answer.
        # 3. Without a template the contents are appended.
        previous = [*prompt_token_ids, *response_ids]
        new = self.normalize(new_messages)
        arguments = self._checked(template_kwargs)
        if self._family is not None and not continue_final:
            bridged = self._family.renderer(arguments).bridge_to_next_turn(
                list(prompt_token_ids),
                list(response_ids),
                new,
                tools=[dict(tool) for tool in tools] or None,
            )
            # A bridge that changes earlier tokens would train on tokens that were not sampled.
            if bridged is not None and bridged.token_ids[: len(previous)] == previous:
                return list(bridged.token_ids)
        if not self._template and self._family is not None:
            raise ConfigError(
                f"The chat format {self._family.name!r} cannot continue this conversation token by token."
            )
        following, closing, most = self._following(_json([new, list(tools), arguments, continue_final]))
        # The response may have sampled the beginning of what closes its turn (its end token, usually), or the end token without
        # the space that the template writes before it (Llama 2): do not repeat it.
        last, special = list(response_ids[-1:]), self._vocabulary.special
        closed = next(
            (
                length
                for length in range(len(closing), 0, -1)
                if list(response_ids[-length:]) == closing[:length]
                or (last == closing[length - 1 : length] and last[0] in special)
            ),
            0,
        )
        repeated = min(closed, most)
        # Or the mark of the next role, where that ends a turn (GLM).
        mark = following[0] if self._template and following else None
        if not repeated and mark in special and last == [mark]:
            repeated = 1
        return previous + following[repeated:].tolist()

    def _following_json(self, key: str) -> tuple[array[int], Sequence[int], int]:
        """Return the tokens between an answer and the next one, and the result of :meth:`_closing_json`."""
        new, tools, arguments, continue_final = json.loads(key)
        if not self._template:
            self._warn_of_marks()
            return self._encode_after_answer(_contents(new)), (), 0
        text = self._after_answer(new, tools, arguments, _end(continue_final))
        return self._encode_after_answer(text), *self._closing(_json([tools, arguments]))

    def _warn_of_marks(self) -> None:
        if not self._warned_of_marks:
            self._warned_of_marks = True
            logger.warning(
                "The tokenizer of %r has no chat template: the messages of a conversation run together, without a mark between "
                "them. generator.chat_template=FILE names one.",
                self._name,
            )

    def _closing_json(self, key: str) -> tuple[Sequence[int], int]:
        """Return the tokens that end the assistant's turn at the end of a conversation, and how many end it before other turns.

        At the end of a conversation, there may be one more (Phi) or another one (Harmony).
        """
        tools, arguments = json.loads(key)
        ends = {"add_generation_prompt": False}, {"add_generation_prompt": True}
        closing, following = (self._encode_after_answer(self._after_answer((), tools, arguments, end)) for end in ends)
        # What follows an answer may end with the generation prompt, which is what follows a question. Tools may be long.
        asked, prompted = (self.encode(self._apply([_USER], (), arguments, end)) for end in ends)
        pairs = enumerate(zip(asked, prompted, strict=False))
        opening = prompted[next((place for place, (one, other) in pairs if one != other), len(asked)) :]
        most = len(following) - len(opening)
        return closing.tolist(), most if following[max(0, most) :].tolist() == opening else len(following)

    def _after_answer(
        self, new: Messages, tools: Messages, template_kwargs: Mapping[str, Any], end: Mapping[str, Any]
    ) -> str:
        dummy = [_USER, {"role": "assistant", "content": _ANSWER}]
        text = self._apply([*dummy, *new], tools, template_kwargs, end)
        _, found, rest = text.partition(_ANSWER)
        # Without the placeholder in its output, nothing tells where the answer ends.
        if not found:
            raise ConfigError(
                f"The chat template of {self._name!r} drops earlier answers, so that a conversation cannot be "
                "continued token by token. Use generator.max_turns=1 or another template."
            )
        return rest

    def _apply(
        self, messages: Messages, tools: Messages, template_kwargs: Mapping[str, Any], end: Mapping[str, Any]
    ) -> str:
        from jinja2 import TemplateError

        if tools and "tools" not in self._template and not self._warned_of_tools:
            self._warned_of_tools = True
            logger.warning(
                "The chat template of %r does not show tools to the model. generator.chat_template=FILE names another one.",
                self._name,
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                **end,
                **template_kwargs,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ConfigError(
                f"The chat template of {self._name!r} refuses a conversation of {_roles(messages)}: {error}"
            ) from error
        return str(text)

    def normalize(self, messages: Messages) -> list[dict[str, Any]]:
        """Return the messages as they are rendered: contents as text, tool-call arguments as objects, known roles.

        Raises:
            ConfigError: a message is malformed; the error names its index and the field.
        """
        if self._family is not None:  # the library's renderers silently drop unknown roles
            knows_developer = self._family.name in _KNOW_DEVELOPER
            return normalize_messages(messages, knows_developer=knows_developer, strict_roles=True)
        knows_developer = not self._template or "developer" in self._template
        return normalize_messages(messages, knows_developer=knows_developer)

    def _checked(self, template_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if self._family is not None:
            family = self._family
            template_kwargs = {k: v for k, v in template_kwargs.items() if k not in _API_ARGUMENTS or family.takes(k)}
        template_kwargs = {**self._template_kwargs, **template_kwargs}
        for key in template_kwargs:
            if key in self._own_arguments:
                raise ConfigError(f"chat template argument {key!r} is set by the renderer; leave it out.")
        return template_kwargs

    @cached_property
    def _own_arguments(self) -> set[str]:
        """Arguments of the chat template that only the renderer sets."""
        return {*inspect.signature(self._tokenizer.apply_chat_template).parameters, "messages"} - {"kwargs"}

    def retokenise(self, token_ids: Sequence[int]) -> list[int]:
        """Decode and encode ``token_ids``. The result differs if the model split the text differently than the tokenizer."""
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return self.encode(str(text))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text`` without any that the tokenizer would add around it."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    @cached_property
    def _answer(self) -> list[int]:
        return self.encode(_ANSWER)

    def _encode_after_answer(self, text: str) -> array[int]:
        """Encode ``text`` as a continuation: some tokenizers put a space before the first word of a text."""
        if not text:
            return array("i")
        answer, both = self._answer, self.encode(_ANSWER + text)
        return array("i", both[len(answer) :] if both[: len(answer)] == answer else self.encode(text))

    # Tokens to messages -------------------------------------------------------------------------------------------

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end the model's turn."""
        if self._family is not None:
            return tuple(self._family.renderer({}).get_stop_token_ids())
        end = self._tokenizer.eos_token_id
        return () if end is None else (int(end),)

    def parser(self, prompt_token_ids: Sequence[int], tools: Messages = (), prefill: str = "") -> ResponseParser:
        """Return a parser for one response to ``prompt_token_ids``. Without ``tools``, tool calls are content.

        Args:
            prefill: the text of the assistant's message that the response continues.
        """
        if self._format is None and self._family is not None:
            return WholeParser(self._family.renderer({}), self._tokenizer, prompt_token_ids, tools)
        form = self._format or MessageFormat()
        reader = PieceReader(self._vocabulary, form.marks(with_tools=bool(tools)), frozenset(self.stop_token_ids))
        opened = self._reasoning_open(form, prompt_token_ids, prefill)
        return StreamParser(reader, MessageBuilder(form, tools, prompt_token_ids, reasoning_open=opened))

    def _reasoning_open(self, form: MessageFormat, prompt_token_ids: Sequence[int], prefill: str) -> bool:
        """Return whether generation prompt or prefill open reasoning; then the response has only the closing mark."""
        if form.reasoning is None:
            return False
        if prefill:
            return prefill.rfind(form.reasoning[0]) > prefill.rfind(form.reasoning[1])
        tail = list(prompt_token_ids[-_REASONING_MARK_TOKENS:])
        return str(self._tokenizer.decode(tail, skip_special_tokens=False)).rstrip().endswith(form.reasoning[0])

    def forced_call(self, tools: Messages) -> StructuredOutput:
        """Return the grammar of a response that is one call of one of ``tools``.

        Raises:
            ConfigError: the format of the model's calls has no grammar here.
            GrammarError: the parameters of a tool are no schema, or have keywords that a strict tool cannot have.
        """
        form = None if self._format is None else self._format.tools
        if form is None:
            raise ConfigError(
                f"tool_choice: nothing here can force a call in the format of {self._name!r}. Ask for the call in a message."
            )
        return StructuredOutput("grammar", form.grammar(tools, self._token_ids))

    def end_of_call(self) -> tuple[int, ...]:
        """Return the tokens that end a call; none for a format in which a response is one call.

        Raises:
            ConfigError: the mark behind a call has no token, or is not behind each call.
        """
        form = None if self._format is None else self._format.tools
        if form is not None and not form.marks:
            return ()
        end = None if form is None or form.several else self._token_ids.get([*form.marks.values()][1])
        if end is None:
            raise ConfigError(
                f"parallel_tool_calls is false: nothing here can end a response behind its first call in the format of "
                f"{self._name!r}. Leave it out, or force a call with tool_choice, which is then the only one."
            )
        return (end,)

    def answer_or_call(self, structured: StructuredOutput, tools: Messages) -> StructuredOutput:
        """Return the grammar of a response that follows ``structured``, or is one call of one of ``tools``.

        Where the format of the model's calls has no grammar here, this is ``structured``. ``strict`` has no effect: like a call
        beside free text, no call is refused for a keyword that the library cannot follow.

        Raises:
            GrammarError: the parameters of a tool are no schema.
        """
        if self._format is None or self._format.tools is None:
            return structured
        lenient = [{**tool, "function": {**tool["function"], "strict": False}} for tool in tools]
        return either(structured, self.forced_call(lenient))

    def guided(
        self,
        structured: StructuredOutput,
        prompt_token_ids: Sequence[int],
        prefill: str = "",
        template_kwargs: Mapping[str, Any] = _NO_KWARGS,
    ) -> StructuredOutput:
        """Return the grammar of a response: free reasoning, and then ``structured``.

        There is reasoning where the prompt has opened it. With ``enable_thinking`` in the arguments of the template, a model
        that writes the opening mark itself (Qwen3) may also begin with it. Without, it may not: a model that was never trained
        to think would prefer the mark to an answer that it finds unlikely.
        """
        form = self._format or MessageFormat()
        if form.reasoning is None:
            return structured
        opening, closing = form.reasoning
        token = self._token_ids.get(closing)
        if self._reasoning_open(form, prompt_token_ids, prefill):
            return after_reasoning(structured, closing, token)
        thinks = {**self._template_kwargs, **template_kwargs}.get("enable_thinking")
        if thinks and not prefill and token is not None and opening in self._token_ids:
            return after_reasoning(structured, closing, token, self._token_ids[opening])
        return structured

    @cached_property
    def _format(self) -> MessageFormat | None:
        """The response format; None: the library parses whole responses of this family."""
        tool_parser, reasoning_parser = self._parsers
        if self._family is not None:
            name = FAMILY_TOOL_FORMATS.get(self._family.name)
            if name is None and tool_parser is None and reasoning_parser is None:
                return None
            return message_format(tool_parser or name or "none", reasoning_parser or "think")
        # Unknown family: the marks in the template and the vocabulary show the format.
        hints = "\n".join([self._template, *self._vocabulary.added.values()])
        tools, reasoning = guess_formats(hints)
        return message_format(tool_parser or tools, reasoning_parser or reasoning)

    @cached_property
    def _token_ids(self) -> dict[str, int]:
        """The added tokens by their text."""
        return {text: token for token, text in self._vocabulary.added.items()}

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self._tokenizer)


def _cached(function: Callable[[str], T]) -> Callable[[str], T]:
    """Cache the latest results of ``function`` for keys that are not too long."""
    cached = lru_cache(maxsize=_CACHED_CONVERSATIONS)(function)
    return lambda key: (cached if len(key) <= _CACHED_CHARACTERS else function)(key)


def _end(continue_final: bool) -> dict[str, Any]:
    """Return the arguments of transformers for the end of a prompt."""
    return {"continue_final_message": True} if continue_final else {"add_generation_prompt": True}


def _json(value: object) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"A conversation must consist of JSON values: {error}") from error


def _contents(messages: Messages) -> str:
    return "".join(str(message["content"]) for message in messages)


def _roles(messages: Messages) -> list[Any]:
    return [message.get("role") for message in messages]
