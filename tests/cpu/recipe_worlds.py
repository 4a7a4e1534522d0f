"""The recipes on a few converted records, shortened: a model of random weights, two steps."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
GSM8K = [
    {
        "question": "Natalia sold 48 clips in April, and half as many in May. How many altogether?",
        "answer": "In May she sold 48/2 = <<48/2=24>>24 clips.\nAltogether 48+24 = <<48+24=72>>72 clips.\n#### 72",
    },
    {"question": "A car costs $1,000 more than $200. What does it cost?", "answer": "1000+200=1200\n#### 1,200"},
]
DAPO = [
    {
        "data_source": "math_dapo",
        "prompt": [{"content": "Solve step by step. What is 6 times 7? Last line: Answer: $Answer.", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "42", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"problem-{number}"},
    }
    for number in (0, 0, 1)
]
SEARCH = [
    {
        "id": f"train_{number}",
        "question": question,
        "golden_answers": answers,
        "data_source": "nq",
        "prompt": [{"content": "another instruction", "role": "user"}],
        "ability": "fact-reasoning",
        "reward_model": {"ground_truth": {"target": answers}, "style": "rule"},
    }
    for number, (question, answers) in enumerate([("capital of france", ["Paris"]), ("what is red", ["Mars", "Blood"])])
]
MBPP = [
    {
        "task_id": number,
        "text": "Write a function to double a number.",
        "code": "def double(x):\r\n  return 2 * x",
        "test_list": ["assert double(2) == 4", "assert double(0) == 0"],
        "test_setup_code": "import math",
        "challenge_test_list": [],
    }
    for number in (601, 602)
]
CONTESTS = {
    "name": "1_A",
    "description": "Print the sum.",
    "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
    "private_tests": {"input": [], "output": []},
    "generated_tests": {"input": ["4 5\n"], "output": ["9\n"]},
}
PASSAGES = ["Paris is the capital of France.", "Berlin is the capital of Germany.", "Mars is a red planet."]


def script(recipe: str, name: str) -> ModuleType:
    """A file of a recipe, imported under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"recipe_{recipe}_{name}", RECIPES / recipe / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


NAMES = ["gsm8k", "gsm8k_lora", "critic_ppo", "dapo_math", "search", "code"]
DATA_OF = {"gsm8k_lora": "gsm8k", "critic_ppo": "gsm8k"}  # recipes that share another one's data
RETRIEVER = script("search", "retriever")


def converted(recipe: str) -> list[dict[str, Any]]:
    if recipe == "code":
        code = script("code", "prepare_data")
        return [code.convert_mbpp(MBPP[0]), code.convert_code_contests(CONTESTS)]
    prepare = script(DATA_OF.get(recipe, recipe), "prepare_data")
    rows = {"gsm8k": GSM8K, "dapo_math": DAPO, "search": SEARCH}[DATA_OF.get(recipe, recipe)]
    return [prepare.convert(row) for row in rows]


def stand_in(recipe: str, rows: list[dict[str, Any]], data: Path, folder: Path) -> Path:
    """The recipe's own file with a model of random weights, few and short samples, and ``data``."""
    config = yaml.safe_load((RECIPES / recipe / f"{recipe}.yaml").read_text())
    text = "".join(message["content"] for row in rows for message in row["prompt"])
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 16}
    trainer, generator = config["trainer"], config["generator"]
    trainer |= {"device": "cpu", "policy_mini_batch_size": 2, "max_steps": 2, "epochs": 4, "trackers": []}
    model = trainer["policy"]["model"]
    model |= {"path": None, "build": {"alphabet": text, "max_position_embeddings": 1024, **sizes}}
    trainer["policy"]["dtype"] = "float32"
    if "critic" in trainer:
        trainer["critic"]["dtype"] = "float32"
    trainer.pop("eval", None)
    algorithm = trainer.get("algorithm", {})
    algorithm.pop("dynamic_sampling", None)  # nothing that random weights say is worth anything
    if "overlong" in algorithm:
        algorithm["overlong"] |= {"max_response_len": 8, "buffer_len": 2}
    generator |= {"n_samples_per_prompt": 2, "max_input_length": 900}
    generator["sampling_params"]["max_tokens"] = 8
    generator["inference_engine"] = {"executor": "thread", "max_num_seqs": 8}
    config["data"]["train_data"] = [str(data)]
    path = folder / f"{recipe}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@contextmanager
def retriever() -> Iterator[str]:
    """The search recipe's server over PASSAGES; its URL."""
    server = RETRIEVER.serve(PASSAGES, port=0)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/retrieve"
    server.shutdown()
    thread.join()
    server.server_close()


def write_stand_in(recipe: str, folder: Path) -> Path:
    """The file of :func:`stand_in` and its data, in ``folder``."""
    rows = converted(recipe)
    data = folder / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), data)
    return stand_in(recipe, rows, data, folder)
