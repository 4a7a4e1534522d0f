"""Programming tasks as prompts: MBPP (google-research-datasets/mbpp, assertions) or CodeContests (stdin and stdout).

./uvw run examples/recipes/code/prepare_data.py [--source mbpp|code_contests] [--output data/code]

MBPP (arXiv 2108.07732) has 374 tasks to train on and 500 to evaluate on; CodeContests (deepmind/code_contests, arXiv
2203.07814) has more than 13,000; tasks without stdin and stdout tests are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import load_dataset

FENCE = "Write the whole program in one block that begins with ```python and ends with ```."
MAX_TESTS = 16  # per task: public ones first, then private ones, then generated ones


def convert_mbpp(row: Mapping[str, Any]) -> dict[str, Any]:
    """``text``, ``test_list``, ``test_setup_code`` -> the columns of ``python_tests``; the first test names the function."""
    setup = row["test_setup_code"]
    tests = [{"assert": f"{setup}\n{test}".strip()} for test in row["test_list"]]
    content = f"{row['text'].strip()}\nYour program should pass this test: {row['test_list'][0]}\n{FENCE}"
    return {"prompt": [{"role": "user", "content": content}], "tests": json.dumps(tests), "data_source": "mbpp"}


def convert_code_contests(row: Mapping[str, Any]) -> dict[str, Any]:
    """``description`` and the three sets of tests, each ``{"input": [...], "output": [...]}`` -> ``python_tests``'s columns."""
    pairs = [
        {"stdin": given, "stdout": expected}
        for name in ("public_tests", "private_tests", "generated_tests")
        for given, expected in zip(row[name]["input"], row[name]["output"], strict=True)
    ]
    content = f"{row['description'].strip()}\n\nRead from standard input, print to standard output. {FENCE}"
    return {
        "prompt": [{"role": "user", "content": content}],
        "tests": json.dumps(pairs[:MAX_TESTS]),
        "data_source": "code_contests",
    }


SOURCES = {
    "mbpp": ("google-research-datasets/mbpp", ("full",), convert_mbpp),
    "code_contests": ("deepmind/code_contests", (), convert_code_contests),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", choices=SOURCES, default="mbpp")
    parser.add_argument("--output", type=Path, default=Path("data/code"))
    options = parser.parse_args()
    path, config, convert = SOURCES[options.source]
    for split in ("train", "test"):
        rows = load_dataset(path, *config, split=split)
        converted = rows.map(convert, remove_columns=rows.column_names).filter(lambda row: row["tests"] != "[]")
        converted.to_parquet(options.output / f"{options.source}_{split}.parquet")
        print(f"{len(converted):,} tasks in {options.output}/{options.source}_{split}.parquet")


if __name__ == "__main__":
    try:
        main()
    except ConnectionError as error:  # after several attempts
        sys.exit(f"{error}. Run this where there is a network, and copy the folder of --output from there.")
