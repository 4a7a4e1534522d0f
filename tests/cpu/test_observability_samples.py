"""Recorded samples: which groups, what training computed for them, and files that are whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from chat_models import FAMILIES, chat_renderer, chat_tokenizer
from harness import Harness
from recorded import samples_of
from training_worlds import VOCABULARY, backend, build_small_model, one_thread

from skyrl_train.config.schema import AlgorithmConfig, OffPolicyCorrectionConfig
from skyrl_train.observability.run import Run
from skyrl_train.observability.samples import (
    RecordedGroup,
    SampleWriter,
    TrainedSequence,
    messages_of,
    read_samples,
    rows_of,
)
from skyrl_train.sample_recorder import SampleRecorder, engine_gap
from skyrl_train.training.minibatch import build_minibatch
from skyrl_train.types import RolloutGroup, RolloutSequence, Sample


def sequence(seed: int, reward: float, version: int = 0) -> RolloutSequence:
    """Two prompt tokens; two sampled tokens, two observed ones, two sampled ones."""
    rng = np.random.default_rng(seed)
    mask = [1, 1, 0, 0, 1, 1]
    return RolloutSequence.of_lists(
        prompt_token_ids=rng.integers(3, VOCABULARY, 2).tolist(),
        response_ids=rng.integers(3, VOCABULARY, 6).tolist(),
        loss_mask=mask,
        logprobs=[-float(rng.random()) - 1 if m else 0.0 for m in mask],
        versions=[version if m else -1 for m in mask],
        rewards=[0.0] * 5 + [reward],
        stop_reason="stop",
    )


def group(index: int, rewards: Sequence[float], version: int = 0) -> RolloutGroup:
    samples = tuple(Sample((sequence(10 * index + n, reward, version),)) for n, reward in enumerate(rewards))
    return RolloutGroup(index, f"prompt {index}", "test", samples, submitted_version=version)


def decode(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


# What training computed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_parts", [False, True])
def test_the_record_has_the_log_probs_advantages_and_weights_that_the_step_trained_with(
    tmp_path: Path, in_parts: bool
) -> None:
    cap = 0.25
    algorithm = AlgorithmConfig(
        off_policy_correction=OffPolicyCorrectionConfig(tis_ratio_type="token", token_tis_ratio_clip_high=cap)
    )
    groups = [group(0, [0.0, 1.0]), group(1, [1.0, 3.0]), group(2, [5.0, 2.0])]
    recorder = SampleRecorder(per_step=2)
    with one_thread():
        local = backend(
            build_small_model(tmp_path),
            algorithm__off_policy_correction__tis_ratio_type="token",
            algorithm__off_policy_correction__token_tis_ratio_clip_high=cap,
        )
        whole = build_minibatch(groups, 1, algorithm)
        before = local.forward_logprobs(whole.sequences)
        for part in [[g] for g in groups] if in_parts else [groups]:
            local.accumulate(recorder.choose(part, build_minibatch(part, 1, algorithm)))
        local.finish(1)
        recorder.collect(local)
    recorded = recorder.take()

    assert [entry.group.group_index for entry in recorded] == [0, 1] and recorder.take() == ()
    assert {entry.chosen for entry in recorded} == {"first"}
    clipped = 0
    for place, tokens in enumerate(tokens for entry in recorded for tokens in entry.trained):
        expected = whole.sequences[place]
        mask = expected.loss_mask[2:].numpy()
        assert tokens.loss_mask.tolist() == mask.tolist() == [True, True, False, False, True, True]
        assert tokens.advantages.tolist() == expected.advantages[2:].tolist()
        assert tokens.logprobs is not None and tokens.weights is not None
        for t in range(6):
            if not mask[t]:
                assert tokens.logprobs[t] == tokens.weights[t] == 0.0
                continue
            logprob, behaviour = float(before[place][2 + t]), float(expected.behaviour_logprobs[2 + t])
            # 1e-4: float32 log-probs of other micro-batches, and their exponentials.
            assert tokens.logprobs[t] == pytest.approx(logprob, abs=1e-4)
            assert tokens.weights[t] == pytest.approx(min(math.exp(logprob - behaviour), cap), abs=1e-4)
            clipped += math.exp(logprob - behaviour) > cap
    assert 0 < clipped < 16, "both sides of the cap"


def test_every_tenth_step_also_has_the_best_the_worst_and_the_stalest_group() -> None:
    groups = [
        group(4, [1.0, 1.0], 8),
        group(5, [9.0, 9.0], 8),
        group(6, [-1.0, 0.0], 8),
        group(7, [2.0, 2.0], 3),
        group(8, [2.0, 2.0], 8),
    ]
    for step, parts in ((9, [groups]), (10, [groups]), (10, [groups[:2], groups[2:4], groups[4:]])):
        recorder = SampleRecorder(per_step=1)
        for part in parts:
            recorder.choose(part, build_minibatch(part, step, AlgorithmConfig()))
        chosen = {entry.group.group_index: entry.chosen for entry in recorder.take()}
        extremes = {5: "best", 6: "worst", 7: "stalest"} if step == 10 else {}
        assert chosen == {4: "first", **extremes}


def test_one_group_may_be_chosen_for_several_reasons_and_a_failed_one_for_none() -> None:
    failed = RolloutGroup(1, "v", "", (Sample(()),), submitted_version=0, masked=True)
    recorder = SampleRecorder(per_step=1)
    groups = [group(0, [1.0, 0.0]), failed]
    recorder.choose(groups, build_minibatch(groups, 10, AlgorithmConfig()))
    assert [entry.chosen for entry in recorder.take()] == ["first,best,worst,stalest"]
    assert SampleRecorder(0).choose(groups, minibatch := build_minibatch(groups, 10, AlgorithmConfig())) is minibatch


def test_the_gap_between_trainer_and_engines_is_measured_on_tokens_of_the_same_weights() -> None:
    def recorded(version: int, *offsets: float) -> RecordedGroup:
        of_group = group(0, [0.0] * len(offsets), version)
        trained = []
        for sample, offset in zip(of_group.samples, offsets, strict=True):
            mask = sample.sequences[0].sampled.copy()
            mask[0] = False  # a token that does not train has no log-prob of the trainer
            logprobs = np.where(mask, sample.sequences[0].logprob_array + offset, 0.0)
            trained.append(TrainedSequence(mask, np.zeros(6), logprobs, None))
        return RecordedGroup(of_group, "first", tuple(trained))

    fresh = recorded(7, 0.5, -0.1)
    begun_before = replace(recorded(7, 9.0), group=replace(recorded(7, 9.0).group, submitted_version=6))
    gap = engine_gap(8, [fresh, recorded(6, 9.0), begun_before])["off_policy/engine_gap"]
    assert gap == pytest.approx(0.3)
    untold = TrainedSequence(np.ones(6, np.bool_), np.zeros(6), None, None)
    assert engine_gap(8, [recorded(6, 9.0), RecordedGroup(group(0, [0.0], 7), "first", (untold,))]) == {}
    assert engine_gap(8, [RecordedGroup(group(0, [0.0], 7), "first")]) == engine_gap(8, []) == {}


# Rows and messages ------------------------------------------------------------------------------------------------


def test_a_row_has_every_token_with_its_numbers(tmp_path: Path) -> None:
    of_group = group(3, [0.5, 2.0], version=6)
    parts = replace(of_group.samples[0], reward_parts={"format": 0.5, "correct": 0.0})
    of_group = replace(of_group, samples=(parts, *of_group.samples[1:]))
    tokens = TrainedSequence(np.array([False] * 5 + [True]), np.arange(6.0), np.full(6, -1.0), None)
    folder = tmp_path / "samples"
    with closing(SampleWriter(folder)) as writer:
        writer.write("train", 8, lambda: rows_of("train", 8, [RecordedGroup(of_group, "first", (tokens,))], decode))
        writer.write("eval", 8, lambda: rows_of("eval", 8, [RecordedGroup(of_group, "first")], decode))
    rows = read_samples(folder).to_pylist()
    assert [(row["phase"], row["step"], row["sample"]) for row in rows] == [
        ("eval", 8, 0),
        ("eval", 8, 1),
        ("train", 8, 0),
        ("train", 8, 1),
    ]
    row, sampled = rows[2], of_group.samples[0].sequences[0]
    assert row["prompt_token_ids"] == sampled.prompt_token_ids and row["response_token_ids"] == sampled.response_ids
    assert row["prompt"] == decode(sampled.prompt_token_ids) and row["response"] == decode(sampled.response_ids)
    assert row["response_pieces"] == [decode([token]) for token in sampled.response_ids]
    assert row["versions"] == [6, 6, -1, -1, 6, 6] and row["sampled"] == [True, True, False, False, True, True]
    assert row["behaviour_logprobs"] == pytest.approx(sampled.logprobs) and row["token_rewards"][-1] == 0.5
    assert row["loss_mask"] == [False] * 5 + [True] and row["advantages"] == [0, 1, 2, 3, 4, 5]
    assert row["trainer_logprobs"] == [-1.0] * 6 and row["importance_weights"] is None
    assert (row["reward_parts"], rows[3]["reward_parts"]) == ([("format", 0.5), ("correct", 0.0)], [])
    assert (row["uid"], row["group_index"], row["lag"], row["reward"], row["stop_reason"]) == (
        "prompt 3",
        3,
        1,
        0.5,
        "stop",
    )
    assert rows[0]["loss_mask"] is rows[3]["loss_mask"] is None and rows[0]["lag"] == 0
    assert Run(tmp_path).samples["reward"].tolist() == [0.5, 2.0, 0.5, 2.0]


def test_without_a_chat_template_messages_are_what_was_sampled_and_what_was_not() -> None:
    one = sequence(1, 1.0)
    messages = messages_of("the prompt", "unread", one, decode)
    ids = one.response_ids
    assert [(message["role"], message["content"]) for message in messages] == [
        ("prompt", "the prompt"),
        ("assistant", decode(ids[:2])),
        ("environment", decode(ids[2:4])),
        ("assistant", decode(ids[4:])),
    ]


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("<|im_start|>{}\n", "<|im_end|>\n"),
        ("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"),
        ("<start_of_turn>{}\n", "<end_of_turn>\n"),
    ],
)
def test_the_marks_of_a_chat_template_give_messages_with_roles_and_tool_calls(start: str, end: str) -> None:
    prompt = start.format("user") + "How\nmany?" + end + start.format("assistant")
    answer = 'Let me look. <tool_call>\n{"name": "count"}\n</tool_call>' + end
    response = answer + start.format("tool") + "3" + end + start.format("assistant") + "Three"
    assert messages_of(prompt, response, sequence(1, 1.0), decode) == [
        {"role": "user", "content": "How\nmany?", "tool_calls": []},
        {"role": "assistant", "content": "Let me look.", "tool_calls": ['{"name": "count"}']},
        {"role": "tool", "content": "3", "tool_calls": []},
        {"role": "assistant", "content": "Three", "tool_calls": []},
    ]


CALL = {"id": "c1", "type": "function", "function": {"name": "count", "arguments": '{"of": "cats"}'}}
TOOL = {"name": "count", "parameters": {"type": "object", "properties": {"of": {"type": "string"}}}}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How\nmany?"},
    {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
    {"role": "assistant", "content": "Three"},
    {"role": "user", "content": "Sure?"},
]
NO_ROLES = ("nothing known", "poolside/Laguna-XS.2", "thinkingmachines/Inkling")


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in NO_ROLES and "generic" not in name])
def test_conversations_of_each_family_have_their_roles(family: str) -> None:
    """With the templates of the real models, as the renderers write them."""
    ids = chat_renderer(family).render(CONVERSATION, [{"type": "function", "function": TOOL}])
    messages = messages_of(chat_tokenizer(family).decode(ids), "Sure.", sequence(1, 1.0), decode)
    while messages[0]["role"] == "system":  # with the tools, in one message or two
        assert messages.pop(0)["tool_calls"] == []
    assert [message["role"] for message in messages] == [m["role"] for m in CONVERSATION[1:]] + ["assistant"]
    question, call, result, answer, _, last = messages
    assert question["content"].endswith("How\nmany?"), "Llama's begins with the tools"
    assert result["content"].strip('\n"').endswith("3") and answer["content"] == "Three"
    assert last["content"].endswith("Sure.")
    if "Llama" in family:  # whose call is its only text
        assert "count" in call["content"]
    else:
        assert call["content"] == "Let me look." and len(call["tool_calls"]) == 1 and "cats" in call["tool_calls"][0]


# Files ------------------------------------------------------------------------------------------------------------


def test_a_resumed_run_replaces_the_files_of_the_steps_that_it_repeats(tmp_path: Path) -> None:
    entry = RecordedGroup(group(0, [1.0, 2.0]), "first")
    with closing(SampleWriter(tmp_path)) as writer:
        for step in (1, 2, 3):
            writer.write("train", step, lambda step=step: rows_of("train", step, [entry], decode))
        writer.write("eval", 2, lambda: rows_of("eval", 2, [entry], decode))
        writer.write("eval", 3, lambda: rows_of("eval", 3, [entry], decode))
    (tmp_path / ".step_000004.parquet.tmp").write_bytes(b"PAR1 half of a file")  # killed while it was written
    (tmp_path / "notes.txt").write_text("of the user")
    assert read_samples(tmp_path).num_rows == 10
    with closing(SampleWriter(tmp_path)) as writer:
        writer.discard_after(2)
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["eval_000002.parquet", "notes.txt", "step_000001.parquet", "step_000002.parquet"]


def test_samples_that_cannot_be_written_do_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "samples").write_text("a file in the place of the folder")
    with closing(SampleWriter(tmp_path / "samples")) as writer:
        writer.write("train", 1, list)
    assert "step_000001.parquet cannot be written" in caplog.text
    assert read_samples(tmp_path / "nowhere").num_rows == 0


async def test_a_run_records_its_steps_and_evaluations_also_over_a_resume(tmp_path: Path) -> None:
    settings = [
        "trainer.samples_per_step=1",
        "trainer.max_steps=5",
        "trainer.ckpt_interval=2",
        "trainer.eval.interval=3",
        "trainer.eval.generate=3",
        "trainer.fully_async.streaming_min_groups=2",
    ]
    first = Harness(tmp_path, *settings)
    first.backend.before_update = lambda part: fail_at(first, 4)
    with pytest.raises(ZeroDivisionError):
        await first.train()
    second = Harness(tmp_path, *settings)
    await second.train()

    rows = samples_of(tmp_path)
    trained = [row for row in rows if row["phase"] == "train"]
    assert [row["step"] for row in trained] == [step for step in range(1, 6) for _ in range(2)]
    assert {row["step"] for row in rows if row["phase"] == "eval"} == {3, 5}
    of_steps = {row["step"]: row["group_indices"] for row in second.rows}
    assert all(row["group_index"] in of_steps[row["step"]] for row in trained)
    # The scripted backend tells no log-probs, but the advantages are known.
    assert all(row["trainer_logprobs"] is None and row["advantages"] is not None for row in trained)


def fail_at(h: Harness, step: int) -> None:
    if h.trainer.global_step + 1 == step:
        raise ZeroDivisionError
