"""OpenAI's completions, the older endpoint: ``POST /v1/completions``. Prompts are text or tokens; there are no messages."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Discriminator, Field, Tag

from skyrl_train.inference.chat.requests import PromptPlan
from skyrl_train.inference.chat.service import RecordingSession
from skyrl_train.inference.grammar import check_grammar
from skyrl_train.inference.interface import SamplingParams
from skyrl_train.inference.openai.body import (
    MAX_TOP_LOGPROBS,
    NonEmpty,
    OpenAIBody,
    TokenCount,
    TokenId,
    Unsupported,
    Whole,
)
from skyrl_train.inference.openai.chat import DONE
from skyrl_train.inference.openai.dialect import Frame, ResponseContext, TokenTexts, training_data, usage
from skyrl_train.inference.openai.errors import DialectError, openai_error
from skyrl_train.inference.requests import Generation, GenerationChunk, GenerationRequest, GenerationService
from skyrl_train.inference.text_length import LONG_TEXT, check_characters, longest_context
from skyrl_train.runtime.concurrency import gather_or_cancel, merged

if TYPE_CHECKING:
    from skyrl_train.inference.client import RequestClient

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_PROMPTS = 128
Prompt = str | list[int]


def _kind_of_prompt(value: Any) -> str:
    if not isinstance(value, list):
        return "=text"
    # The first entry decides. Validation as that kind then names any entry of another kind.
    first = value[0] if value else None
    return "=texts" if isinstance(first, str) else "=token lists" if isinstance(first, list) else "=tokens"


Tokens = Annotated[list[TokenId], Field(min_length=1)]


class CompletionBody(OpenAIBody):
    """The body of ``POST /v1/completions``."""

    prompt: Annotated[
        Annotated[NonEmpty, Tag("=text")]
        | Annotated[list[NonEmpty], Field(max_length=MAX_PROMPTS), Tag("=texts")]
        | Annotated[Tokens, Tag("=tokens")]
        | Annotated[list[Tokens], Field(max_length=MAX_PROMPTS), Tag("=token lists")],
        Discriminator(_kind_of_prompt),
    ] = Field(description="a text, tokens, or a list of either")
    max_tokens: TokenCount | None = Field(None, description=f"default {DEFAULT_MAX_TOKENS}")
    logprobs: Annotated[int, Whole(0, MAX_TOP_LOGPROBS)] | None = Field(
        None, description="alternatives per token; 0: of the sampled ones"
    )
    echo: bool | None = Field(None, description="the text begins with the prompt's; without logprobs")
    best_of: Annotated[Any, Unsupported("it would hide samples that were drawn; use n", 1)] = None
    add_special_tokens: Annotated[Any, Unsupported("use token ids", True)] = None
    prompt_embeds: Annotated[Any, Unsupported("prompts are text or tokens")] = None
    suffix: Annotated[Any, Unsupported("the models here write to the right only")] = None


def parse(body: Mapping[str, Any]) -> CompletionCall:
    """Validate a body.

    Raises:
        DialectError: the body is wrong, or asks for what is not supported.
    """
    read = CompletionBody.parse(body)
    # A list of integers is one prompt of tokens; any other list is a list of prompts.
    several = isinstance(read.prompt, list) and not isinstance(read.prompt[0], int)
    prompts: list[Any] = list(read.prompt) if several else [read.prompt]
    params = read.sampling_params(
        read.max_tokens or DEFAULT_MAX_TOKENS,
        n=read.n or 1,
        seed=read.seed,
        stop=tuple(read.stop or ()),
        top_logprobs=read.logprobs or 0,
        structured=read.grammar,
    )
    if read.echo and read.logprobs is not None:
        raise DialectError(
            "echo is only allowed without logprobs: the prompt's tokens have no behaviour log-probs.",
            "echo",
            "unsupported_parameter",
        )
    if len(prompts) * params.n > MAX_PROMPTS:
        raise DialectError(
            f"{len(prompts)} prompts with n={params.n} make more than {MAX_PROMPTS} responses.", "n", "invalid_value"
        )
    return CompletionCall(
        model=read.model,
        prompts=prompts,
        params=params,
        streamed=bool(read.stream),
        include_usage=read.include_usage,
        logprobs=read.logprobs is not None,
        token_ids=bool(read.return_token_ids),
        echo=bool(read.echo),
        grammar_field=read.grammar_field,
    )


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """A parsed body. Response number ``i`` is choice ``i % n`` of prompt ``i // n``. ``grammar_field`` is as in a ChatRequest."""

    model: str
    prompts: list[Prompt]
    params: SamplingParams
    streamed: bool = False
    include_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    echo: bool = False
    grammar_field: str = ""

    def response(self, done: Sequence[Generation], context: ResponseContext) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        choices = []
        for index, generation in enumerate(done):
            shown: dict[str, Any] = {
                "index": index,
                "text": self.echoed(index, context.tokens) + generation.text,
                "logprobs": self.shown_logprobs(generation, context.tokens, 0),
                "finish_reason": str(generation.stop_reason),
            }
            if self.token_ids:
                shown["prompt_token_ids"], shown["token_ids"] = generation.prompt_token_ids, generation.token_ids
                shown["skyrl"] = {"prompt_token_ids": generation.prompt_token_ids, **training_data(generation)}
            choices.append(shown)
        return {**_head(self.model, context), "choices": choices, "usage": completions_usage(done, self.params.n)}

    def stream(self, context: ResponseContext) -> CompletionStream:
        """Return the formatter of one streamed response."""
        return CompletionStream(self, context)

    def echoed(self, index: int, tokens: TokenTexts) -> str:
        """Return the text of the prompt of response ``index``, if it is to be shown, else nothing."""
        prompt = self.prompts[index // self.params.n] if self.echo else ""
        return prompt if isinstance(prompt, str) else tokens.decode(prompt)

    def shown_logprobs(
        self, sampled: Generation | GenerationChunk, tokens: TokenTexts, offset: int
    ) -> dict[str, Any] | None:
        """Return log-probs in the older shape; None if not requested. ``offset``: characters before these tokens."""
        if not self.logprobs:
            return None
        texts = [tokens[token_id].text for token_id in sampled.token_ids]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        alternatives: list[dict[str, float]] = []
        top = sampled.top_logprobs or [[]] * len(texts)
        for text, logprob, others in zip(texts, sampled.logprobs, top, strict=True):
            # The sampled token comes last, so that it wins over another token with the same spelling.
            alternatives.append({**{tokens[other].text: value for other, value in others}, text: logprob})
        return {
            "tokens": texts,
            "token_logprobs": sampled.logprobs,
            "top_logprobs": alternatives,
            "text_offset": offsets,
        }


class CompletionStream:
    """Formats chunks in the shape of whole responses; then the usage if requested, and [DONE]."""

    def __init__(self, call: CompletionCall, context: ResponseContext) -> None:
        self._call = call
        self._tokens = context.tokens
        self._head = _head(call.model, context)
        if call.include_usage:
            self._head["usage"] = None
        self._offsets = [0] * (len(call.prompts) * call.params.n)  # characters of each response so far
        self._done: dict[int, Generation] = {}
        self._prompts: dict[int, list[int]] = {}  # to be shown with the next frame of each response
        self._to_echo = set(range(len(self._offsets))) if call.echo else set()
        self._shows_tokens = call.logprobs or call.token_ids

    def chunk(self, index: int, chunk: GenerationChunk) -> list[Frame]:
        """Return at most one frame."""
        done = chunk.generation
        if chunk.prompt_token_ids is not None:
            self._prompts[index] = chunk.prompt_token_ids
        if done is not None:
            self._done[index] = done
        elif not chunk.text and not (self._shows_tokens and chunk.token_ids):
            return []
        text = chunk.text
        if index in self._to_echo:
            self._to_echo.remove(index)
            text = self._call.echoed(index, self._tokens) + text
        logprobs = self._call.shown_logprobs(chunk, self._tokens, self._offsets[index])
        if logprobs is not None:
            self._offsets[index] += sum(map(len, logprobs["tokens"]))
        shown: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None if done is None else str(done.stop_reason),
        }
        if self._call.token_ids:
            shown["token_ids"] = chunk.token_ids
            shown["skyrl"] = {"token_ids": chunk.token_ids, "logprobs": chunk.logprobs, "versions": chunk.versions}
            if index in self._prompts:  # vLLM's server has them in the first chunk alone
                shown["prompt_token_ids"] = self._prompts.pop(index)
            if done is not None:
                shown["skyrl"] |= {
                    "prompt_token_ids": done.prompt_token_ids,
                    "segments": done.segments,
                    "restarts": done.restarts,
                }
        return [Frame({**self._head, "choices": [shown]})]

    def closed(self) -> list[Frame]:
        """Return the usage if requested, and [DONE]."""
        if not self._call.include_usage:
            return [DONE]
        done = [self._done[index] for index in sorted(self._done)]
        return [Frame({**self._head, "choices": [], "usage": completions_usage(done, self._call.params.n)}), DONE]

    def failed(self, error: DialectError) -> list[Frame]:
        """Return the error, after which no frame follows."""
        return [Frame(openai_error(error))]


def completions_usage(done: Sequence[Generation], n: int) -> dict[str, Any]:
    """Return the usage of ``n`` responses to each of some prompts."""
    prompts = sum(len(generation.prompt_token_ids) for generation in done[::n])
    # What one response cached for another one to the same prompt does not count.
    cached = sum(min(generation.cached_tokens for generation in done[at : at + n]) for at in range(0, len(done), n))
    return usage(prompts, sum(len(generation.token_ids) for generation in done), cached)


def _head(model: str, context: ResponseContext) -> dict[str, Any]:
    return {"id": f"cmpl-{context.unique}", "object": "text_completion", "created": context.created, "model": model}


class CompletionRun:
    """``params.n`` responses to each of some prompts. Each is recorded in the session when it has ended.

    Args:
        generation: samples the responses.
        session_id: keeps requests on one engine where there is no session.
        fill_context: a response may take what its prompt leaves of the context, instead of ``params.max_tokens``.
        grammar_field: the field of the body that asks for the grammar in ``params``, for errors.
    """

    def __init__(
        self,
        client: RequestClient,
        generation: GenerationService,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        adapter: str | None = None,
        session: RecordingSession | None = None,
        session_id: str | None = None,
        *,
        fill_context: bool = False,
        grammar_field: str = "",
    ) -> None:
        self._client = client
        self._generation = generation
        self._prompts = prompts
        self._params = params
        self._fill_context = fill_context
        self._grammar_field = grammar_field
        self._adapter = adapter
        self._session = session
        self._session_id = session_id if session is None else session.id
        self._plans: list[Any] = []  # the prompt plan of each response

    async def complete(self) -> list[Generation]:
        """Return all responses, in order."""
        requests = await self._plan_requests()
        done = await gather_or_cancel([self._generation.complete(request) for request in requests])
        # Concurrent requests of the session may have used up the room meanwhile; record all responses or none.
        self._check_room(sum(len(generation.token_ids) for generation in done))
        if self._session is not None:
            for plan, generation in zip(self._plans, done, strict=True):
                self._session.record_completion(plan, generation)
        return done

    async def stream(self) -> AsyncGenerator[tuple[int, GenerationChunk], None]:
        """Yield the pieces of all responses with the number of the response. Closing the iterator cancels them."""
        # All prompts are checked before the first is sampled, so that an error costs no samples.
        requests = await self._plan_requests()
        pieces = merged([self._generation.stream(request) for request in requests])
        prompts = {index: list(request.prompt_token_ids) for index, request in enumerate(requests)}
        try:
            async for index, chunk in pieces:
                if index in prompts:
                    chunk = dataclasses.replace(chunk, prompt_token_ids=prompts.pop(index))
                if chunk.generation is not None and self._session is not None:
                    self._session.record_completion(self._plans[index], chunk.generation)
                yield index, chunk
        finally:
            await pieces.aclose()

    async def _plan_requests(self) -> list[GenerationRequest]:
        """Return the request of each response.

        Raises:
            DialectError: a prompt and ``max_tokens`` do not fit the context.
            GrammarError: the grammar cannot be compiled.
            SessionError: the session has ended, or all responses, at the requested length, do not fit its limits.
        """
        session = self._session
        context = self._client.capabilities.max_model_len
        requests = []
        if self._params.structured is not None and self._client.capabilities.grammar_continuation:
            await check_grammar(self._params.structured, self._grammar_field)
        asked, limit = self._params, self._generation.max_tokens_of(self._session_id)
        if limit is not None and self._adapter is None:  # what is asked for beyond it need not fit the context
            most, fewest = min(asked.max_tokens, limit), min(asked.min_tokens, limit)
            asked = dataclasses.replace(asked, max_tokens=most, min_tokens=fewest)
        least = 1 if self._fill_context else asked.max_tokens  # of each response
        for prompt in self._prompts:
            check_characters(prompt if isinstance(prompt, str) else "", context, "prompt")
            token_ids = await encode_prompt(self._client, prompt)
            if len(token_ids) + max(least, asked.min_tokens) > context:
                raise DialectError(
                    f"The prompt has {len(token_ids)} tokens and max_tokens is {least}, and {longest_context(context)}.",
                    "max_tokens",
                    "context_length_exceeded",
                )
            plan = PromptPlan(token_ids) if session is None else session.plan_completion(token_ids)
            # Each response is a separate request, because it continues alone across weight updates.
            max_tokens = context - len(token_ids) if self._fill_context else asked.max_tokens
            params = dataclasses.replace(asked, n=1, max_tokens=max_tokens)
            oldest = None if session is None else session.oldest_version
            for choice in range(self._params.n):
                self._plans.append(plan)
                requests.append(
                    GenerationRequest(
                        plan.prompt_token_ids, params, self._session_id, choice, self._adapter, oldest_version=oldest
                    )
                )
        self._check_room(len(requests) * least)
        return requests

    def _check_room(self, sampled_tokens: int) -> None:
        """Check that the session has room for all responses. With several prompts, the prompts themselves do not count."""
        if self._session is not None:
            plan = self._plans[0] if len(self._prompts) == 1 else None
            self._session.check_room(len(self._plans), plan=plan, sampled_tokens=sampled_tokens)


async def encode_prompt(client: RequestClient, prompt: Prompt) -> list[int]:
    """Return the tokens of a prompt.

    Raises:
        DialectError: a text without tokens, or a token that is not in the vocabulary.
    """
    if isinstance(prompt, str):
        token_ids = await encode_text(client, prompt)
        if len(token_ids) > 1 and token_ids[-1] == client.tokenizer.eos_token_id:
            token_ids.pop()  # some tokenizers append an end token, which would end the prompt before the response
        if not token_ids:
            raise DialectError("The prompt has no tokens.", "prompt", "invalid_value")
        return token_ids
    check_vocabulary(client, prompt, "prompt")
    return prompt


async def encode_text(client: RequestClient, text: str, add_special_tokens: bool = True) -> list[int]:
    """Return the tokens of a text. A long text is encoded in a thread."""

    def encode() -> list[int]:
        return list(client.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    return await asyncio.to_thread(encode) if len(text) > LONG_TEXT else encode()


def check_vocabulary(client: RequestClient, token_ids: list[int], param: str) -> None:
    """Raise DialectError for tokens that the model does not have."""
    size = len(client.tokenizer)
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < size:
        unknown = next(token_id for token_id in token_ids if not 0 <= token_id < size)
        raise DialectError(f"{unknown} is not a token of the model, which has {size}.", param, "invalid_value")
