"""Which test files belong to which room (``pytest --room staleness``)."""

from __future__ import annotations

from pathlib import Path

# Room -> the beginnings of the names of its test files, without "test_". The longest beginning decides.
ROOMS = {
    "algorithms": ("algorithms", "kl"),
    "chat": ("chat", "response_text"),
    "client": ("client", "continuation", "fleet", "replay"),
    "config": (
        "config", "no_effect", "import_path", "memory_fit", "machine_plan", "lora_settings", "algorithms_settings",
        "distributed_settings",
    ),
    "data": ("dataloader", "dataset", "ledger", "samplers", "streaming_data"),
    "dialects": ("dialect",),
    "distributed": ("distributed",),
    "embedded": ("embedded", "busy_time", "grammar"),
    "endpoint": ("server", "battery"),
    "entrypoints": ("entrypoint", "front_door", "mistakes", "stopping", "extensions"),
    "environments": ("environments", "sandbox"),
    "evaluation": ("evaluation",),
    "events": ("events",),
    "examples": ("benchmarks", "first_gpu_run", "examples", "tutorials", "recipes", "quickstart", "harness_examples"),
    "generators": ("generators",),
    "harness": ("harness",),
    "models": ("models",),
    "observability": ("observability",),
    "project": ("project", "walks", "mutate"),
    "rollout": ("buffer", "filters", "dispatcher", "rollout_checkpoint", "group"),
    "runtime": ("concurrency", "gc_tuning", "pickling", "watchdog"),
    "sessions": ("sessions",),
    "simulation": ("simulation",),
    "stages": ("stages", "stage_parts"),
    "staleness": ("staleness",),
    "trainers": (
        "trainer", "assembly", "damaged_checkpoints", "determinism", "endings", "failures", "kill_and_resume", "modes",
        "sync_equivalence", "streaming_minibatch", "replay_trainer", "nonfinite", "critic_training", "lora_training",
        "colocation",
    ),
    "training": (
        "training", "checkpoint_store", "compilation", "critic", "cuda_on_paper", "head_kernels", "minibatch",
        "remote_checkpoint", "snapshots",
    ),
    "vllm": ("vllm",),
    "weight_sync": (
        "transports", "delta_transport", "gloo_transport", "shared_memory_transport", "weight_checksums", "weight_staging",
        "lora_weight_sync",
    ),
    "workers": ("hosting", "executors", "ray_engine", "reservation", "rollout_actors"),
}  # fmt: skip


def room_of(file: str) -> str | None:
    """The room of a test file, by its name."""
    name = Path(file).stem.removeprefix("test_")
    fits = [(len(start), room) for room, starts in ROOMS.items() for start in starts if name.startswith(start)]
    return max(fits)[1] if fits else None
