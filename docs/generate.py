"""Writes the references that are derived from code: ``python docs/generate.py``.

config/schema.py ────────────> docs/reference/settings.md
config/migration/ ───────────> docs/reference/migration.md
observability/metrics.py ────> docs/reference/metrics.md
events/kinds.py ─────────────> docs/reference/events.md
entrypoints/command_line.py ─> docs/reference/command_line.md
endpoint/server/ ────────────> docs/reference/http.md
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import json
import re
import tokenize
import typing
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType

from annotated_types import Ge, Gt, Interval
from typer.models import ArgumentInfo

from skyrl_train.config import schema
from skyrl_train.config.migration.table import UNSET
from skyrl_train.config.migration.translate import LIBRARIES
from skyrl_train.endpoint.dialects.anthropic import MessagesBody
from skyrl_train.endpoint.dialects.generate import GenerateBody, GenerateSampling
from skyrl_train.endpoint.dialects.responses import ResponsesBody
from skyrl_train.endpoint.server.app import openapi_schema
from skyrl_train.entrypoints.command_line import app
from skyrl_train.events.kinds import COMMON, KINDS, SPANS, EventField
from skyrl_train.inference.openai.body import RequestBody, SamplingFields, ServerFields, field_table
from skyrl_train.inference.openai.chat import ChatCompletionBody
from skyrl_train.inference.openai.completions import CompletionBody
from skyrl_train.observability.metrics import MetricSpec, declared

REFERENCE = Path(__file__).parent / "reference"
OPEN = {  # groups whose names depend on the run, with the placeholder of their last part
    "policy/lr/": "<pattern>",
    "staleness/histogram/": "<lag>",
    "staleness/in_flight_histogram/": "<lag>",
    "staleness/in_queue_histogram/": "<lag>",
    "off_policy/rejected_tokens/": "<rule>",
    "off_policy/rejected_sequences/": "<rule>",
}
INTRODUCTION = """# Metrics

`metrics.jsonl` in the run folder has one JSON object per step, and `load_run(path).metrics` is a table of them. Each row has

| key | unit | meaning |
|---|---|---|
| `step` | | number of the optimizer step, counted from 1 |
| `time` | s | end of the step, in Unix time |
| `elapsed_s` | s | training up to the end of the step, over all commands of the run, without start-up and repeated steps |
| `group_indices` | | positions in the training stream of the trained groups, in their order |
| `failed_group_indices` | | groups that failed for good since the previous step |
| `filtered_group_indices` | | groups that were filtered since the previous step |
| `dropped_group_indices` | | groups that the staleness policy dropped since the previous step |

and the metrics below, as far as the run has them. A number that is not finite is `null`. *Aggregation* says how several values
of a step (of its groups, for example) become one. A unit of *share* means a number in [0, 1]. Your own code declares a metric
with `skyrl_train.observability.metrics.declare()`; names under `environment/` need no declaration.

This file is generated: change `skyrl_train/observability/metrics.py` and run `python docs/generate.py`.
"""


EVENTS = """# Events

`events/` in the run folder has one JSON object per line for everything that happens in a run: each group from its admission
to its training, each response with the policy version of each stretch of its tokens, each activity of the trainer. Pictures
of a run (timelines, reports, traces) read nothing else.

```python
from skyrl_train import load_run

events = load_run("runs/quickstart-1").events
events.counts  # number of events of each kind
events.frame("request")  # a table of one kind, with Unix times
events.segments()  # a row per stretch of tokens of one version
for event in events:  # all of them, as dicts, in the order in which they were recorded
    ...
```

`skyrl_train.events.reader.EventReader(folder).poll()` returns what was recorded since its last call: it follows a run that
trains now, from any machine that sees the folder. The record of a long run has gigabytes: `EventReader(folder, since=...)`
leaves out the segments that were full by then (a Unix time).

## What holds

- **Segments.** `000001.jsonl`, `000002.jsonl`, ... are read in the order of their numbers. One is open; a segment of 4 MiB
  is closed, compressed (`000001.jsonl.zst`, plain zstd) and the next one begun. Each command begins a new one.
- **Kills.** Lines are written at least once a second. A killed process loses at most its last second, and may leave a torn
  last line, which readers skip. No event ever changes.
- **Resumes.** Steps that are lost with their weights stay in the record: after `resume` with `step` 40, the steps above 40
  come again. In frames, `attempt` counts `run` and `resume` (also in those of `finished` and `retried`).
- **Lines.** Each one begins with `{"kind":"<kind>",`, so that a reader can leave out kinds without parsing them.
- **Order.** Lines are in the order in which events were recorded: at the end of what they describe. A group that trains has
  `admitted` (or `restored`), `finished`, `buffered` (if there are stages) and `trained`, in this order.
- **Times.** All times within an event are on the clock of its `m`, which never jumps; `t - m` of the same event makes Unix
  times of them. Frames have Unix times only.
- **Load.** Requests, environment calls, tools and agents are limited to `trainer.max_events_per_s` (100). Beyond it, some groups
  have none of them, and the others have all. The life of groups is always recorded.
- **Loss.** A full disk or a full queue stops nothing. `lost` says how many events are missing, and of which groups; frames
  leave out requests, environment calls, tools and agents of these groups.
- **Reading.** Unknown kinds and fields may come with later versions; a reader ignores them.

Not recorded are requests on separate evaluation engines (`trainer.eval.num_engines`). Calls of environments that take less
than a millisecond are left out. An agent's tools run in its own code. Their time is known from outside: it begins with the
response that calls them, and ends with the request that has their results. The scores, passes and optimizer of a step are one
activity, `update_policy`.

This file is generated: change `skyrl_train/events/kinds.py` and run `python docs/generate.py`.
"""


def events_reference() -> str:
    """Return the Markdown of the events reference: a section per kind, in the order of the declarations."""
    lines = [EVENTS, "## Every event\n", *_fields(COMMON)]
    for kind in KINDS.values():
        sampled = " Limited by `trainer.max_events_per_s`." if kind.sampled else ""
        meaning = kind.meaning[0].upper() + kind.meaning[1:]
        lines += [f"## {kind.name}\n", f"{meaning}.{sampled}\n", *_fields(kind.fields)]
        if kind.name == "span":
            rows = [f"| `{name}` | {meaning} |" for name, meaning in SPANS.items()]
            lines += ["Activities:\n", "| name | meaning |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def _fields(fields: Sequence[EventField]) -> list[str]:
    cells = [(f"`{each.name}`", each.type, each.unit, each.meaning) for each in fields]
    rows = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells]
    return ["| field | type | unit | meaning |", "|---|---|---|---|", *rows, ""]


def metrics_reference() -> str:
    """Return the Markdown of the metrics reference: a section per declared group, in the order of the declarations."""
    specs = declared()
    lines = [INTRODUCTION]
    for prefix, section in specs.items():
        if not prefix.endswith("/") or prefix in OPEN:
            continue
        rows = [spec for name, spec in specs.items() if name.startswith(prefix) and name != prefix]
        lines.append(f"## {prefix}\n\n{section.meaning}.\n")
        if rows:
            lines += ["| metric | unit | aggregation | meaning |", "|---|---|---|---|", *map(_row, rows), ""]
    return "\n".join(lines)


def _row(spec: MetricSpec) -> str:
    meaning = spec.meaning.replace("|", "\\|")  # in a table it would end the cell
    return f"| `{spec.name}{OPEN.get(spec.name, '')}` | {spec.unit} | {spec.aggregation} | {meaning} |"


SETTINGS = """# Settings

Every setting, with the default that a recipe starts from (`base`). `skyrl-train plan RECIPE` prints the values of a recipe.

- Set one on the command line (`trainer.seed=1`), in Python (`overrides={"trainer.seed": 1}`) or in the YAML file of a recipe.
- `null` means "not set". The value is then derived from others, or the meaning says what applies.
- `path.to:name` stands for an import path: `package.module:name`, or `file.py:name` for a file of yours.
- A misspelt setting is an error that names the nearest known one. A combination that would crash, hang or corrupt a run is
  an error with its remedy. A setting without effect is a warning, and with `--strict` an error.

This file is generated: change `skyrl_train/config/schema.py` and run `python docs/generate.py`.
"""


def settings_reference() -> str:
    """Return the Markdown of the settings: a section per group, in the order of the schema's tree."""
    return "\n".join([SETTINGS, *_section("", schema.RunConfig(), _comments())])


def _section(path: str, group: object, comments: dict[str, str]) -> list[str]:
    """Return the lines of a group of settings, then of the groups in it. ``path`` names it, such as ``trainer.eval``."""
    assert dataclasses.is_dataclass(group)
    hints = typing.get_type_hints(type(group), include_extras=True)
    lines, groups = [], []
    for each in dataclasses.fields(group):
        value, name = getattr(group, each.name), f"{path}.{each.name}".lstrip(".")
        if dataclasses.is_dataclass(value):
            groups += _section(name, value, comments)
            continue
        default = value.value if isinstance(value, Enum) else value
        meaning = comments[f"{type(group).__name__}.{each.name}"]
        if isinstance(value, Enum):
            values = [
                f"{one.value}: {about}"
                for one in type(value)
                if (about := comments.get(f"{type(one).__name__}.{one.name}"))
            ]
            meaning = f"{meaning} {'; '.join(values)}".strip()
        cells = (f"`{each.name}`", _type(hints[each.name]), f"`{json.dumps(default)}`", meaning)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    if not lines:
        return groups
    table = ["| setting | type | default | meaning |", "|---|---|---|---|", *lines, ""]
    return [f"## {path}\n", _markdown(inspect.getdoc(type(group)) or "") + "\n", *table, *groups]


def _type(hint: typing.Any) -> str:
    """Return a type and its limits as text: ``int >= 1``. ``None`` is left out, because the meaning says what it means."""
    if typing.get_origin(hint) is typing.Annotated:
        inner, *limits = typing.get_args(hint)
        return " ".join([_type(inner), *filter(None, map(_limit, limits))])
    if isinstance(hint, UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join(_type(part) for part in typing.get_args(hint) if part is not NoneType)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ", ".join(f"`{value.value}`" for value in hint)
    if dataclasses.is_dataclass(hint):
        return "{" + ", ".join(each.name for each in dataclasses.fields(hint)) + "}"
    if typing.get_origin(hint) in (list, dict):
        name = typing.get_origin(hint).__name__
        return f"{name} of {_type(typing.get_args(hint)[-1])}".removesuffix(" of any")
    return {"str": "text", "bool": "true or false", "float": "number", "Any": "any"}.get(hint.__name__, hint.__name__)


def _limit(limit: object) -> str:
    match limit:
        case Ge():
            return f">= {limit.ge}"
        case Gt():
            return f"> {limit.gt}"
        case Interval():
            signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
            bounds = {sign: getattr(limit, name) for name, sign in signs.items()}
            return ", ".join(f"{sign} {bound}" for sign, bound in bounds.items() if bound not in (None, float("inf")))
    return ""


def _comments() -> dict[str, str]:
    """Return the meaning of each field and enum value of the schema by ``Class.name``: the comments in or above its statement."""
    source = inspect.getsource(schema)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    own_lines = {number for number, line in enumerate(source.splitlines(), 1) if line.lstrip().startswith("#")}
    found = {}
    for group in ast.parse(source).body:
        for field in getattr(group, "body", ()):
            if isinstance(group, ast.ClassDef) and isinstance(field, ast.AnnAssign | ast.Assign):
                first = field.lineno
                while first - 1 in own_lines:
                    first -= 1
                lines = range(first, (field.end_lineno or field.lineno) + 1)
                text = " ".join(comments[line] for line in lines if line in comments)
                target = field.target if isinstance(field, ast.AnnAssign) else field.targets[0]
                found[f"{group.name}.{ast.unparse(target)}"] = _markdown(text)
    return found


def _markdown(text: str) -> str:
    """Return the text of a docstring or comment as one line of Markdown."""
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", " ".join(text.split())).replace("``", "`")
    text = re.sub(r"\bNone\b", "null", text)
    return re.sub(r"`[^`]*`|[<*]", lambda found: {"<": "&lt;", "*": "\\*"}.get(found[0], found[0]), text)


COMMANDS = """# Command line

`skyrl-train VERB ...`, or `python -m skyrl_train VERB ...`; in a clone, `./uvw run skyrl-train VERB ...`. `--help` after a
verb prints the same.

| exit code | meaning |
|---|---|
| 0 | done, or stopped by SIGTERM or Ctrl-C with a checkpoint |
| 1 | it failed |
| 2 | the command line, a setting or an input is wrong |
| 3 | a run has trained to its end, but every sample had the same reward |
| 130 | interrupted before anything began |

This file is generated: change `skyrl_train/entrypoints/` and run `python docs/generate.py`.
"""


def commands_reference() -> str:
    """Return the Markdown of the command line: a section per verb, in the order of the help."""
    lines = [COMMANDS]
    for verb in app.registered_commands:
        assert verb.callback is not None
        name, hints = verb.name or verb.callback.__name__, typing.get_type_hints(verb.callback, include_extras=True)
        usage, rows = [f"skyrl-train {name}"], []
        for parameter in inspect.signature(verb.callback).parameters.values():
            hint, declared_as = typing.get_args(hints[parameter.name])
            choices = [str(choice) for choice in typing.get_args(hint) if typing.get_origin(hint) is typing.Literal]
            required, default = parameter.default is parameter.empty, ""
            if isinstance(declared_as, ArgumentInfo):
                shown = declared_as.metavar or parameter.name.upper()
                usage.append(shown if required else f"[{shown}]")
            else:
                # Typer keeps the first name of an annotated option as its default.
                spelt = [declared_as.default, *(declared_as.param_decls or ())]
                names = [text for text in spelt if isinstance(text, str)]
                shown = ", ".join(names) or f"--{parameter.name.replace('_', '-')}"
                if required:
                    usage.append(f"{shown} {parameter.name.upper()}")
                elif parameter.default not in (None, False, ""):
                    default = f" Default: `{parameter.default}`."
            meaning = " ".join(filter(None, [declared_as.help, f"{', '.join(choices)}." if choices else ""])) + default
            cell = shown.replace("|", "\\|")
            rows.append(f"| `{cell}` | {meaning} |")
        lines += [f"## {name}\n", f"```\n{' '.join(usage)}\n```\n", inspect.getdoc(verb.callback) or "", ""]
        lines += ["| argument | meaning |", "|---|---|", *rows, ""]
    return "\n".join(lines)


HTTP = """# HTTP

The routes of the endpoint, from its OpenAPI document, which every endpoint serves as `GET /openapi.json`. That one and
`GET /health` need no key, all others `Authorization: Bearer KEY` or `x-api-key: KEY`.
[The HTTP endpoint](../tutorials/http_endpoint.md) explains sessions, keys, errors and limits.

The tables of routes that generate have every field of OpenAI's and Anthropic's SDKs and of vLLM's server. A field is
*supported*, *ignored* (accepted without effect), *default only* (accepted with the value that changes nothing, otherwise
rejected) or *rejected*. `null` is the same as leaving a field out. [Sampling fields](#sampling-fields) and
[fields of vLLM's server](#fields-of-vllms-server), which these routes share, are at the end.

This file is generated: change `skyrl_train/endpoint/` or `skyrl_train/inference/openai/`, and run `python docs/generate.py`.
"""
SAMPLING_FIELDS = """## Sampling fields

All routes that generate take these; `/inference/v1/generate` takes them in `sampling_params`.
"""
SERVER_FIELDS = """## Fields of vLLM's server

All routes that generate take these too, except `/inference/v1/generate`, whose tables have all of its fields.
"""
BODIES = {  # of the routes that generate
    "/v1/chat/completions": ChatCompletionBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/inference/v1/generate": GenerateBody,
}


def http_reference() -> str:
    """Return the Markdown of the endpoint's routes: a section per route, with the fields of its body."""
    lines = [HTTP]
    for path, methods in openapi_schema()["paths"].items():
        for method, route in methods.items():
            lines += [f"## {method.upper()} {path}\n", f"{route['summary']}\n"]
            if path in BODIES:
                lines += _request_fields(BODIES[path], shared=(SamplingFields, ServerFields))
            elif "requestBody" in route:
                fields = route["requestBody"]["content"]["application/json"]["schema"]["properties"].items()
                rows = [f"| `{name}` | {field.get('description', '')} |" for name, field in fields]
                lines += ["| field | meaning |", "|---|---|", *rows, ""]
            if BODIES.get(path) is GenerateBody:
                lines += [
                    "Fields of `sampling_params`:\n",
                    *_request_fields(GenerateSampling, shared=(SamplingFields,)),
                ]
    lines += [SAMPLING_FIELDS, *_request_fields(SamplingFields), SERVER_FIELDS, *_request_fields(ServerFields)]
    return "\n".join(lines)


def _request_fields(body: type[RequestBody], shared: Sequence[type[RequestBody]] = ()) -> list[str]:
    """Return the table of a body's fields, without those that it inherits from ``shared``, which have tables of their own."""
    elsewhere = [row for base in shared if issubclass(body, base) for row in field_table(base)]
    rows = [f"| `{row.name}` | {row.support} | {row.note} |" for row in field_table(body) if row not in elsewhere]
    return ["| field | | meaning or reason |", "|---|---|---|", *rows, ""]


MIGRATION = """# Settings of other libraries

With `--from LIBRARY`, `skyrl-train` `plan`, `try`, `train`, `sweep`, `eval`, `doctor` and `launch` translate a file (yaml or
toml) of another library, or its `key=value` settings, by these tables; [how to migrate](../compare.md#migrate) has an example. A
setting without a counterpart is left out, and the command prints the reason. A default is listed where a run from that
library keeps it. `section.*` stands for all settings in a section.

This file is generated: change `skyrl_train/config/migration/` and run `python docs/generate.py`.
"""


def migration_reference() -> str:
    """Return the Markdown of the tables: a section per library."""
    lines = [MIGRATION]
    for name, library in LIBRARIES.items():
        lines += [f"## {library.title}\n", f"`--from {name}`; of version {library.version}.\n"]
        lines += ["| there, and below it here | default there, difference or reason |", "|---|---|"]
        for row in library.settings:
            here = "" if row.here is None else "<br>the same" if row.here == row.name else f"<br>`{row.here}`"
            default = [] if row.default is UNSET else [f"`{json.dumps(row.default)}`"]
            lines.append(f"| `{row.name}`{here} | {'; '.join([*default, *([row.note] if row.note else [])])} |")
        if library.renamed:
            lines += ["\nFormer names work too:\n", "| former | |", "|---|---|"]
            lines += [f"| `{former}` | `{name}` |" for former, name in library.renamed.items()]
        lines.append("")
    return "\n".join(lines)


REFERENCES = {
    "migration.md": migration_reference,
    "settings.md": settings_reference,
    "metrics.md": metrics_reference,
    "events.md": events_reference,
    "command_line.md": commands_reference,
    "http.md": http_reference,
}

if __name__ == "__main__":
    for name, reference in REFERENCES.items():
        (REFERENCE / name).write_text(reference(), encoding="utf-8")
