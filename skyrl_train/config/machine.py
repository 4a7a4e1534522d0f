"""The memory of this machine, asked without torch: asking a GPU through it would tie the process to the GPU."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

_MIB = 2**20
_ASK_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Machine:
    """What is there in all, whoever uses it now."""

    main_memory_bytes: int
    gpu_bytes: tuple[int, ...] = ()  # of each visible GPU; empty: none, or the driver does not say


def this_machine(*, gpus: bool) -> Machine:
    """Asks the system, and for ``gpus`` the driver."""
    return Machine(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _gpu_bytes() if gpus else ())


def _gpu_bytes() -> tuple[int, ...]:
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=_ASK_LIMIT_S).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return visible_gpus(answer, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible_gpus(answer: str, visible: str | None) -> tuple[int, ...]:
    """The bytes of each GPU in an answer of lines ``index, uuid, MiB``, those left out that ``CUDA_VISIBLE_DEVICES`` hides."""
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines()]
    named = None if visible is None else [name.strip() for name in visible.split(",") if name.strip()]
    return tuple(
        int(row[2]) * _MIB
        for row in rows
        if len(row) == 3
        and row[2].isdecimal()
        and (named is None or row[0] in named or any(row[1].startswith(name) for name in named))
    )
