"""Run folders as a run leaves them, of any size, without a run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet

from skyrl_train.config.compose import compose, to_yaml
from skyrl_train.events.log import EVENTS, SEGMENT_BYTES, compress_closed
from skyrl_train.observability.run_folder import CONFIG, METRICS, SAMPLES, JsonlFile
from skyrl_train.observability.samples import schema

BEGAN = 1_800_000_000.0  # Unix time
UNIX = BEGAN - 5000.0  # the recording process's clock does not begin at 0


class RecordedRun:
    """Writes ``config.yaml``, ``metrics.jsonl`` and ``events/`` of an asynchronous run with a scripted rhythm.

    Each step takes a second: 0.7 s of training, then a weight sync, during which responses go on with the next version. Its
    groups were admitted 1.6 steps before; responses take 0.2 to 1.3 s, in up to two turns.
    """

    def __init__(
        self,
        path: Path,
        *,
        steps: int = 8,
        groups: int = 4,
        samples: int = 4,
        engines: int = 1,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.path = path
        self._engines = engines
        self._random = random.Random(0)
        self._events: list[tuple[float, dict[str, Any]]] = []
        path.mkdir(parents=True)
        (path / CONFIG).write_text(to_yaml(compose("quickstart", [f"trainer.max_steps={steps}"])))
        metrics = JsonlFile(path / METRICS)
        self._add(0.0, "process", host="here", pid=1, version="0", python="3", config="0", git=None, command=["train"])
        self._add(0.0, "run", step=0, total_steps=steps)
        for step in range(1, steps + 1):
            self._step(step, range((step - 1) * groups, step * groups), samples)
            self._samples(step, range((step - 1) * groups, step * groups), samples)
            metrics.append(self._metrics(step, groups * samples))
        self._add(steps + 0.1, "end", step=steps, reason="finished", error=None)
        metrics.close()
        self._write(segment_bytes)

    def _add(self, at: float, kind: str, **fields: Any) -> None:
        m = 5000.0 + at
        self._events.append((at, {"kind": kind, "t": UNIX + m, "m": m, **fields}))

    def _step(self, step: int, groups: range, samples: int) -> None:
        begin, end = step - 1.0, float(step)
        for name, t0, t1 in (
            ("wait_for_batch", 0, 0.05),
            ("update_policy", 0.05, 0.7),
            ("gather", 0.7, 0.78),
            ("transfer", 0.78, 0.86),
            ("pause", 0.86, 0.98),
        ):
            self._add(begin + t1, "span", name=name, step=step, t0=5000 + begin + t0, t1=5000 + begin + t1)
        admitted = max(0.0, begin - 1.6)
        version = int(admitted)
        self._add(admitted, "admitted", groups=list(groups), versions=[version] * len(groups))
        lags = []
        for group in groups:
            oldest, ended = step, admitted
            tokens = 0
            for sample in range(samples):
                at = admitted + 0.02
                for turn in range(self._random.choice((1, 1, 2))):
                    if turn:
                        self._add(
                            at + 0.1,
                            "environment",
                            **self._sample(group, sample),
                            name="game",
                            call="step",
                            t0=5000 + at,
                            t1=5000 + at + 0.1,
                            ok=True,
                        )
                        at += 0.1
                        self._add(
                            at + 0.05,
                            "tool",
                            **self._sample(group, sample),
                            names=["search"],
                            t0=5000 + at,
                            t1=5000 + at + 0.05,
                        )
                        at += 0.05
                    last = min(begin - 0.02, at + 0.1 + self._random.random() * 0.6)
                    segments = _runs(at + 0.01, max(at + 0.02, last))
                    oldest, tokens = min(oldest, segments[0][0]), tokens + sum(run[1] for run in segments)
                    self._add(
                        segments[-1][3] - 5000,
                        "request",
                        **self._sample(group, sample),
                        prompt_tokens=4,
                        t_submit=5000 + at,
                        t_first=segments[0][2],
                        t_end=segments[-1][3],
                        stop="stop",
                        replayed=0,
                        segments=segments,
                        seams=["update"] * (len(segments) - 1),
                    )
                    at = segments[-1][3] - 5000
                ended = max(ended, at)
            self._add(
                ended,
                "finished",
                group=group,
                uid=f"u{group}",
                attempt=1,
                oldest=oldest,
                newest=int(ended),
                tokens=tokens,
                stages=0,
                reward=round(self._random.random(), 3),
            )
            lags.append(step - 1 - oldest)
        self._add(end - 0.3, "trained", step=step, groups=list(groups), lags=lags, masked=[0] * len(groups))
        if step % 4 == 0:
            self._add(end - 0.1, "checkpoint", step=step, t0=5000 + end - 0.2, t1=5000 + end - 0.1, ok=True)
        for engine in range(self._engines):
            self._add(
                end,
                "engine",
                engine=engine,
                state="healthy",
                version=step,
                running=(1 + 2 * engine) * len(groups),
                waiting=0,
                paused=False,
                generated_tokens=step * 100,
                prefill_tokens=10,
                busy_s=end,
                kv_cache_usage=0.25,
            )

    def _sample(self, group: int, sample: int) -> dict[str, Any]:
        return {"session": f"p@{group}_{sample}", "group": group, "sample": sample}

    def _metrics(self, step: int, samples: int) -> dict[str, Any]:
        reward = step / (step + 5)
        spread = {"reward/mean": reward, "reward/p10": reward / 2, "reward/p90": min(1.0, 2 * reward)}
        staleness = {"staleness/mean": 1.5, "staleness/histogram/1": 2.0, "staleness/histogram/2": 2.0}
        staleness |= {"staleness/in_flight_histogram/1": 4.0}
        staleness |= {"staleness/in_queue_histogram/0": 2.0, "staleness/in_queue_histogram/1": 2.0}
        times = {"step": 1.0, "train": 0.65, "wait_for_batch": 0.05, "gather": 0.08, "transfer": 0.08, "pause": 0.12}
        speeds = {"inference/tokens_per_second": 100.0, "policy/tokens_per_second": 90.0, "async/idle_fraction": 0.3}
        generated = {
            "generate/response_tokens": 10.0,
            "generate/truncated": 0.0,
            "inference/generated_tokens_total": 100.0 * step,
            "generate/latency_s_oldest": 1.5,
            "staleness/oldest_in_flight": 2.0,
            "async/in_flight": 4.0,
        }
        return {
            "step": step, "time": BEGAN + step, "elapsed_s": float(step), "loss/entropy": 2 / step, "policy/tokens": samples,
            **spread, **staleness, **{f"time/{name}": value for name, value in times.items()}, **speeds, **generated,
        }  # fmt: skip

    def _samples(self, step: int, groups: range, samples: int) -> None:
        """Two groups of each step: a prompt of 4 tokens, and a response whose versions change in the middle."""
        rows = []
        for group in list(groups)[:2]:
            for sample in range(samples):
                length = 6 + (group + sample) % 7
                noise = [self._random.random() for _ in range(length)]
                response = [3 + (sample + place) % 16 for place in range(length)]
                rows.append({
                    "step": step, "phase": "train", "group_index": group, "uid": f"u{group % 8}", "data_source": "numbers",
                    "chosen": "first" if group == groups[0] else "stalest", "sample": sample, "sequence": 0,
                    "prompt": "<|user|>07c=", "response": "".join(f"{token:x}"[-1] for token in response),
                    "messages": [{"role": "user", "content": "07c=", "tool_calls": []},
                                 {"role": "assistant", "content": "c" * length, "tool_calls": ['{"name": "look"}']}],
                    "reward": noise[0], "stop_reason": "stop" if sample % 3 else "length", "lag": 1, "oldest_version": step - 2,
                    "newest_version": step - 1, "submitted_version": step - 2, "generation_s": 0.4, "time": BEGAN + step,
                    "prompt_token_ids": [1, 4, 11, 16], "response_token_ids": response,
                    "response_pieces": [chr(0x60 + token) for token in response],
                    "sampled": [place != 2 for place in range(length)],
                    "versions": [step - 2 + (place > length // 2) for place in range(length)],
                    "token_rewards": [0.0] * (length - 1) + [noise[0]], "behaviour_logprobs": [-one for one in noise],
                    "trainer_logprobs": [-one * 1.05 for one in noise], "advantages": [noise[0] - 0.5] * length,
                    "importance_weights": [1.0] * length, "loss_mask": [place != 2 for place in range(length)],
                })  # fmt: skip
        (self.path / SAMPLES).mkdir(exist_ok=True)
        table = pyarrow.Table.from_pylist(rows, schema())
        pyarrow.parquet.write_table(table, self.path / SAMPLES / f"step_{step:06}.parquet")

    def _write(self, segment_bytes: int) -> None:
        folder = self.path / EVENTS
        folder.mkdir()
        number, content = 1, bytearray()
        for _, event in sorted(self._events, key=lambda pair: pair[0]):
            content += orjson.dumps(event) + b"\n"
            if len(content) >= segment_bytes:
                (folder / f"{number:06}.jsonl").write_bytes(content)
                number, content = number + 1, bytearray()
        if content:
            (folder / f"{number:06}.jsonl").write_bytes(content)
            compress_closed(folder, number - 1)
        self.events = [event for _, event in self._events]


def _runs(begin: float, end: float) -> list[list[Any]]:
    """The segments of a response between two times: one per policy version, which changes with each whole second."""
    runs = []
    while begin < end:
        version = int(begin)
        until = min(end, version + 1.0)
        runs.append([version, max(1, round((until - begin) * 30)), 5000 + begin, 5000 + until, 0])
        begin = until
    return runs
