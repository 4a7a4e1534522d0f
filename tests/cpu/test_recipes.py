"""Each recipe on records with the published columns: two steps of a small model, and the plan of the real configuration."""

from __future__ import annotations

import json
import math
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_worlds import DAPO, NAMES, RECIPES, RETRIEVER, converted, retriever, script, write_stand_in

from skyrl_train.config.compose import compose
from skyrl_train.config.hardware import GPU_KINDS, Cluster
from skyrl_train.config.machine_plan import machine_plan
from skyrl_train.config.memory import Machine, MemoryWarnings, memory_requirements, memory_warnings
from skyrl_train.config.model_shape import model_shape
from skyrl_train.config.plan import resolve
from skyrl_train.entrypoints.command_line import main
from skyrl_train.environments.sandbox import why_unavailable
from skyrl_train.environments.search_answer import SearchAnswer
from skyrl_train.errors import DataError, RolloutError


@pytest.fixture(scope="module")
def retriever_url() -> Iterator[str]:
    with retriever() as url:
        yield url


@pytest.mark.parametrize(
    "recipe",
    # gsm8k_lora has gsm8k's records.
    [pytest.param(name, marks=pytest.mark.slow if name == "gsm8k" else ()) for name in NAMES],
)
def test_a_recipe_trains_on_converted_records(tmp_path: Path, recipe: str, retriever_url: str) -> None:
    if recipe == "code" and why_unavailable("namespaces"):
        pytest.skip(str(why_unavailable("namespaces")))
    path = write_stand_in(recipe, tmp_path)
    extra = [f"environment.kwargs.retriever_url={retriever_url}"] if recipe == "search" else []
    assert main(["train", str(path), f"trainer.run_dir={tmp_path / 'run'}", *extra]) == 0
    found = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in found] == [1, 2]
    assert ("critic/explained_variance" in found[-1]) == (recipe == "critic_ppo")
    assert found[-1]["generate/turns"] == (4 if recipe == "search" else 1)
    assert (tmp_path / "run" / "policy" / "adapter").is_dir() == recipe.endswith("_lora")


@pytest.mark.parametrize("recipe", NAMES)
def test_the_plan_of_a_real_configuration_needs_no_model_and_no_network(
    tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = converted(recipe)
    for name in {
        "gsm8k": ["gsm8k/train", "gsm8k/test"],
        "gsm8k_lora": ["gsm8k/train", "gsm8k/test"],
        "critic_ppo": ["gsm8k/train", "gsm8k/test"],
        "dapo_math": ["dapo_math/train", "dapo_math/aime_2024"],
        "search": ["search/train"],
        "code": ["code/mbpp_train", "code/mbpp_test"],
    }[recipe]:
        path = tmp_path / "data" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows * 64), path)
    assert main(["plan", f"{RECIPES / recipe / recipe}.yaml"]) == 0
    plan = capsys.readouterr().out
    assert "Qwen/Qwen" in plan and "vllm" in plan
    memory = plan.partition("\nmemory\n")[2]
    assert "parameters" in memory and "unknown" not in memory  # by the list of published shapes
    # A hub name that is not listed.
    critic = ["trainer.critic.model.path=some/where"] if recipe == "critic_ppo" else []
    unlisted = ["trainer.policy.model.path=some/where", *critic]
    assert main(["plan", f"{RECIPES / recipe / recipe}.yaml", *unlisted]) == 0
    plan = capsys.readouterr().out
    assert "some/where" in plan and "vllm" in plan and "unknown until the model is loaded" in plan


# What the estimate leaves out: gaps between the allocator's blocks (2 to 5 % of what the trainer takes, by
# docs/tutorials/first_gpu_run.md) and vLLM's CUDA graphs, about 1 GiB beyond its share.
ALLOCATOR_SHARE, CUDA_GRAPH_BYTES = 0.05, 2**30
VLLM_OWN_BYTES = 2 * 2**30  # of vLLM's share, beside weights and KV cache: activations of a prefill, context


@pytest.mark.parametrize("recipe", NAMES)
def test_a_recipe_fits_the_gpu_that_it_names_with_its_engine(recipe: str) -> None:
    path = RECIPES / recipe / f"{recipe}.yaml"
    (size,) = set(re.findall(r"one GPU of (\d+) GB", path.read_text()))
    kind = {80: "H100", 141: "H200"}[int(size)]
    machine = Machine(main_memory_bytes=2**60, gpu_bytes=(GPU_KINDS[kind].memory_bytes,))
    plan = resolve(compose(str(path), []), 100_000)
    there = machine_plan(plan, Cluster(1, 1, kind))
    assert (there.problems, there.tight) == ((), ()) and there.step is not None
    assert plan.memory is not None
    assert memory_warnings(plan.config, plan.memory, machine) == MemoryWarnings([], [])
    (need,) = [need for need in memory_requirements(plan.config, plan.memory, machine) if "cuda" in need.where]
    shape, engine = model_shape(plan.config.trainer.policy.model), plan.config.generator.inference_engine
    assert shape is not None
    share = int(engine.engine_args["gpu_memory_utilization"] * machine.gpu_bytes[0])
    trainer = need.state_bytes + need.activation_bytes - share  # the engine is counted
    assert trainer >= plan.memory.rank_peak_bytes
    everything = trainer * (1 + ALLOCATOR_SHARE) + need.context_bytes + share + CUDA_GRAPH_BYTES
    assert everything < machine.gpu_bytes[0]
    # In the engine's share, the KV cache holds as many of the longest requests as keep a GPU busy.
    kv_bytes_per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 2
    cache = share - plan.memory.engine_weight_bytes - VLLM_OWN_BYTES
    assert cache > 24 * plan.max_model_len * kv_bytes_per_token
    # And the longest sequence fits a micro-batch.
    assert plan.config.trainer.micro_batch_tokens >= plan.max_model_len


@pytest.mark.parametrize(
    ("name", "cluster"), [("eight_gpus", Cluster(1, 8, "H100")), ("four_nodes", Cluster(4, 8, "H100"))]
)
def test_a_recipe_for_several_gpus_fits_them_and_is_launched_by_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, cluster: Cluster
) -> None:
    path = RECIPES / "gsm8k" / f"{name}.yaml"
    there = machine_plan(resolve(compose(str(path), []), 7_473), cluster)
    assert (there.problems, there.tight) == ((), ()) and there.step is not None
    monkeypatch.chdir(tmp_path)
    for part in ("train", "test"):
        rows = tmp_path / "data" / "gsm8k" / f"{part}.parquet"
        rows.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(converted("gsm8k") * 256), rows)
    for file in (f"{name}.yaml", "gsm8k.yaml"):
        (tmp_path / file).write_text((path.parent / file).read_text())
    assert main(["launch", "slurm", f"{name}.yaml"]) == 0
    nodes = cluster.nodes
    assert f"{nodes} node{'s' * (nodes > 1)} with Ray" in capsys.readouterr().out
    script = (tmp_path / "launch" / f"gsm8k-{name.replace('_', '-')}" / "slurm.sh").read_text()
    assert f"#SBATCH --nodes={nodes}\n" in script and "#SBATCH --gpus-per-node=8\n" in script


def test_a_recipe_without_checkpointing_would_not_fit() -> None:
    """The check above fails where it should: these are settings that the recipes had."""
    machine = Machine(main_memory_bytes=2**60, gpu_bytes=(GPU_KINDS["H100"].memory_bytes,))
    for recipe in ("gsm8k", "code", "dapo_math", "search"):
        path = RECIPES / recipe / f"{recipe}.yaml"
        plan = resolve(compose(str(path), ["trainer.policy.gradient_checkpointing=false"]), 100_000)
        ((warning),) = memory_warnings(plan.config, plan.memory, machine).tight
        assert "and engines" in warning and "trainer.policy.gradient_checkpointing=true" in warning
        assert "generator.inference_engine.engine_args.gpu_memory_utilization" in warning


@pytest.mark.parametrize("recipe", ["gsm8k", "dapo_math", "search", "code"])
def test_without_a_network_it_says_what_to_do(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*arguments: object, **options: object) -> None:
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    monkeypatch.setattr(sys, "argv", ["prepare_data.py"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(RECIPES / recipe / "prepare_data.py"), run_name="__main__")
    text = ended.value.code  # printed to stderr; the exit code is 1
    assert isinstance(text, str) and text.startswith("Couldn't reach the hub. Run this where there is a network")


def test_gsm8k_keeps_the_number_behind_the_marks() -> None:
    rows = converted("gsm8k")
    assert [row["answer"] for row in rows] == ["72", "1,200"]
    assert rows[0]["prompt"][0]["content"].startswith("Natalia sold")


def test_dapo_keeps_the_first_of_each_problem() -> None:
    first = script("dapo_math", "prepare_data").FirstOfEach()
    assert [first(row) for row in DAPO] == [True, False, True]


def test_code_keeps_assertions_and_pairs_of_input_and_output() -> None:
    mbpp, contest = converted("code")
    assert json.loads(mbpp["tests"])[0] == {"assert": "import math\nassert double(2) == 4"}
    assert json.loads(contest["tests"]) == [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "4 5\n", "stdout": "9\n"}]


def brute_force_scores(bm25: ModuleType, passages: list[str], query: str) -> list[float]:
    """BM25 straight from its formula, one passage after the other."""
    texts = [bm25.words(passage) for passage in passages]
    mean = max(sum(map(len, texts)) / len(texts), 1.0)
    scores = []
    for text in texts:
        score = 0.0
        for word in set(bm25.words(query)):
            having = sum(word in other for other in texts)
            rarity = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
            count = text.count(word)
            score += rarity * count * 2.2 / (count + 1.2 * (0.25 + 0.75 * len(text) / mean))
        scores.append(score)
    return scores


SENTENCES = st.lists(st.sampled_from(["red", "blue", "mars", "is", "a"]), max_size=6).map(" ".join)


@settings(max_examples=30)
@given(passages=st.lists(SENTENCES, min_size=1, max_size=5), query=SENTENCES)
def test_the_retriever_ranks_as_bm25_says(passages: list[str], query: str) -> None:
    expected = sorted((score for score in brute_force_scores(RETRIEVER, passages, query) if score > 0), reverse=True)
    assert [score for _, score in RETRIEVER.BM25(passages).search(query, top_k=9)] == pytest.approx(expected)


def search_environment(url: str, **kwargs: Any) -> SearchAnswer:
    return SearchAnswer({"golden_answers": ["The Eiffel Tower", "Paris"]}, retriever_url=url, **kwargs)


def test_a_search_answers_with_passages_and_an_answer_ends_the_episode(retriever_url: str) -> None:
    environment = search_environment(retriever_url, top_k=1)
    first = environment.step("<think>hm</think><search> capital France </search>")
    assert first["observations"] == [
        {"role": "user", "content": "<information>Doc 1: Paris is the capital of France.</information>"}
    ]
    assert (first["done"], first["reward"]) == (False, 0.0)
    last = environment.step("<answer>paris.</answer> <search>more</search>")
    assert (last["done"], last["reward"], last["observations"]) == (True, 1.0, [])
    assert environment.get_metrics() == {"right": 1.0, "answered": 1.0, "searches": 1.0}


@pytest.mark.parametrize(
    ("action", "reward", "done"),
    [
        ("<answer>Eiffel tower</answer>", 1.0, True),
        ("<answer>Rome</answer><answer>Paris</answer>", 0.0, True),
        ("<answer>Paris", 0.0, False),
        ("Paris", 0.0, False),
        ("<search></search>", 0.0, False),
    ],
)
def test_the_first_complete_tag_counts(retriever_url: str, action: str, reward: float, done: bool) -> None:
    step = search_environment(retriever_url).step(action)
    assert (step["reward"], step["done"]) == (reward, done)
    assert done or "Neither" in step["observations"][0]["content"]


def test_the_last_turn_ends_the_episode_without_a_search(retriever_url: str) -> None:
    environment = search_environment(retriever_url, max_turns=1)
    assert environment.step("<search>Mars</search>")["done"]
    assert environment.get_metrics()["searches"] == 0


@pytest.mark.parametrize("path", ["/nowhere", None])
def test_a_retriever_that_fails_fails_the_rollout(monkeypatch: pytest.MonkeyPatch, path: str | None) -> None:
    def post(*args: Any, **kwargs: Any) -> httpx.Response:
        if path is None:
            raise httpx.ReadTimeout("slow")
        return httpx.Response(200, json={"hits": []}, request=httpx.Request("POST", "http://retriever"))

    monkeypatch.setattr("httpx.Client.post", post)
    with pytest.raises(RolloutError, match=r"environment\.kwargs\.retriever_url"):
        search_environment("http://127.0.0.1:9/retrieve").step("<search>x</search>")


@pytest.mark.parametrize("golden", [None, [], "Paris", [1]])
def test_a_question_without_answers_is_an_error_of_the_data(golden: Any) -> None:
    with pytest.raises(DataError, match="golden_answers"):
        SearchAnswer({"golden_answers": golden})


def test_every_recipe_is_tested() -> None:
    assert {path.parent.name for path in RECIPES.glob("*/*.yaml")} == set(NAMES)
