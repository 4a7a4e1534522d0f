"""Grammars as token masks: which tokens may come next, as a pure function of the tokens sampled so far.

    StructuredOutput ──Grammars.matcher──> GrammarMatcher ──mask──> allowed tokens ──sampled──> consume ──> mask ...

llguidance reads JSON schemas, regular expressions and its variant of Lark, and computes masks while the text grows, so that
little is done in advance. A matcher that is given the tokens of an interrupted response allows exactly the same tokens as the
uninterrupted one: this is how a response is continued, and how the trainer learns the masks of a finished one.

Added tokens (``<think>``, ``<tool_call>``, ``<|im_end|>``) are no text: a grammar names them by id (``<[151657]>``), and
otherwise never allows them.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from skyrl_train.errors import GrammarError
from skyrl_train.inference import grammar_trial
from skyrl_train.inference.interface import StructuredOutput
from skyrl_train.inference.response_text import token_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.configuration_utils import PreTrainedConfig

_VALUES = frozenset(("const", "enum", "default", "examples"))  # keywords of JSON schemas whose values are no schemas
# Look-around or a back reference in a pattern
_LOOKS_AROUND = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?(?:<?[=!]|P=)|\\[1-9k])")
# Line and column in the library's messages
_PLACE = re.compile(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?")
# Beyond a limit, in the library's messages
_TOO_COMPLEX = re.compile("max is|fuel|too many|limit")
_EXCERPT = re.compile(r"\n\s*\d+ \| .*", re.DOTALL)  # of the grammar, which is not the caller's text
Mask = npt.NDArray[np.uint8]  # packed bits of the vocabulary, the first token in the lowest bit: [ceil(vocab_size / 8)]

MAX_CHARACTERS = 1 << 17  # of a schema or another grammar
_REMEMBERED_TRIALS = 1024
_trials: dict[str, Future[str]] = {}  # what is wrong with a grammar, by its text
_trial_threads = ThreadPoolExecutor(2, "grammar-trial")  # few, because each waits for a process that uses a core
_COMPILED = 64  # grammars that are kept compiled; an agent repeats its few
_REMEMBERED_TEXTS, _LONGEST_REMEMBERED = 4096, 256  # texts whose tokens are kept, and their characters: a few MiB


class GrammarMatcher:
    """The position of one response in its grammar.

    Where the grammar leaves no choice for several tokens, the library is asked once: it names them all, each is the only one in
    its mask, and the library takes them together with the last.

    Attributes:
        mask: the tokens that may come next, since the last :meth:`compute_mask`. It stays the same array.
        error: why :func:`advance` failed; None: it did not.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        end: int,
        ends: Collection[int],
        bits: int,
        is_stable: Callable[[list[int], bytes], bool],
    ) -> None:
        self._matcher = matcher
        self._end, self._ends = end, ends
        self._is_stable = is_stable
        # The response has ``_taken`` of these, fewer than all, and the library's matcher none.
        self._forced: Sequence[int] = ()
        self._taken = 0
        self.mask: Mask = np.zeros(-(-bits // 32) * 4, np.uint8)
        # Kept, because each of these takes numpy longer than some masks take the library.
        self._address, self._bytes, self._view = self.mask.ctypes.data, self.mask.nbytes, self.mask.data
        self.error: GrammarError | None = None

    def consume(self, token_ids: Sequence[int]) -> None:
        """Take sampled tokens. An end token is not among them: after it, a grammar has no position.

        Raises:
            GrammarError: a token is not allowed, or the grammar has become too complex at this place.
        """
        if self._forced:
            after = self._taken + 1
            if len(token_ids) == 1 and after < len(self._forced) and token_ids[0] == self._forced[self._taken]:
                self._taken = after
                return
            token_ids = [*self._forced[: self._taken], *token_ids]
            self._forced, self._taken = (), 0
        if not self._matcher.consume_tokens(list(token_ids)):
            raise self._error()

    def compute_mask(self) -> Mask:
        """Compute ``mask`` for the next token, in place, and return it.

        Raises:
            GrammarError: no token is allowed, or the grammar has become too complex at this place.
        """
        if not self.follow_forced():
            self._matcher.unsafe_compute_mask_ptr(self._address, self._bytes)
            self._finish_mask()
        return self.mask

    def follow_forced(self) -> bool:
        """Set ``mask`` if the grammar leaves no choice here and at the next token. Returns whether it does so."""
        if not self._forced:
            forced = self._matcher.compute_ff_tokens()
            if len(forced) < 2 or not self._is_stable(forced, self._matcher.compute_ff_bytes()):
                return False
            self._forced = forced
        self.mask.fill(0)
        token = self._forced[self._taken]
        self._view[token // 8] = 1 << token % 8
        return True

    def _finish_mask(self) -> None:
        # The library knows one list of end tokens, a request may have others. In error, its mask is that list.
        if self._view[self._end // 8] >> self._end % 8 & 1:
            if self._matcher.is_error():
                raise self._error()
            for token in self._ends:
                self._view[token // 8] |= 1 << token % 8

    def ended_by(self, token: int) -> bool:
        """Return whether ``token`` ends the response here."""
        # A response cannot end where text is forced, neither at the library's place nor at this one.
        return token in self._ends and self._matcher.is_accepting()

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens could come next, one after the other. They are not consumed."""
        return self._matcher.validate_tokens([*self._forced[: self._taken], *token_ids]) - self._taken

    def rollback(self, num_tokens: int) -> None:
        """Undo :meth:`consume` for the last tokens."""
        if num_tokens > self._taken:
            self._matcher.rollback(num_tokens - self._taken)
            self._forced = ()
        self._taken = max(0, self._taken - num_tokens)

    def _error(self) -> GrammarError:
        reason = self._matcher.get_error()
        if reason.startswith("NoExtension"):
            return GrammarError("The grammar asks for text that the model's vocabulary cannot spell.")
        return GrammarError(f"The grammar cannot be followed here: {_one_line(reason)}")


def advance(sampled: Sequence[tuple[GrammarMatcher, int]], executor: LLExecutor | None) -> None:
    """Take a sampled token of each of many responses, and compute their next masks. Other threads run meanwhile, and must not use
    these matchers.

    A matcher that fails keeps its ``error``, and the others are not concerned.

    Args:
        executor: the library's threads. None: this thread does everything, in half the time of an executor of one.
    """
    choosing = []
    for matcher, token in sampled:
        try:
            matcher.consume([token])
            if executor is None:
                matcher.compute_mask()
            elif not matcher.follow_forced():
                choosing.append(matcher)
        except GrammarError as error:
            matcher.error = error
    if executor is None or not choosing:
        return
    masks = np.empty((len(choosing), choosing[0].mask.size), np.uint8)
    executor.unsafe_compute_mask_ptr(
        [(matcher._matcher, row) for row, matcher in enumerate(choosing)],
        masks.ctypes.data,
        masks.shape[1],
        len(masks),
    )
    for matcher, mask in zip(choosing, masks, strict=True):
        matcher.mask[:] = mask
        try:
            matcher._finish_mask()
        except GrammarError as error:
            matcher.error = error


class Grammars:
    """The grammars of one model.

    Args:
        config: the model's. With the tokenizer, it alone names the end tokens: the engine and the trainer, which has other
            files of the model, must agree on them.

    Attributes:
        eos_ids: the tokens that end a response of this model.
        tokens: the vocabulary, as the library reads it.

    Raises:
        GrammarError: the model has no end token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
        self.eos_ids = end_token_ids(tokenizer, config)
        if not self.eos_ids:
            raise GrammarError(
                "Neither the model's config nor its tokenizer names an end token, with which a response under a grammar ends."
            )
        self._vocab_size = vocab_size = int(config.get_text_config(decoder=True).vocab_size)
        wrapper = _TokenizerWrapper(tokenizer, vocab_size, self.eos_ids)
        self._marks = frozenset(wrapper.special_token_ids)
        self._is_stable = wrapper.is_stable
        self.tokens = LLTokenizer(wrapper, eos_token=self.eos_ids[0])  # type: ignore[arg-type]  # read by its attributes
        self._compile = lru_cache(maxsize=_COMPILED)(self._compile_text)

    def matcher(
        self, structured: StructuredOutput, token_ids: Sequence[int] = (), stop_ids: Iterable[int] = ()
    ) -> GrammarMatcher:
        """Return the matcher of a response that has ``token_ids`` so far.

        Where the grammar allows the response to end, it may end with any of the model's end tokens, or with one of ``stop_ids``
        that is not text. A stop token that is text is a letter as any other to the grammar.

        Raises:
            GrammarError: the grammar cannot be compiled; the message names the keyword. Or it does not allow ``token_ids``.
        """
        ends = {*self.eos_ids, *(token for token in stop_ids if token in self._marks)}
        matcher = GrammarMatcher(
            self._compile(grammar_text(structured)).deep_copy(),
            self.eos_ids[0],
            ends,
            self._vocab_size,
            self._is_stable,
        )
        matcher.consume(token_ids)
        matcher.compute_mask()
        return matcher

    def replay(
        self, structured: StructuredOutput, token_ids: Sequence[int], stop_ids: Iterable[int] = ()
    ) -> Iterator[Mask]:
        """Yield the mask of each token of a response that has at least one. The next mask overwrites the array.

        Raises:
            GrammarError: see :meth:`matcher`.
        """
        matcher = self.matcher(structured, (), stop_ids)
        yield matcher.mask
        for token in token_ids[:-1]:  # after an end token, a grammar has no mask
            matcher.consume([token])
            yield matcher.compute_mask()

    def _compile_text(self, text: str) -> LLMatcher:
        matcher = LLMatcher(self.tokens, text, log_level=0, limits=grammar_trial.LIMITS)
        if matcher.is_error():
            raise GrammarError(f"The grammar cannot be compiled: {_one_line(matcher.get_error())}")
        return matcher


def end_token_ids(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the tokens that end a response of the model under a grammar; none if neither argument names one."""
    text = config.get_text_config(decoder=True)
    ends = getattr(text, "eos_token_id", None)
    of_config = [ends] if isinstance(ends, int) else ends or []
    # An id that the model does not have cannot be sampled.
    return tuple(sorted(i for i in {*of_config, tokenizer.eos_token_id} if i is not None and i < text.vocab_size))


def grammar_text(structured: StructuredOutput) -> str:
    """Return the grammar in the library's language.

    Raises:
        GrammarError: it is too long, or has half of a surrogate pair.
    """
    kind, value = structured.kind, structured.value
    if len(value) > MAX_CHARACTERS:
        raise GrammarError(f"The grammar has {len(value)} characters; at most {MAX_CHARACTERS} are compiled.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise GrammarError(f"The grammar has half of a surrogate pair: {error}") from error
    match kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}')
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(value)
        case "regex":
            return LLMatcher.grammar_from_regex(value)
        case "grammar":
            return LLMatcher.grammar_from_lark(value)


def schema_text(schema: Mapping[str, Any], *, strict: bool) -> str:
    """Return a JSON schema as the text of a grammar.

    Without ``strict``, keywords that the library cannot follow are skipped. ``oneOf`` with a ``discriminator`` becomes ``anyOf``:
    the library follows ``oneOf`` only where it can prove that the alternatives exclude each other, as these do.
    """
    followed = _followed(schema, strict)
    options = followed.get("x-guidance", {})
    if not strict and isinstance(options, dict):
        followed["x-guidance"] = {"lenient": True, **options}
    return json.dumps(followed)


def _followed(schema: Any, strict: bool) -> Any:
    if isinstance(schema, list):
        return [_followed(entry, strict) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    followed = {}
    for keyword, value in schema.items():
        if keyword == "pattern" and not strict and isinstance(value, str) and _LOOKS_AROUND.search(value):
            continue  # the library's lenient mode does not skip it
        if keyword == "oneOf" and isinstance(value, list) and "discriminator" in schema and "anyOf" not in schema:
            keyword = "anyOf"
        followed[keyword] = value if keyword in _VALUES else _followed(value, strict)
    return followed


def after_reasoning(
    structured: StructuredOutput, closing: str, token: int | None, opening: int | None = None
) -> StructuredOutput:
    """Return a grammar that allows free text up to the mark ``closing``, and then ``structured``.

    Args:
        token: the mark's. None: the mark is spelt out. Nothing could tell it from the text before it, so there is no such text.
        opening: the token of the opening mark, if the response may begin with it, or else with ``structured``. None: the
            prompt has opened the reasoning.
    """
    reasoning = json.dumps(closing + "\n\n") if token is None else f"REASONING? <[{token}]> LINES?"
    if opening is not None:
        reasoning = f"(<[{opening}]> {reasoning})?"
    text = f"start: {reasoning} answer\nanswer: {_rules(structured)}"
    if token is not None:
        text += "\nREASONING: /(.|\\n)+/\nLINES: /\\n+/"
    return StructuredOutput("grammar", text)


def either(one: StructuredOutput, other: StructuredOutput) -> StructuredOutput:
    """Return a grammar that allows what either of two grammars allows, of which at most one has rules besides ``start``."""
    return StructuredOutput("grammar", f"start: one | other\none: {_rules(one)}\nother: {_rules(other)}")


def _rules(structured: StructuredOutput) -> str:
    """Return the grammar in Lark, without the name of its first rule."""
    match structured.kind:
        case "json_object":
            return '%json {"type": "object"}'
        case "json_schema":
            return f"%json {structured.value}"
        case "regex":
            (grammar,) = json.loads(LLMatcher.grammar_from_regex(structured.value))["grammars"]
            return str(grammar["lark_grammar"]).removeprefix("start: ")
        case _:
            return structured.value.removeprefix("start: ")


async def check_grammar(structured: StructuredOutput, field: str = "", fields: Mapping[str, str] | None = None) -> None:
    """Compile a caller's grammar in a process that has limits, before an engine compiles it beside its requests.

    Requests with the same grammar share one trial. A trial continues when its caller is cancelled.

    Args:
        field: the field of the request that asks for the grammar, for the error. Empty: unknown.
        fields: other fields, by the rules of the grammar that they ask for.

    Raises:
        GrammarError: it cannot be compiled within the limits; the message has the library's reason.
    """

    def failed(message: str) -> GrammarError:
        return GrammarError.of_field(field, message) if field else GrammarError(message)

    try:
        text = grammar_text(structured)
    except GrammarError as error:
        raise failed(str(error)) from error
    trial = _trials.get(text)
    if trial is None:
        while len(_trials) >= _REMEMBERED_TRIALS:
            del _trials[next(iter(_trials))]
        trial = _trials[text] = _trial_threads.submit(_try_grammar, text)
    try:
        problem = await asyncio.shield(asyncio.wrap_future(trial))
    except OSError:  # the machine has no room for a process now; a later request tries again
        _trials.pop(text, None)
        raise
    if not problem:
        return
    if (place := _PLACE.match(problem)) is not None and structured.kind == "grammar":
        lines = structured.value.splitlines()
        rule = lines[min(int(place[1]), len(lines)) - 1].partition(":")[0]
        field = next((other for name, other in (fields or {}).items() if f"{rule}_".startswith(f"{name}_")), field)
    raise failed(f"The grammar cannot be compiled: {_one_line(problem)}")


def _try_grammar(text: str) -> str:
    """Return what is wrong with a grammar; empty if it can be compiled."""
    # -P: the folder of the program has modules of this package, which would hide other packages' modules of the same name.
    command = [sys.executable, "-P", grammar_trial.__file__]
    ended = subprocess.run(command, input=text.encode(), capture_output=True, check=False)
    if ended.returncode < 0:  # ended by the kernel
        return f"it takes more than {grammar_trial.CPU_S} s or 2 GiB of memory. Make it simpler."
    # With another code, the program itself failed: the last line of its traceback says why.
    output = ended.stderr.splitlines()[-1] if ended.returncode else ended.stdout
    return output.decode(errors="replace")


class _TokenizerWrapper:
    """The tokens as bytes, with the attributes that ``LLTokenizer`` reads of llguidance's own class of this name."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self.tokens = token_bytes(tokenizer, vocab_size)
        self.eos_token_id = eos_ids[0]
        # Added words are text. Marks are recognised as llguidance does for tokenizers that it reads itself.
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        marks = {
            token: each.content.encode()
            for token, each in added.items()
            if token < vocab_size and (each.special or (each.content.startswith("<") and each.content.endswith(">")))
        }
        self.special_token_ids = sorted({*marks, *eos_ids})
        special = set(self.special_token_ids)
        self._by_bytes = {data: token for token, data in enumerate(self.tokens) if data and token not in special}
        self._longest = max(map(len, self._by_bytes), default=0)
        for token, content in marks.items():
            self.tokens[token] = content
        self._tokenizer = tokenizer.backend_tokenizer
        self._special = special
        self._remembered = lru_cache(maxsize=_REMEMBERED_TEXTS)(self._tokenize)
        self._remembered_stable = lru_cache(maxsize=_REMEMBERED_TEXTS)(self._check_stable)

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of text that the grammar leaves no choice about: the tokenizer's own, where they spell it.

        The library asks for each token of such a text, with what is left of it, and responses repeat the texts of their schema.
        """
        return self._remembered(text) if len(text) <= _LONGEST_REMEMBERED else self._tokenize(text)

    def is_stable(self, forced: list[int], text: bytes) -> bool:
        """Return whether the library forces these tokens of a forced text one after the other, too, when it is asked for each.

        It then reads each again, after the token before it, with all of the text that is left.
        """
        return len(text) <= _LONGEST_REMEMBERED and self._remembered_stable(tuple(forced), text)

    def _check_stable(self, forced: tuple[int, ...], text: bytes) -> bool:
        # Marks have an end of the response among them, and the library writes them in another way.
        if not self._special.isdisjoint(forced):
            return False
        start = 0
        for before, token in pairwise(forced):
            try:
                if self(text[start:].decode())[:2] != [before, token]:
                    return False
            except UnicodeDecodeError:  # a token that ends within a letter
                return False
            start += len(self.tokens[before])
        return True

    def _tokenize(self, text: str) -> list[int]:
        data = text.encode()
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if b"".join(self.tokens[token] for token in ids) == data and not set(ids).intersection(self.special_token_ids):
            return ids
        # A tokenizer that puts a space before the first word, or whose vocabulary lacks a letter: the longest tokens.
        ids, start = [], 0
        while start < len(data):
            size = next((n for n in range(self._longest, 0, -1) if data[start : start + n] in self._by_bytes), 0)
            if not size:
                break
            ids.append(self._by_bytes[data[start : start + size]])
            start += size
        return ids


def _one_line(message: str) -> str:
    """Return a message of the library without the grammar that it quotes, and with what to do about a limit."""
    if message.startswith("NoExtension"):
        return "it allows no text."
    message = _EXCERPT.sub("", _PLACE.sub("", message, count=1)).replace("<non-verbose/>", "")
    remedy = ". Make the grammar simpler." if _TOO_COMPLEX.search(message) else ""
    return f"{' '.join(message.split()):.500}{remedy}"
