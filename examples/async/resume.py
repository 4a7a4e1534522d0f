"""Kills a training run with SIGKILL, gives the same command again, and counts the prompts: none lost, none twice.

./uvw run examples/async/resume.py [key=value ...]
"""

import json
import select
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="resume-") as folder:
        return kill_and_resume(Path(folder) / "run")


def kill_and_resume(run: Path) -> int:
    command = [
        sys.executable,
        "-m",
        "skyrl_train",
        "train",
        "quickstart",
        f"trainer.run_dir={run}",
    ]
    command += ["trainer.max_steps=60", "trainer.ckpt_interval=10", "data.generate=240", *sys.argv[1:]]  # 4 epochs

    first = subprocess.Popen(command)
    wait_for_steps(run / "metrics.jsonl", 25, first)
    first.send_signal(signal.SIGKILL)
    first.wait()
    print(f"\nkilled after {count_lines(run / 'metrics.jsonl')} steps; now the same command again\n", flush=True)

    subprocess.run(command, check=True)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = Counter(group_index for row in rows for group_index in row["group_indices"])
    expected = set(range(60 * 16))
    lost, twice = expected - set(trained), [group_index for group_index, times in trained.items() if times > 1]
    print(f"{len(rows)} steps, {len(trained)} prompts trained; lost: {len(lost)}, twice: {len(twice)}")
    return 1 if lost or twice else 0


def wait_for_steps(metrics: Path, steps: int, process: subprocess.Popen) -> None:
    """Returns when the run has written that many steps, or has ended."""
    ticker = select.poll()
    while count_lines(metrics) < steps and process.poll() is None:
        ticker.poll(50)


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


if __name__ == "__main__":
    sys.exit(main())
