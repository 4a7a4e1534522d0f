"""Every kind of event in the record of a run, with its fields. ``docs/generate.py`` makes docs/reference/events.md from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EventField:
    """A field of an event.

    ``type`` is int, float, str, bool, list, or dict; with ``| null`` the value may be missing. ``unit`` is empty for names and
    plain numbers. Times (unit ``s``) are of the same clock as the event's ``m``.
    """

    name: str
    type: str
    unit: str
    meaning: str


@dataclass(frozen=True, slots=True)
class EventKind:
    """A kind of event. ``sampled``: under load only some groups have these events, and each of those groups has all of them."""

    name: str
    meaning: str
    fields: tuple[EventField, ...]
    sampled: bool = False


_F = EventField

COMMON = (
    _F("kind", "str", "", "one of the kinds below"),
    _F("t", "float", "s", "Unix time at which the event was recorded"),
    _F("m", "float", "s", "the same moment on a clock of the recording process that never jumps"),
)

_GROUP = _F("group", "int", "", "group index")
_GROUPS = _F("groups", "list", "", "group indices")
_STEP = _F("step", "int", "", "finished optimizer steps")
_REASON = _F("reason", "str", "", "why, in words")
_T0, _T1 = _F("t0", "float", "s", "beginning"), _F("t1", "float", "s", "end")
_PLACE = _F(
    "place",
    "str | null",
    "",
    "file:line in function of the user's code that raised; empty: none did; null: of an older version",
)
_OK = _F("ok", "bool", "", "whether it succeeded; false also if it was cancelled")
_SAMPLE = (
    _F("session", "str", "", "name of the sample, or of an outside program's session; empty: none was given"),
    _F("group", "int | null", "", "group index; null: no training sample (an evaluation, an outside program)"),
    _F("sample", "int | null", "", "number of the sample in its group"),
)
_OLDEST = _F("oldest", "int", "version", "oldest policy version among the sampled tokens")
_NEWEST = _F("newest", "int", "version", "newest policy version among the sampled tokens")

_KINDS: Sequence[EventKind] = (
    # The run
    EventKind(
        "process",
        "a command has opened the run folder",
        (
            _F("host", "str", "", "name of the machine"),
            _F("pid", "int", "", "process id"),
            _F("version", "str", "", "version of this library"),
            _F("python", "str", "", "version of Python"),
            _F("config", "str", "", "SHA-256 of config.yaml"),
            _F("git", "str | null", "", "commit of the working folder; null: it is in no git repository"),
            _F("command", "list", "", "the command line"),
        ),
    ),
    EventKind("run", "training begins", (_STEP, _F("total_steps", "int", "steps", "steps of the whole run"))),
    EventKind(
        "start_up",
        "a part of the start of a command begins; again every 20 seconds while it runs, and when it has ended",
        (
            _F("name", "str", "", "the part"),
            _T0,
            _F("t1", "float | null", "s", "end; null: it begins, or runs"),
        ),
    ),
    EventKind(
        "resume",
        "training continues from a checkpoint. Steps after it that were recorded before are lost and run again",
        (_STEP, _F("total_steps", "int", "steps", "steps of the whole run")),
    ),
    EventKind(
        "end",
        "training has ended. A killed process leaves no such event",
        (
            _STEP,
            _F("reason", "str", "", "finished | stopped (as requested) | failed"),
            _F("error", "str | null", "", "the error that ended it"),
        ),
    ),
    # Groups
    EventKind("admitted", "groups got batch slots, and their generation begins", (
        _GROUPS,
        _F("versions", "list", "version", "of each group: the policy version, or the oldest one of its replayed tokens"),
    )),
    EventKind("restored", "finished groups came from a checkpoint; they are not generated again", (
        _GROUPS,
        _F("versions", "list", "version", "of each group: its oldest version"),
    )),
    EventKind("replayed", "a group continues from the tokens that a checkpoint has of it", (_GROUP, _OLDEST)),
    EventKind("retried", "an attempt at a group failed, and another one begins", (
        _GROUP,
        _F("attempt", "int", "", "number of the failed attempt, from 1"),
        _REASON,
        _PLACE,
    )),
    EventKind("finished", "a group is generated; its stages follow, or it waits to be trained", (
        _GROUP,
        _F("uid", "str", "", "of its prompt"),
        _F("attempt", "int", "", "number of the attempt, from 1"),
        _OLDEST,
        _NEWEST,
        _F("tokens", "int", "tokens", "sampled in all samples"),
        _F("stages", "int | null", "", "that follow; 0: from now on the group waits to be trained; null: of an older version"),
        _F("reward", "float | null", "", "mean return of its samples; null: it has none, or stages follow"),
    )),
    EventKind("stage", "a group has left a stage", (
        _GROUP,
        _F("name", "str", "", "of the stage"),
        _F("t_queue", "float", "s", "the group asked for a slot of the stage"),
        _T0,
        _T1,
        _OK,
    )),
    EventKind("buffered", "a group has passed its stages and waits to be trained", (
        _GROUP,
        _F("reward", "float | null", "", "mean return of its samples; null: it has none"),
    )),
    EventKind("trained", "an optimizer step on these groups has ended", (
        _F("step", "int", "", "the step"),
        _GROUPS,
        _F("lags", "list", "steps", "of each group: step - 1 minus the oldest version of its tokens"),
        _F("masked", "list", "tokens", "of each group: sampled tokens that did not train because they were too old"),
    )),
    EventKind("failed", "a group has failed for good", (
        _GROUP,
        _REASON,
        _PLACE,
        _F("masked", "bool", "", "whether it keeps its slot and trains without samples; else the next prompt takes it"),
    )),
    EventKind("filtered", "a group had no signal; the next prompt takes its slot", (_GROUP,)),
    EventKind("dropped", "groups would have become too stale; the next prompts take their slots", (_GROUPS,)),
    # Samples
    EventKind("request", "a response has ended", (
        *_SAMPLE,
        _F("prompt_tokens", "int", "tokens", "of the prompt"),
        _F("t_submit", "float", "s", "the client got the request"),
        _F("t_first", "float | null", "s", "the client saw the first new tokens; null: the engine returns whole responses"),
        _F("t_end", "float", "s", "the response ended"),
        _F("stop", "str", "", "stop | length | cancelled | error"),
        _F("replayed", "int", "tokens", "tokens from a checkpoint, which no segment contains"),
        _F("segments", "list", "", "[version, tokens, t0, t1, engine] for each run of tokens of one version and engine request"),
        _F("seams", "list", "", "between two segments: engine lost | moved (it was alive) | update | aborted (and sent again)"),
    ), sampled=True),
    EventKind("environment", "a call of an environment that took a millisecond or more has ended", (
        *_SAMPLE,
        _F("name", "str", "", "of the environment"),
        _F("call", "str", "", "make | init | step | end_early | get_metrics | close"),
        _T0,
        _T1,
        _OK,
    ), sampled=True),
    EventKind("tool", "an agent has sent the results of tool calls, with the next request of the conversation", (
        *_SAMPLE,
        _F("names", "list", "", "of the called tools, in the order of the response"),
        _F("t0", "float", "s", "the response was recorded"),
        _F("t1", "float", "s", "the request with the results came"),
    ), sampled=True),
    EventKind("agent", "the agent of a sample (generator=harness) has ended", (
        *_SAMPLE,
        _F("turns", "int", "", "responses that it got"),
        _T0,
        _T1,
        _OK,
    ), sampled=True),
    # Trainer and engines
    EventKind("span", "the trainer has ended an activity", (
        _F("name", "str", "", "see the list of activities"),
        _F("step", "int | null", "", "the step, or the policy version that is sent; null: neither"),
        _T0,
        _T1,
    )),
    EventKind("engine", "the state of an engine, once a second", (
        _F("engine", "int", "", "its number"),
        _F("state", "str", "", "healthy | suspect | stale | starting | dead | retired"),
        _F("version", "int | null", "version", "the policy version that it holds; null: it did not answer"),
        _F("running", "int | null", "requests", "that it samples"),
        _F("waiting", "int | null", "requests", "that wait in it"),
        _F("paused", "bool | null", "", "whether it is paused"),
        _F("generated_tokens", "int | null", "tokens", "sampled since it started"),
        _F("prefill_tokens", "int | null", "tokens", "of prompts computed since it started"),
        _F("busy_s", "float | null", "s", "time with requests, neither paused nor asleep, since it started"),
        _F("kv_cache_usage", "float | null", "", "share of the KV cache that requests hold; null: its size varies"),
    )),
    EventKind("evaluation", "a policy version has been evaluated", (
        _F("version", "int", "version", "the policy version"),
        _T0,
        _T1,
        _F("metrics", "dict", "", "its metrics, as in eval.jsonl"),
    )),
    EventKind("checkpoint", "a checkpoint has been written", (
        _F("step", "int", "", "of the checkpoint"),
        _T0,
        _T1,
        _OK,
    )),
    EventKind("note", "a line on the screen", (_F("text", "str", "", "the line"),)),
    EventKind("warning", "a warning or an error in the log", (
        _F("level", "str", "", "WARNING | ERROR | CRITICAL"),
        _F("source", "str", "", "the module that logged it"),
        _F("text", "str", "", "the message, at most 2,000 characters"),
    )),
    EventKind("alarm", "an alarm or tuning advice begins or ends (docs/tutorials/troubleshooting.md has a section for each)", (
        _F("id", "str", "", "which one"),
        _F("level", "str", "", "alarm | tuning"),
        _F("state", "str", "", "begins | ends"),
        _F("step", "int", "", "the step after which it was found, or has not been found for 10 steps"),
        _F("finding", "str", "", "one sentence with the figure; as it ends, the newest one"),
        _F("action", "str", "", "what to do"),
    )),
    EventKind("lost", "events that are missing since the last such event", (
        _F("events", "int", "events", "that were not written, because the queue or the disk was full"),
        _F("sampled_out", "int", "events", "of requests, environments, tools and agents that the limit left out"),
        _F("groups", "list", "", "group indices, or names of sessions, of which some events are written and others are not"),
    )),
)  # fmt: skip

# By name, in the order of the documentation.
KINDS = {kind.name: kind for kind in _KINDS}

# Activities of the trainer, the names of ``span`` events.
SPANS = {
    "wait_for_batch": "training waits for groups",
    "update_policy": "one optimizer step: scores, forward and backward passes, optimizer",
    "accumulate": "forward and backward passes of a part of a step (streaming_min_groups)",
    "finish_update": "the optimizer step after the last part",
    "discard": "gradients of an unfinished step are dropped",
    "forward_logprobs": "log-probs of finished groups under the current policy",
    "reference_logprobs": "log-probs under the initial policy, in the training thread",
    "snapshot": "weights and optimizer are copied for a checkpoint",
    "load": "a checkpoint is loaded into the backend",
    "export_hf": "the final policy is exported",
    "offload_states": "the training state leaves the device",
    "reload_states": "the training state comes back to the device",
    "sleep": "engines are paused and leave the device",
    "wake_up": "engines come back to the device: for the weights, then for the KV cache",
    "gather": "weights are copied to the staging copy",
    "transfer": "engines receive the weights while they serve",
    "pause": "engines are paused: no token is sampled",
    "load_weights": "paused engines load the weights; within the pause",
    "wait_for_weight_sync": "training waits for the weight sync under way",
    "wait_for_evaluation": "a weight sync waits for an evaluation",
}
