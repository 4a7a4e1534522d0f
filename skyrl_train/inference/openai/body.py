"""Pydantic models of request bodies: the base class, markers for fields without effect, readable errors, and shared fields.

A model is the only description of its body: it validates, and gives the OpenAPI schema (:func:`body_schema`) and the table in
the docs (:func:`field_table`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationError
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from skyrl_train.inference.grammar import schema_text
from skyrl_train.inference.interface import LogitAdjustment, SamplingParams, StructuredOutput
from skyrl_train.inference.openai.errors import DialectError

MAX_DEPTH = 64  # of nested JSON; chat templates and JSON writers recurse
MAX_INT64 = 2**63 - 1
_TAG = "="  # tags of unions begin with it, so that error paths can leave them out


class RequestBody(BaseModel):
    """A JSON object with known fields. For an optional field, null and absence mean the same."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Validate ``body``.

        Raises:
            DialectError: a field is unknown, missing, of the wrong type or not supported. The error names it as a path.
        """
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            raise _dialect_error(error.errors(include_url=False)) from None


@dataclass(frozen=True, slots=True)
class Whole:
    """Annotates an ``int`` with inclusive bounds. 1.0 counts as 1, because JSON does not distinguish them."""

    minimum: int = -MAX_INT64
    maximum: int = MAX_INT64

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        integer = core_schema.int_schema(ge=self.minimum, le=self.maximum, strict=True)
        return core_schema.no_info_before_validator_function(_without_fraction, integer)


@dataclass(frozen=True, slots=True, init=False)
class Unsupported:
    """Annotates a field that is rejected unless it holds one of ``neutral``, the values that change nothing."""

    note: str
    neutral: tuple[Any, ...]

    def __init__(self, note: str, *neutral: Any) -> None:
        object.__setattr__(self, "note", note)
        object.__setattr__(self, "neutral", neutral)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"enum": [*self.neutral, None]}

    def _check(self, value: Any) -> None:
        for allowed in (None, *self.neutral):
            if value == allowed and isinstance(value, bool) == isinstance(allowed, bool):  # in Python, 1 == True
                return
        raise PydanticCustomError("unsupported_parameter", "is not supported here: {note}.", {"note": self.note})


def ignored(note: str = "") -> Any:
    """Return the default of a field that is accepted with any value and has no effect; ``model_dump`` leaves it out."""
    return Field(None, exclude=True, description=note)


def variants(key: str, expected: str, default: str | None = None) -> Discriminator:
    """Return the discriminator of a union of bodies that are told apart by ``key``.

    Each member carries ``Tag("=<value of the key>")``.

    Args:
        expected: the known values, for the error message.
        default: the value of an object without the key.
    """

    def tag(value: Any) -> str:
        name = value.get(key) if isinstance(value, dict) else getattr(value, key, None)
        return f"{_TAG}{default if name is None else name}"

    # The message begins with the key, which _dialect_error appends to the path.
    message = f"{key} must be {expected}."
    return Discriminator(tag, custom_error_type="variant", custom_error_message=message)


# Of a union of a string (Tag "=text") and a list (Tag "=list").
TEXT_OR_LIST = Discriminator(lambda value: "=list" if isinstance(value, list) else "=text")


def _without_fraction(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def only(expected: str, why: str) -> BeforeValidator:
    """Annotate a field that has one allowed value; ``why`` explains in the error message why there are no others."""

    def check(value: Any) -> Any:
        if value is not None and value != expected:
            facts = {"expected": expected, "got": f"{value!r:.100}", "why": why}
            raise PydanticCustomError("invalid_value", "must be {expected}, got {got}: {why}.", facts)
        return value

    return BeforeValidator(check)


def check_depth(value: dict[str, Any]) -> dict[str, Any]:
    """Return ``value``; raise a ValueError if it is nested more than ``MAX_DEPTH`` levels deep."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        nested = [entry for entry in level if isinstance(entry, (dict, list))]
        level = [child for entry in nested for child in (entry.values() if isinstance(entry, dict) else entry)]
        if not level:
            return value
    raise PydanticCustomError("invalid_value", "is nested more than {depth} levels deep.", {"depth": MAX_DEPTH})


JsonObject = Annotated[dict[str, Any], AfterValidator(check_depth)]
NonEmpty = Annotated[str, Field(min_length=1)]

# Pydantic's kinds of errors, each with the end of our message and our code.
_MESSAGES = {
    "missing": ("is required.", "missing_required_parameter"),
    "extra_forbidden": ("is not a field of this request.", "unknown_parameter"),
    "too_long": ("may have at most {max_length} entries, got {actual_length}.", "array_above_max_length"),
    "too_short": ("must not be empty.", "invalid_value"),
    "string_too_short": ("must not be empty.", "invalid_value"),
    "literal_error": ("must be {expected}; got {got}.", "invalid_value"),
    "greater_than_equal": ("must be at least {ge}, got {got}.", "invalid_value"),
    "greater_than": ("must be above {gt}, got {got}.", "invalid_value"),
    "less_than_equal": ("must be at most {le}, got {got}.", "invalid_value"),
    "finite_number": ("must be finite.", "invalid_value"),
    "bool_type": ("must be a boolean, got {kind}.", "invalid_type"),
    "int_type": ("must be an integer, got {kind}.", "invalid_type"),
    "float_type": ("must be a number, got {kind}.", "invalid_type"),
    "string_type": ("must be a string, got {kind}.", "invalid_type"),
    "list_type": ("must be an array, got {kind}.", "invalid_type"),
    "dict_type": ("must be an object, got {kind}.", "invalid_type"),
    "model_type": ("must be an object, got {kind}.", "invalid_type"),
}
_KINDS = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}


def _dialect_error(errors: list[ErrorDetails]) -> DialectError:
    # An unknown type explains the unknown fields beside it, and a misspelt field most other errors.
    unknown_type = (each for each in errors if each["loc"][-1] == "type" and each["type"] != "missing")
    misspelt = (each for each in errors if each["type"] == "extra_forbidden")
    error = next(unknown_type, None) or next(misspelt, errors[0])
    param = ""
    last = len(error["loc"]) - 1
    for place, part in enumerate(error["loc"]):
        if isinstance(part, int):
            param += f"[{part}]"
        # An unknown field is the caller's own word, which may begin like a tag.
        elif not part.startswith(_TAG) or (place == last and error["type"] == "extra_forbidden"):
            param += f".{part[:100]}" if param else part[:100]
    kind, value = error["type"], error["input"]
    if kind == "variant" and isinstance(value, dict):
        key = error["msg"].partition(" ")[0]
        message = f"{param}.{error['msg'].removesuffix('.')}; got {value.get(key)!r:.100}."
        return DialectError(message, f"{param}.{key}", "invalid_value")
    if kind == "variant":
        kind = "dict_type"
    elif kind.endswith("_type") and value is None and not param.endswith("]"):
        kind = "missing"  # null is the same as absence
    if kind not in _MESSAGES:  # a PydanticCustomError of ours: its type is the code
        return DialectError(f"{param} {error['msg']}", param, kind)
    text, code = _MESSAGES[kind]
    facts = {**error.get("ctx", {}), "got": f"{value!r:.100}", "kind": _KINDS.get(type(value), "a number")}
    return DialectError(f"{param} {text.format(**facts)}", param, code)


def body_schema(model: type[RequestBody]) -> dict[str, Any]:
    """Return the JSON schema of a body, without references and without the fields that are always rejected."""
    schema = {"required": [], **model.model_json_schema()}
    definitions = schema.pop("$defs", {})

    def inlined(value: Any) -> Any:
        if isinstance(value, list):
            return [inlined(entry) for entry in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return inlined(definitions[value["$ref"].rpartition("/")[2]])
        if isinstance(properties := value.get("properties"), dict):
            value = {**value, "properties": {k: v for k, v in properties.items() if v.get("enum") != [None]}}
        return {name: inlined(entry) for name, entry in value.items()}

    inline: dict[str, Any] = inlined(schema)
    return inline


class Support(StrEnum):
    """How a request field is treated."""

    SUPPORTED = "supported"
    IGNORED = "ignored"  # any value is accepted and has no effect
    NEUTRAL = "default only"  # accepted with the value that changes nothing, rejected with any other
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class FieldNote:
    """A row of the docs' table of request fields."""

    name: str
    support: Support
    note: str
    required: bool


def field_table(model: type[RequestBody]) -> list[FieldNote]:
    """Return how each field of ``model`` is treated, required fields first."""
    rows = []
    for name, field in model.model_fields.items():
        marker = next((entry for entry in field.metadata if isinstance(entry, Unsupported)), None)
        if marker is not None:
            support = Support.NEUTRAL if marker.neutral else Support.REJECTED
            rows.append(FieldNote(name, support, marker.note, False))
        else:
            support = Support.IGNORED if field.exclude else Support.SUPPORTED
            rows.append(FieldNote(name, support, field.description or "", field.is_required()))
    return sorted(rows, key=lambda row: not row.required)


# Fields that dialects share ---------------------------------------------------------------------------------------

MAX_STOPS = 4
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024  # tokens of a request with a logit_bias
MAX_TOKENS = 2**31 - 1  # of any response; the context is far below it
SEED_NOTE = "the same seed samples the same tokens from the same policy version"
StopStrings = Annotated[
    Annotated[NonEmpty, Tag("=text")] | Annotated[list[NonEmpty], Field(max_length=MAX_STOPS), Tag("=list")],
    TEXT_OR_LIST,
    AfterValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenCount = Annotated[int, Whole(1, MAX_TOKENS)]


def _check_tokens(biases: dict[str, float]) -> dict[str, float]:
    # "07" would be a second bias of token 7.
    unknown = next((token for token in biases if not re.fullmatch("0|[1-9][0-9]{0,8}", token)), None)
    if unknown is not None:
        raise PydanticCustomError("invalid_value", "has a key that is no token id: {key}.", {"key": f"{unknown!r:.50}"})
    return biases


LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES), AfterValidator(_check_tokens)
]


def _from_text(schema: Any) -> Any:
    if isinstance(schema, str):
        try:
            return json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise PydanticCustomError("invalid_value", "is not JSON: {reason}.", {"reason": f"{error}"}) from error
    return schema


class StructuredOutputsBody(RequestBody):
    """vLLM's ``structured_outputs``: exactly one grammar."""

    json_schema: Annotated[JsonObject, BeforeValidator(_from_text)] | None = Field(
        None, alias="json", description="a JSON schema, or its text"
    )
    json_object: bool | None = None
    regex: NonEmpty | None = None
    choice: Annotated[list[NonEmpty], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: Annotated[Any, Unsupported("each of vLLM's backends reads another language; use regex or json")] = None
    structural_tag: Annotated[Any, Unsupported("use tools with a forced tool_choice")] = None
    disable_any_whitespace: Annotated[Any, Unsupported("the schema decides", False)] = None
    disable_additional_properties: Annotated[Any, Unsupported("the schema decides", False)] = None
    whitespace_pattern: Annotated[Any, Unsupported("the schema decides")] = None


_LOCAL = "the engines here are not disaggregated"
_NO_MEDIA = "this endpoint takes text only"


class ServerFields(RequestBody):
    """Fields of vLLM's server that every dialect takes without effect, so that a client of that server needs no change."""

    length_penalty: Annotated[Any, Unsupported("there is no beam search", 1)] = None
    use_beam_search: Annotated[Any, Unsupported("tokens are sampled one by one", False)] = None
    watermarking: Annotated[Any, Unsupported("it would change what is sampled", False)] = None
    allowed_token_ids: Annotated[Any, Unsupported("use structured_outputs")] = None
    bad_words: Annotated[Any, Unsupported("use stop, or structured_outputs", [])] = None
    repetition_detection: Annotated[Any, Unsupported("use stop, or max_tokens")] = None
    thinking_token_budget: Annotated[Any, Unsupported("max_tokens bounds it all", -1)] = None
    truncate_prompt_tokens: Annotated[Any, Unsupported("history is never rewritten here")] = None
    include_stop_str_in_output: Annotated[Any, Unsupported("return_token_ids returns its tokens", False)] = None
    skip_special_tokens: Annotated[Any, Unsupported("return_token_ids returns them", True)] = None
    include_reasoning: Annotated[Any, Unsupported("reasoning is always shown, and shown whole", True)] = None
    return_tokens_as_token_ids: Annotated[Any, Unsupported("use return_token_ids", False)] = None
    return_prompt_text: Annotated[Any, Unsupported("use return_token_ids and /detokenize", False)] = None
    prompt_logprobs: Annotated[Any, Unsupported("the prompt's tokens have no behaviour log-probs")] = None
    logprob_token_ids: Annotated[Any, Unsupported("use top_logprobs")] = None
    vllm_xargs: Annotated[Any, Unsupported("the engines have no extensions", {})] = None
    kv_transfer_params: Annotated[Any, Unsupported(_LOCAL)] = None
    ec_transfer_params: Annotated[Any, Unsupported(_LOCAL)] = None
    spaces_between_special_tokens: Any = ignored("special tokens are not shown")
    truncation_side: Any = ignored("it belongs to truncate_prompt_tokens")
    priority: Any = ignored("samples that become stale first are served first")
    request_id: Any = ignored("the header x-request-id names a request")
    session_id: Any = ignored("sessions are named by the key")
    cache_salt: Any = ignored("prefixes cached under other weights are never used")
    stream_interval: Any = ignored("a slow reader gets larger chunks")
    routed_experts_prompt_start: Any = ignored("experts are not returned")
    return_token_offsets: Any = ignored("vLLM's server ignores it in these requests, too")
    mm_payload: Any = ignored(_NO_MEDIA)
    return_mm_kwargs: Any = ignored(_NO_MEDIA)
    media_io_kwargs: Any = ignored(_NO_MEDIA)
    mm_processor_kwargs: Any = ignored(_NO_MEDIA)


class SamplingFields(RequestBody):
    """How to sample: fields that every dialect has, as extensions to most of them."""

    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; default 1")
    top_p: float | None = Field(None, gt=0, le=1, description="default 1")
    top_k: Annotated[int, Whole(-1, 2**31 - 1)] | None = Field(None, description="0 and -1 switch it off")
    min_p: float | None = Field(None, ge=0, le=1, description="0 switches it off")
    min_tokens: Annotated[int, Whole(0, MAX_TOKENS)] | None = Field(
        None, description="fewest tokens of the response: no stop token or string ends it before"
    )
    stop_token_ids: list[TokenId] | None = Field(None, max_length=64, description="end the response, and stay in it")
    ignore_eos: bool | None = Field(None, description="continue after the end-of-sequence token")
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="of tokens that the response has; default 0")
    frequency_penalty: float | None = Field(
        None, ge=-2, le=2, description="for each time that the response has a token; default 0"
    )
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=100, description="of tokens of the prompt or the response; default 1"
    )
    logit_bias: LogitBias | None = Field(None, description="added to the logits of tokens, by their ids as strings")
    structured_outputs: StructuredOutputsBody | None = Field(
        None, description="json, json_object, regex or choice, as vLLM takes them; where the engines can be guided"
    )

    FORMAT_FIELD: ClassVar[str]  # the dialect's own field for a grammar

    @property
    def grammar_field(self) -> str:
        """The field that asks for a grammar, if there is one."""
        return self.FORMAT_FIELD if self.structured_outputs is None else "structured_outputs"

    def structured(self, formatted: StructuredOutput | None) -> StructuredOutput | None:
        """Return the grammar of ``structured_outputs``, or ``formatted``, which the dialect's own field asks for.

        Raises:
            DialectError: both ask for one, or ``structured_outputs`` has none or several.
        """
        asked = self.structured_outputs
        if asked is None:
            return formatted
        grammars = []
        if asked.json_schema is not None:
            grammars.append(StructuredOutput("json_schema", schema_text(asked.json_schema, strict=True)))
        if asked.json_object:
            grammars.append(StructuredOutput("json_object"))
        if asked.regex is not None:
            grammars.append(StructuredOutput("regex", asked.regex))
        if asked.choice is not None:
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in asked.choice)
            grammars.append(StructuredOutput("grammar", f"start: {texts}"))
        problem = None
        if len(grammars) != 1:
            problem = "structured_outputs must have exactly one of json, json_object, regex and choice."
        elif formatted is not None:
            problem = f"{self.FORMAT_FIELD} and structured_outputs contradict each other."
        if problem is not None:
            raise DialectError(problem, "structured_outputs", "invalid_value")
        return grammars[0]

    def sampling_params(self, max_tokens: int | None, **further: Any) -> SamplingParams:
        """Return the sampling parameters; ``further`` are those that only some dialects have.

        Raises:
            DialectError: ``min_tokens`` is above ``max_tokens``.
        """
        limit = MAX_TOKENS if max_tokens is None else max_tokens
        min_tokens = self.min_tokens or 0
        if min_tokens > limit:
            raise DialectError(
                f"min_tokens ({min_tokens}) is above max_tokens ({limit}).", "min_tokens", "invalid_value"
            )
        adjustment = LogitAdjustment(
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=tuple(sorted((int(token), bias) for token, bias in (self.logit_bias or {}).items() if bias)),
        )
        return SamplingParams(
            max_tokens=limit,
            min_tokens=min_tokens,
            temperature=1.0 if self.temperature is None else float(self.temperature),
            top_p=1.0 if self.top_p is None else float(self.top_p),
            top_k=self.top_k or -1,
            min_p=float(self.min_p or 0.0),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            adjustment=None if adjustment == LogitAdjustment() else adjustment,
            **further,
        )


class GenerationBody(SamplingFields, ServerFields):
    """The fields that the dialects of OpenAI and Anthropic share."""

    model: NonEmpty = Field(description="a name that GET /v1/models lists")
    stream: bool | None = Field(None, description="server-sent events, [DONE] at the end")
    return_token_ids: bool | None = Field(None, description="adds token ids, log-probs and versions (skyrl)")


class StreamOptions(RequestBody):
    """How OpenAI's streams end."""

    include_usage: bool | None = Field(None, description="a last chunk with the usage")
    include_obfuscation: Any = ignored("nothing is padded")
    continuous_usage_stats: Annotated[Any, Unsupported("use include_usage", False)] = None


def stream_usage(stream: bool | None, options: StreamOptions | None) -> bool:
    """Return whether a stream ends with the usage.

    Raises:
        DialectError: stream options without a stream.
    """
    if options is None:
        return False
    if not stream:
        raise DialectError("stream_options is only allowed with stream: true.", "stream_options", "invalid_value")
    return bool(options.include_usage)


STRICT_SCHEMA_NOTE = "true: a keyword that cannot be followed is an error; else it is skipped"


class NamedSchema(RequestBody):
    """A JSON schema that the response must follow."""

    name: NonEmpty
    json_schema: JsonObject = Field(alias="schema")
    description: Any = ignored("the model sees the messages only")
    strict: bool | None = Field(None, description=STRICT_SCHEMA_NOTE)


class ResponseFormat(RequestBody):
    """OpenAI's ``response_format``: text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class OpenAIBody(GenerationBody):
    """The fields that OpenAI's chat completions and completions share."""

    FORMAT_FIELD = "response_format"

    n: Annotated[int, Whole(1, MAX_CHOICES)] | None = Field(None, description="independent responses; default 1")
    stop: StopStrings | None = Field(
        None, description="the text ends before the stop string; its tokens stay in the training data"
    )
    seed: Annotated[int, Whole()] | None = Field(None, description=SEED_NOTE)
    stream_options: StreamOptions | None = Field(None, description="include_usage; only with stream")
    response_format: ResponseFormat | None = Field(
        None, description="text; json_object and json_schema where the engines can be guided"
    )
    user: Any = ignored("sessions are named by the key")

    @property
    def grammar(self) -> StructuredOutput | None:
        """The grammar of ``response_format`` or ``structured_outputs``.

        Raises:
            DialectError: both ask for one, or one is not complete.
        """
        asked, formatted = self.response_format, None
        if asked is not None and asked.type == "json_object":
            formatted = StructuredOutput("json_object")
        elif asked is not None and asked.type == "json_schema":
            if asked.json_schema is None:
                param = "response_format.json_schema"
                raise DialectError(f"{param} is required with type json_schema.", param, "missing_required_parameter")
            named = asked.json_schema
            formatted = StructuredOutput("json_schema", schema_text(named.json_schema, strict=bool(named.strict)))
        return self.structured(formatted)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage.

        Raises:
            DialectError: stream options without a stream.
        """
        return stream_usage(self.stream, self.stream_options)


def template_arguments(effort: str | None, further: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of the chat template: the effort of reasoning, and the caller's own, which win."""
    arguments: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        arguments["enable_thinking"] = False  # the switch that most templates have
    return {**arguments, **(further or {})}
