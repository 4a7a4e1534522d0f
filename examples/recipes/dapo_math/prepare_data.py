"""DAPO-Math-17k (BytedTsinghua-SIA/DAPO-Math-17k, arXiv 2503.14476) as prompts, each problem once; AIME 2024 to
evaluate on.

./uvw run examples/recipes/dapo_math/prepare_data.py [--output data/dapo_math]

The published files repeat each problem many times; the copies have the same ``extra_info.index``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import load_dataset

SOURCES = {"train": "BytedTsinghua-SIA/DAPO-Math-17k", "aime_2024": "BytedTsinghua-SIA/AIME-2024"}


def convert(row: Mapping[str, Any]) -> dict[str, Any]:
    """``prompt`` (asks for a last line ``Answer: ...``) and ``reward_model.ground_truth`` -> the columns of ``math_answer``."""
    return {
        "prompt": [{"role": message["role"], "content": message["content"]} for message in row["prompt"]],
        "answer": str(row["reward_model"]["ground_truth"]),
        "data_source": row["data_source"],
    }


class FirstOfEach:
    """Whether a row is the first with its index."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __call__(self, row: Mapping[str, Any]) -> bool:
        index = str(row["extra_info"]["index"])
        new = index not in self.seen
        self.seen.add(index)
        return new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("data/dapo_math"))
    output = parser.parse_args().output
    for name, source in SOURCES.items():
        rows = load_dataset(source, split="train").filter(FirstOfEach())
        converted = rows.map(convert, remove_columns=rows.column_names)
        converted.to_parquet(output / f"{name}.parquet")
        print(f"{len(converted):,} prompts in {output / name}.parquet")


if __name__ == "__main__":
    try:
        main()
    except ConnectionError as error:  # after several attempts
        sys.exit(f"{error}. Run this where there is a network, and copy the folder of --output from there.")
