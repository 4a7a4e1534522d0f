"""Which test files share a process (``pytest -n 4``), because they share a slow start."""

from __future__ import annotations

from pathlib import PurePosixPath

# A file's tests run in one process. Files that share real vLLM engines or Ray share a process too.
SHARED = {
    "test_vllm": "vllm",
    "test_lora_weight_sync": "vllm",
    "test_distributed": "ray",
    "test_ray": "ray",
    "test_executors": "ray",
    "test_rollout_actors": "ray",
    "test_reservation": "ray",
    "test_colocation": "ray",
    "test_entrypoint_cluster": "ray",
}
# These groups run first: one that came last would leave the other processes idle.
LONGEST_FIRST = [*dict.fromkeys(SHARED.values()), "test_quickstart", "test_kill_and_resume", "test_examples"]


def group_of(nodeid: str) -> str:
    name = PurePosixPath(nodeid.partition("::")[0]).stem
    return next((group for start, group in SHARED.items() if name.startswith(start)), name)
