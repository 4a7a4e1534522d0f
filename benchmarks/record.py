"""Run a benchmark and keep what it prints, with the date, the commit and the load of the machine, for the documentation.

    python benchmarks/record.py NAME [arguments of benchmarks/NAME.py]
    python benchmarks/record.py embedded_engine --requests 1 16

Writes ``benchmarks/recorded/NAME.json``, in place of an earlier one. ``python docs/generate.py`` makes a page of all of them. A
benchmark that fails is not recorded.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).parent
RECORDED = FOLDER / "recorded"


def main() -> None:
    if len(sys.argv) < 2 or not (FOLDER / f"{sys.argv[1]}.py").is_file():
        names = sorted(path.stem for path in FOLDER.glob("*.py") if path != Path(__file__))
        raise SystemExit(f"usage: record.py NAME [arguments]; NAME is one of {', '.join(names)}")
    name, *arguments = sys.argv[1:]
    before = os.getloadavg()[0]
    command = [sys.executable, str(FOLDER / f"{name}.py"), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="")
    if done.returncode:
        raise SystemExit(f"benchmarks/{name}.py failed with exit code {done.returncode}; nothing was recorded.")
    row = {
        "command": shlex.join(["python", f"benchmarks/{name}.py", *arguments]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "machine": f"{os.cpu_count()} cores, {cpu()}, Python {platform.python_version()}, PyTorch {version('torch')}",
        "load": [round(before, 1), round(os.getloadavg()[0], 1)],
        "output": done.stdout,
    }
    RECORDED.mkdir(exist_ok=True)
    (RECORDED / f"{name}.json").write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")


def commit() -> str:
    """Return the commit of the code, and whether the code differs from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=FOLDER, capture_output=True, text=True, check=True).stdout

    elsewhere = (":(top)", ":(exclude)recorded", ":(top,exclude)docs")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", *elsewhere).strip()
    return git("rev-parse", "--short", "HEAD").strip() + (" with changes" if changed else "")


def cpu() -> str:
    """Return the name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
