"""Run a benchmark and keep what it prints, with the date, the commit and the load of the machine, for the documentation.

    python benchmarks/record.py [--as RECORD] NAME [arguments of benchmarks/NAME.py]
    python benchmarks/record.py embedded_engine --requests 1 16
    python benchmarks/record.py --as endpoint_vs_vllm-logprobs endpoint_vs_vllm --logprobs

Writes ``benchmarks/recorded/RECORD.json``, in place of an earlier one; RECORD is NAME without ``--as``. ``python
docs/measurements.py`` shows the records in ``docs/benchmarks.md``. A benchmark that fails is not recorded. Paths in the arguments
are replaced by FOLDER in the record.
"""

from __future__ import annotations

import argparse
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--as", dest="record", metavar="RECORD", help="of several records of one benchmark")
    parser.add_argument("name", choices=sorted(path.stem for path in FOLDER.glob("*.py") if path != Path(__file__)))
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    name, arguments = options.name, options.arguments
    before = os.getloadavg()[0]
    command = [sys.executable, str(FOLDER / f"{name}.py"), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="")
    if done.returncode:
        raise SystemExit(f"benchmarks/{name}.py failed with exit code {done.returncode}; nothing was recorded.")
    row = {
        "command": shlex.join(["python", f"benchmarks/{name}.py", *map(without_folder, arguments)]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "machine": f"{os.cpu_count()} cores, {cpu()}, Python {platform.python_version()}, PyTorch {version('torch')}",
        "load": [round(before, 1), round(os.getloadavg()[0], 1)],
        "output": done.stdout,
    }
    RECORDED.mkdir(exist_ok=True)
    (RECORDED / f"{options.record or name}.json").write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")


def without_folder(argument: str) -> str:
    """Return the argument, or in place of an absolute path a word: other machines have other folders."""
    return "FOLDER" if Path(argument).is_absolute() else argument


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
