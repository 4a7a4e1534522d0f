"""Run the client libraries of ``battery_clients.py`` against an endpoint, and write the table of the documentation.

    python tests/battery/run_battery.py PYTHON [PYTHON ...]              prints the failures
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
KEY = "the-key-of-the-battery"
MEANING = {
    "plain": "a question and its answer",
    "stream": "the same as a stream",
    "tools": "the library's own tool loop: a call, its result, the answer",
    "forced": "a call that must happen (`required`, `any`, or a named tool), or structured output by such a call",
    "schema": "structured output by a JSON schema",
}


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
    """Return the page: one row per library, the error of each failure."""
    lines = [
        "# Client libraries",
        "",
        "Each library with its defaults against the endpoint with the embedded engine. The URL, the key and the name of the",
        "model are set, tracing is off, and AutoGen gets the `model_info` that it requires of models that it does not know.",
        "The model follows a script, so that the answers are known.",
        "",
        "| library | version | " + " | ".join(CASES) + " |",
        "|---|---|" + "---|" * len(CASES),
    ]
    for library, package in PACKAGES.items():
        cells = {
            result["case"]: "no" if result["error"] else "yes" for result in results if result["library"] == library
        }
        versions = {result["version"] for result in results if result["library"] == library}
        row = [
            library,
            f"{package} {' '.join(versions)}" if versions else "not run",
            *(cells.get(case, "") for case in CASES),
        ]
        lines.append(f"| {' | '.join(row)} |")
    passed = sum(result["error"] is None for result in results)
    lines += ["", f"{passed} of {len(results)} cases pass. The battery does not test the cases of empty cells.", ""]
    lines += [f"- **{case}**: {meaning}" for case, meaning in MEANING.items()]
    failures = [result for result in results if result["error"]]
    if failures:
        lines += ["", "| failure | error |", "|---|---|"]
    for result in failures:
        reason = result["error"].splitlines()[0].replace("|", "\\|")[:300]
        lines.append(f"| {result['library']}, {result['case']} | {reason} |")
    lines += [
        "",
        "This file is generated: `python tests/battery/run_battery.py PYTHON ... --write`. Each PYTHON has some of the libraries",
        "([versions](../../tests/battery/requirements.txt), [for openai 2](../../tests/battery/requirements_openai2.txt)).",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("python", nargs="+")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--backend", choices=("embedded", "vllm"), default="embedded")
    options = parser.parse_args()
    if options.write and options.backend != "embedded":
        parser.error("the page is about the embedded engine")
    results: list[dict[str, Any]] = []
    with endpoint(options.backend) as url:
        for library in PACKAGES:
            python = next((python for python in options.python if has(python, library)), None)
            results += run_library(python, library, url) if python else []
    for result in results:
        if result["error"]:
            print(f"{result['library']} {result['version']}, {result['case']}: {result['error']}")
    print(f"{sum(result['error'] is None for result in results)} of {len(results)} cases pass")
    if options.write:
        PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
