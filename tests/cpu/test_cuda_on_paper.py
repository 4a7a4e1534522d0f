"""The code for GPUs runs on a GPU that is there on paper only: nothing mixes devices, and the host rarely waits for the GPU.

What the GPU is asked for, and how often the host waits for it, is a budget here. Kernels, streams and memory need ``tests/gpu``.
With ``SKYRL_TEST_NEEDS_PAPER`` in the environment (CI), nothing is skipped: the tests fail for what they lack.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import paper_worlds
import pytest
from paper_process import PaperProcess, obstacle, paper_processes
from training_worlds import variant

_OBSTACLE = obstacle()
pytestmark = pytest.mark.skipif(
    _OBSTACLE is not None and not os.environ.get("SKYRL_TEST_NEEDS_PAPER"), reason=_OBSTACLE or ""
)

# The statistics of a step for its metrics, and the norm of its gradient, which decides whether the step is made.
STATISTICS = "tolist @ algorithms/tokens.py:values"
GRADIENT_NORM = "_local_scalar_dense @ training/optimizer.py:step"
SCORES = "to the CPU @ training/gradient_accumulator.py:_score_every_token"
OF_OFFLOAD = "event.synchronize @ outside"  # torch's, for gradients that leave the GPU
# Both sum in another order. 4e-9 was the largest difference of log-probs in float32; in bfloat16 a rounding is 4e-3.
FLOAT32, BFLOAT16 = 1e-5, 0.1


@pytest.fixture(scope="module")
def processes() -> Iterator[list[PaperProcess]]:
    assert _OBSTACLE is None, f"SKYRL_TEST_NEEDS_PAPER is set: {_OBSTACLE}"
    with paper_processes(2) as started:
        yield started


@pytest.fixture(scope="module")
def paper(processes: list[PaperProcess]) -> PaperProcess:
    return processes[0]


@pytest.fixture(scope="module")
def second(processes: list[PaperProcess]) -> PaperProcess:
    return processes[1]


@pytest.mark.parametrize(
    ("changes", "launches"),
    [
        pytest.param({}, 710, id="float32"),
        pytest.param({"policy__dtype": "bfloat16"}, 823, id="bfloat16"),
        pytest.param(
            {"policy__dtype": "bfloat16", "policy__fp32_head": True}, 822, id="a float32 head", marks=pytest.mark.slow
        ),
        pytest.param({"policy__gradient_checkpointing": True}, 842, id="checkpointing", marks=pytest.mark.slow),
        pytest.param({"lora": True}, 804, id="an adapter"),
        pytest.param(
            {"algorithm__kl_loss_coef": 0.1, "algorithm__entropy_coef": 0.01},
            743,
            id="KL and entropy",
            marks=pytest.mark.slow,
        ),
        pytest.param({"algorithm__policy_loss_type": "gspo"}, 720, id="gspo", marks=pytest.mark.slow),
        pytest.param({"micro_batch_tokens": 32}, 1324, id="two micro-batches"),
    ],
)
def test_an_update_waits_for_the_gpu_twice(
    paper: PaperProcess, folder: str, changes: dict[str, object], launches: int
) -> None:
    on_cpu, on_gpu = (paper.run(paper_worlds.train, folder, device, changes) for device in ("cpu", "cuda"))
    assert on_gpu["devices"] == ["cuda"]
    tolerance = BFLOAT16 if changes.get("policy__dtype") else FLOAT32
    assert on_gpu["scores"] == pytest.approx(on_cpu["scores"], abs=tolerance)
    assert on_gpu["metrics"]["loss/policy"] == pytest.approx(on_cpu["metrics"]["loss/policy"], abs=tolerance)
    assert on_gpu["scoring"]["waits"].keys() == {SCORES}
    assert on_gpu["update"]["waits"] == {STATISTICS: 1, GRADIENT_NORM: 1}
    assert on_gpu["update"]["launches"] <= launches
    assert on_cpu["update"]["launches"] == 0


def test_padded_rows_let_transformers_look_at_the_mask(paper: PaperProcess, folder: str) -> None:
    """Its masks depend on the values of the attention mask: two more waits for each pass. Packed rows have none."""
    on_gpu = paper.run(paper_worlds.train, folder, "cuda", {"packing": False})
    assert sum(on_gpu["update"]["waits"].values()) == 4


@pytest.mark.parametrize("of_critic", [False, True], ids=["policy", "critic"])
def test_packed_rows_go_to_flash_attention_as_they_are(paper: PaperProcess, folder: str, of_critic: bool) -> None:
    changes = {"critic__dtype" if of_critic else "policy__dtype": "bfloat16"}
    on_cpu = paper.run(paper_worlds.train, folder, "cpu", changes, of_critic)
    on_gpu = paper.run(paper_worlds.train, folder, "cuda", changes, of_critic, True)
    assert on_gpu["scores"] == pytest.approx(on_cpu["scores"], abs=BFLOAT16)
    assert on_gpu["update"]["waits"] == {STATISTICS: 1, GRADIENT_NORM: 1}


def test_packed_rows_in_float32_get_a_copy_of_the_keys_for_each_head(paper: PaperProcess, tmp_path: Path) -> None:
    """On a GPU only the kernel that keeps the scores of all pairs of tokens shares keys among heads in float32."""
    grouped = variant(tmp_path, "grouped", num_heads=4, num_key_value_heads=2)
    on_cpu, on_gpu = (paper.run(paper_worlds.train, grouped, device, {}) for device in ("cpu", "cuda"))
    assert on_gpu["scores"] == pytest.approx(on_cpu["scores"], abs=FLOAT32)


def test_a_critic_trains_on_the_gpu(paper: PaperProcess, folder: str) -> None:
    on_cpu, on_gpu = (paper.run(paper_worlds.train, folder, device, {}, True) for device in ("cpu", "cuda"))
    assert on_gpu["devices"] == ["cuda"]
    assert on_gpu["scores"] == pytest.approx(on_cpu["scores"], abs=FLOAT32)
    assert on_gpu["metrics"]["loss/value"] == pytest.approx(on_cpu["metrics"]["loss/value"], abs=FLOAT32)
    assert on_gpu["update"]["waits"] == {STATISTICS: 1, GRADIENT_NORM: 1}
    assert on_gpu["update"]["launches"] <= 617


def test_a_reference_scores_on_the_gpu(paper: PaperProcess, folder: str) -> None:
    on_cpu, on_gpu = (paper.run(paper_worlds.reference, folder, device) for device in ("cpu", "cuda"))
    for one, other in zip(on_cpu, on_gpu, strict=True):
        assert one == pytest.approx(other, abs=FLOAT32)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_weights_leave_the_gpu_without_a_wait_for_each(
    paper: PaperProcess, folder: str, tmp_path: Path, dtype: str
) -> None:
    result = paper.run(paper_worlds.state, folder, str(tmp_path), dtype)
    assert result["weights"] and result["again"], "what was staged, and what was loaded, is what was on the GPU"
    assert result["staged"][1] == "cuda" and result["outside"] == {"cpu"}
    assert result["locked"] == ({"snapshot_0": result["state_bytes"]}, 0), "once, and not by the thread that trains"
    assert result["registered"] == (True, False), "until the backend is closed"
    copies = "event.synchronize @ weight_sync/pinning.py:wait_for_copies"
    assert {name: counted["waits"] for name, counted in result["counted"].items()} == {
        "stage": {copies: 1},
        "stage on the device": {copies: 1},
        "snapshot": {"stream.synchronize @ training/state.py:_copy": 1},  # in a thread
        "turn": {"cuda.synchronize @ training/local_backend.py:offload_states": 1},
    }
    assert result["counted"]["turn"]["emptied"] == {"training/local_backend.py:offload_states": 1}, "for the engines"


def test_the_embedded_engine_samples_on_the_gpu(paper: PaperProcess) -> None:
    on_cpu, on_gpu = (paper.run(paper_worlds.generate, device) for device in ("cpu", "cuda"))
    assert on_gpu["devices"] == ["cuda"]
    assert on_gpu["tokens"] == on_cpu["tokens"]
    assert on_gpu["versions"] == on_cpu["versions"] == 3 * [[0, 0, 1, 1, 1, 1]]
    # Its tokens go in, tokens and log-probs come out.
    assert sum(on_gpu["step"]["waits"].values()) == 4
    assert on_gpu["step"]["launches"] <= 142


@pytest.mark.parametrize("name", paper_worlds.FAULTS)
def test_a_tensor_on_the_wrong_device_is_noticed(paper: PaperProcess, folder: str, name: str) -> None:
    assert "on cuda and" in paper.run(paper_worlds.fault, folder, name)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="float32", marks=pytest.mark.slow),
        pytest.param(
            {"policy__dtype": "bfloat16", "policy__gradient_checkpointing": True, "tf32": True},
            id="bfloat16, checkpointing, TF32",
        ),
        pytest.param({"fsdp__sequence_parallel_size": 2}, id="slices of a sequence", marks=pytest.mark.slow),
        pytest.param({"fsdp__shard_size": 1}, id="copies", marks=pytest.mark.slow),
        pytest.param({"fsdp__cpu_offload": True}, id="in main memory", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_share_a_policy_on_their_gpus(
    paper: PaperProcess, second: PaperProcess, folder: str, tmp_path: Path, changes: dict[str, object]
) -> None:
    meeting = paper.run(paper_worlds.host_store, 2)
    for number, process in enumerate((paper, second)):
        process.begin(paper_worlds.rank, number, 2, meeting, folder, str(tmp_path), changes)
    ranks = [process.result() for process in (paper, second)]
    alone = {name: value for name, value in changes.items() if not name.startswith("fsdp")}
    on_cpu = paper.run(paper_worlds.train, folder, "cpu", alone)
    for rank in ranks:
        tolerance = BFLOAT16 if changes.get("policy__dtype") else FLOAT32
        assert rank["metrics"]["loss/policy"] == pytest.approx(on_cpu["metrics"]["loss/policy"], abs=tolerance)
        assert rank["metrics"]["policy/grad_norm"] == pytest.approx(
            on_cpu["metrics"]["policy/grad_norm"], rel=tolerance
        )
        assert rank["again"], "a checkpoint continues bit for bit"
        assert rank["turned"], "shards come back from main memory as they were"
        emptied = rank["counted"]["offload"]["emptied"]
        assert emptied == {"training/distributed/worker.py:offload_states": 1}, "for the engines"
        assert rank["cuDNN, float32"] == (False, "high" if changes.get("tf32") else "highest")
        waits = {name: number for name, number in rank["counted"]["update"]["waits"].items() if name != OF_OFFLOAD}
        assert waits == {STATISTICS: 1, GRADIENT_NORM: 1}
        assert rank["counted"]["update"]["launches"] <= 1200
    assert [rank["staged"] is None for rank in ranks] == [False, True]
    copies = "event.synchronize @ weight_sync/pinning.py:wait_for_copies"
    assert [rank["counted"]["stage"]["waits"] for rank in ranks] == [{copies: 1}, {}]
