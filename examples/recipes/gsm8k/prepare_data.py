"""GSM8K (openai/gsm8k, arXiv 2110.14168) as prompts: 7,473 to train on, 1,319 to evaluate on.

./uvw run examples/recipes/gsm8k/prepare_data.py [--output data/gsm8k]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import load_dataset

INSTRUCTION = 'Think step by step, then write the final number after "####".'


def convert(row: Mapping[str, Any]) -> dict[str, Any]:
    """``question`` and ``answer`` (a solution that ends in ``#### number``) -> the columns of ``numeric_answer``."""
    return {
        "prompt": [{"role": "user", "content": f"{row['question'].strip()}\n{INSTRUCTION}"}],
        "answer": row["answer"].rpartition("####")[2].strip(),
        "data_source": "openai/gsm8k",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("data/gsm8k"))
    output = parser.parse_args().output
    for split in ("train", "test"):
        rows = load_dataset("openai/gsm8k", "main", split=split)
        converted = rows.map(convert, remove_columns=rows.column_names)
        converted.to_parquet(output / f"{split}.parquet")
        print(f"{len(converted):,} prompts in {output / split}.parquet")


if __name__ == "__main__":
    try:
        main()
    except ConnectionError as error:  # after several attempts
        sys.exit(f"{error}. Run this where there is a network, and copy the folder of --output from there.")
