"""Run the client libraries of ``battery_clients.py`` against an endpoint, and write the table of the documentation.

    python tests/battery/run_battery.py PYTHON [PYTHON ...]              prints the failures; exits with 1 if there are any
    python tests/battery/run_battery.py PYTHON [PYTHON ...] --write      also writes docs/reference/client_libraries.md

Each PYTHON is an interpreter whose environment has some of the libraries (requirements.txt, requirements_openai2.txt).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from battery_clients import CASES, PACKAGES
from battery_model import CONTEXT, build

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "client_libraries.md"
BACKENDS = ("embedded", "vllm")
KEY = "the-key-of-the-battery"
MEANING = {
    "plain": "a question and its answer",
    "tools": "the library's own tool loop: a call, its result, the answer",
    "forced": "a call that must happen (`required`, `any`, or a named tool), or structured output by such a call",
    "schema": "structured output by a JSON schema",
    "tools_schema": "a tool loop that ends in structured output",
    "example": "a typical use from the library's documentation, in other words: agents that remember, hand over or form a team",
    "stream, ..._stream": "the same, or another example, as a stream",
}
MARKS = {True: "yes", False: "**no**"}  # did all cases pass?


@contextmanager
def endpoint(backend: str) -> Iterator[str]:
    """Serve the model of ``battery_model.py`` in another process; yield the base URL."""
    with tempfile.TemporaryDirectory(prefix="skyrl-battery-") as folder:
        build(Path(folder))
        command = [sys.executable, "-m", "skyrl_train", "serve", folder, "--port", "0", "--backend", backend]
        command += ["--max-model-len", str(CONTEXT), "--max-num-seqs", "4"]
        environment = {**os.environ, "SKYRL_ADMIN_KEY": KEY, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                url = next((line.split()[-1] for line in server.stdout if line.startswith("serving ")), None)
                if url is None:
                    raise RuntimeError(f"skyrl-train serve exited with status {server.wait()}")
                yield url
            finally:
                server.terminate()


def has(python: str, library: str) -> bool:
    """Return whether the environment of ``python`` has the library."""
    code = f"import importlib.metadata as m; m.version({PACKAGES[library]!r})"
    return subprocess.run([python, "-c", code], stderr=subprocess.DEVNULL, check=False).returncode == 0


def run_library(python: str, library: str, url: str) -> list[dict[str, Any]]:
    """Run the library's cases; return ``{library, version, case, error}`` of each."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, str(Path(__file__).with_name("battery_clients.py")), library, url, KEY]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)
    results = [
        json.loads(line.removeprefix("RESULT ")) for line in done.stdout.splitlines() if line.startswith("RESULT ")
    ]
    if done.returncode or not results:
        raise RuntimeError(f"{library} ended with status {done.returncode}: {done.stderr[-2000:]}")
    return results


def page(results: Sequence[dict[str, Any]]) -> str:
    """Return the page: one row per library and engine, the error of each failure."""
    backends = dict.fromkeys(result["backend"] for result in results)
    lines = [
        "# Client libraries",
        "",
        "Each library with its defaults against the endpoint, on the embedded engine or on vLLM (CPU). The URL, the key and",
        "the name of the model are set, tracing is off, and AutoGen gets the `model_info` that it requires of unknown models.",
        "The model follows a script, so that the answers are known.",
        "",
        "| library | version | engine | " + " | ".join(case.replace("_", " ") for case in CASES) + " |",
        "|---|---|---|" + "---|" * len(CASES),
    ]
    for library, package in PACKAGES.items():
        for backend in backends:
            ran = [result for result in results if (result["library"], result["backend"]) == (library, backend)]
            cells = {result["case"]: MARKS[not result["error"]] for result in ran}
            versions = {f"{package} {result['version']}" for result in ran} or {"not run"}
            row = [library, " ".join(versions), backend, *(cells.get(case, "") for case in CASES)]
            lines.append(f"| {' | '.join(row)} |")
    lines.append("")
    for backend in backends:
        errors = [result["error"] for result in results if result["backend"] == backend]
        lines.append(f"{backend}: {errors.count(None)} of {len(errors)} cases pass.")
    lines += ["The battery does not test the cases of empty cells.", ""]
    lines += [f"- **{case}**: {meaning}" for case, meaning in MEANING.items()]
    failures = [result for result in results if result["error"]]
    if failures:
        lines += ["", "| failure | error |", "|---|---|"]
    for result in failures:
        reason = result["error"].splitlines()[0].replace("|", "\\|")[:300]
        lines.append(f"| {result['library']}, {result['case']}, {result['backend']} | {reason} |")
    lines += [
        "",
        "This file is generated: `python tests/battery/run_battery.py PYTHON ... --write`. Each PYTHON has some of the libraries",
        "([versions](../../tests/battery/requirements.txt), [for openai 2](../../tests/battery/requirements_openai2.txt)).",
        "A [workflow](../../.github/workflows/clients.yml) runs it each night with the newest releases.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("python", nargs="+")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=BACKENDS)
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    for backend in options.backend:
        with endpoint(backend) as url:
            for library in PACKAGES:
                python = next((python for python in options.python if has(python, library)), None)
                for result in run_library(python, library, url) if python else []:
                    results.append({**result, "backend": backend})
                    if result["error"]:
                        print(
                            f"{library} {result['version']}, {result['case']}, {backend}: {result['error']}", flush=True
                        )
    passed = sum(result["error"] is None for result in results)
    print(f"{passed} of {len(results)} cases pass")
    if options.write:
        PAGE.write_text(page(results), encoding="utf-8")
    sys.exit(passed < len(results) or not results)


if __name__ == "__main__":
    main()
