"""Natural Questions and HotpotQA as Search-R1 mixed them (PeterJinGo/nq_hotpotqa_train, arXiv 2503.09516) as prompts.

./uvw run examples/recipes/search/prepare_data.py [--output data/search]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import load_dataset

INSTRUCTION = (
    "Answer the question. Think first, inside <think> and </think>. When you lack knowledge, search with "
    "<search>query</search>; the results come back between <information> and </information>, and you may search again. "
    "When you know the answer, write it inside <answer> and </answer>, as short as it can be, for example "
    "<answer>Paris</answer>.\nQuestion: "
)


def convert(row: Mapping[str, Any]) -> dict[str, Any]:
    """``question`` and ``golden_answers`` -> the columns of ``search_answer``; the prompt of the published row is not used."""
    return {
        "prompt": [{"role": "user", "content": INSTRUCTION + row["question"].strip()}],
        "golden_answers": list(row["golden_answers"]),
        "data_source": row["data_source"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("data/search"))
    output = parser.parse_args().output
    for split in ("train", "test"):
        rows = load_dataset("PeterJinGo/nq_hotpotqa_train", split=split)
        converted = rows.map(convert, remove_columns=rows.column_names)
        converted.to_parquet(output / f"{split}.parquet")
        print(f"{len(converted):,} prompts in {output / split}.parquet")


if __name__ == "__main__":
    try:
        main()
    except ConnectionError as error:  # after several attempts
        sys.exit(f"{error}. Run this where there is a network, and copy the folder of --output from there.")
