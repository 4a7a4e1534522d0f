"""``skyrl-train doctor`` on a cluster: it compares the nodes, and lets them call each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray_worlds import RayNodes

from skyrl_train.config.compose import compose
from skyrl_train.entrypoints.cluster_check import NodeReport, Probe, cluster, compared
from skyrl_train.entrypoints.command_line import main

FINE = {"Python": "3.12.1", "torch": "2.11", "vllm": "missing"}


def found(*reports: NodeReport, must_share: bool = True) -> dict[str, tuple[str, str]]:
    return {name: (text, remedy) for name, text, remedy in compared(reports, "/runs", "/model", must_share=must_share)}


def report(node: str, unwritable: str = "", shared: bool = True, no_model: bool = False, **versions: str) -> NodeReport:
    return NodeReport(node, FINE | versions, unwritable, shared, no_model)


def test_nodes_that_are_alike_pass() -> None:
    told = found(report("a"), report("b"))
    assert told["versions of the nodes"] == ("the same on 2", "")
    assert told["runs of the nodes"] == ("/runs is the same on all nodes", "")
    assert found() == {}


def test_what_differs_between_nodes_is_named_with_its_remedy() -> None:
    told = found(report("a"), report("b", torch="2.12"), report("c", Python="3.11.9", vllm="0.32", no_model=True))
    assert told["torch of the nodes"] == ("2.11 on a and c, 2.12 on b", "pip install torch==2.11 on the others")
    assert told["vllm of the nodes"] == ("missing on a and b, 0.32 on c", "pip install vllm==0.32 on the others")
    assert told["Python of the nodes"] == ("3.12.1 on a and b, 3.11.9 on c", "Install the same Python on all nodes")
    assert told["model of the nodes"] == ("c has no /model", "Copy it there, to the same path")
    assert "versions of the nodes" not in told


@pytest.mark.parametrize("must_share", [True, False])
def test_ranks_need_a_folder_that_they_share_and_others_one_that_they_can_write(must_share: bool) -> None:
    text, remedy = found(report("a"), report("b", shared=False), must_share=must_share)["runs of the nodes"]
    assert ("b does not see" in text and "all nodes share in trainer.runs_dir" in remedy) is must_share
    assert must_share or (text, remedy) == ("/runs is writable on all nodes", "")
    text, remedy = found(report("a"), report("b", unwritable="read-only"), must_share=must_share)["runs of the nodes"]
    assert text == "b: read-only" and "trainer.runs_dir" in remedy


def test_all_nodes_are_visited_and_reach_each_other(ray_nodes: RayNodes, tmp_path: Path) -> None:
    ray_nodes.have_far()
    settings = ["trainer.strategy=fsdp2", "trainer.fsdp.num_workers=2", f"trainer.runs_dir={tmp_path}/runs"]
    told = {name: (text, remedy) for name, text, remedy in cluster(compose("quickstart", settings))}
    assert told.keys() == {"versions of the nodes", "runs of the nodes", "gloo between 2 nodes"}
    assert told["versions of the nodes"] == ("the same on 2", "")
    assert told["runs of the nodes"] == (f"{tmp_path}/runs is the same on all nodes", "")
    text, remedy = told["gloo between 2 nodes"]
    assert text.endswith(" ms to add up a number") and not remedy
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_a_node_tries_to_write_and_looks_for_what_was_written(tmp_path: Path) -> None:
    fine = Probe().look(["rich", "no-such"], f"{tmp_path}/new/runs", str(tmp_path), str(tmp_path))
    assert (fine.unwritable, fine.shared, fine.no_model) == ("", True, False)
    assert fine.versions["rich"] != "missing" == fine.versions["no-such"]
    bad = Probe().look([], "/proc/runs", "/proc/runs", "/proc/model")  # nobody, not even root, can write there
    assert "/proc/" in bad.unwritable and (bad.shared, bad.no_model) == (False, True)


def test_a_recipe_on_one_machine_asks_no_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr("skyrl_train.workers.ray.connect", lambda: pytest.fail("it connected"))
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray._private.utils.read_ray_address", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    main(["doctor", "quickstart"])
    assert "of the nodes" not in capsys.readouterr().out
    main(["doctor", "quickstart", "rollout.num_actors=2"])
    assert "the run starts Ray on this machine" in capsys.readouterr().out
