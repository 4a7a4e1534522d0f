"""The command line as a whole: its verbs, its help, its exit codes."""

from __future__ import annotations

import importlib
import json
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from transformers import AutoTokenizer

from skyrl_train.config.compose import compose
from skyrl_train.config.memory import Machine
from skyrl_train.config.schema import BuildModelConfig
from skyrl_train.entrypoints.command_line import app, main
from skyrl_train.entrypoints.doctor import devices, packages
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.version import __version__

ROOT = Path(__file__).parents[2]
VERBS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_help_of_the_command_and_of_each_verb_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from skyrl_train.entrypoints.command_line import main\n"
        "print(main(['--help']), 'pydantic' in sys.modules, file=sys.stderr)\n"
        f"print([main([verb, '-h']) for verb in {VERBS}], file=sys.stderr)\n"  # typer reads a verb's options with pydantic
        "heavy = ('torch', 'hydra', 'numpy', 'transformers', 'uvicorn', 'starlette', 'pandas', 'pyarrow')\n"
        "sys.exit(str([name for name in heavy if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines() == ["0 False", str([0] * len(VERBS)), "[]"]
    assert all(f" {verb} " in done.stdout for verb in VERBS)


def test_the_command_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"skyrl-async {__version__}\n"


def test_the_installed_command_and_the_module_are_the_same() -> None:
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["skyrl-train"]
    module, _, name = script.partition(":")
    assert (
        getattr(importlib.import_module(module), name) is main is importlib.import_module("skyrl_train.__main__").main
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["tarin", "quickstart"], "Did you mean 'train'"),
        (["train"], "RECIPE"),
        (["train", "quikstart"], "Did you mean quickstart"),
        (["plan", "trainer.seed=1"], "There is no recipe 'trainer.seed=1'"),
        (["try", "quickstart", "-n", "0"], "--samples"),
        (["serve", "x", "--backend", "sglang"], "embedded"),
    ],
)
def test_a_wrong_command_line_exits_with_2_and_says_what_is_wrong(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert told.lower() in capsys.readouterr().err.lower()


def test_a_module_that_exits_with_a_text_has_it_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "needs_a_key.py").write_text("import sys\nsys.exit('Set MY_KEY.')\n")
    assert main(["plan", "quickstart", f"environment.modules=[{tmp_path}/needs_a_key.py]"]) == 1
    assert capsys.readouterr().err == "Set MY_KEY.\n"


def test_serve_looks_at_its_port_before_it_loads_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "no-model", "--open", "--port", str(taken.getsockname()[1])]) == 2
    assert "--port" in capsys.readouterr().err


# watch ------------------------------------------------------------------------------------------------------------


def test_watch_shows_the_newest_run_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "mine-1"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "latest").write_text("global_step_2\n")
    (run / "config.yaml").write_text("trainer: {mode: sync, max_steps: 3, failures: {max_failed_rollouts: 7}}\n")
    (run / "eval.jsonl").write_text('{"step": 2, "policy_version": 2, "eval/pass@1": 0.5}\n')
    row = {"reward/mean": 0.25, "elapsed_s": 9.0, "async/failed": 1.0, "staleness/mean": None, "time/step": 1.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": n, **row}) + "\n" for n in (1, 2)) + '{"step": 3')

    def finish(_: float) -> None:
        with (run / "metrics.jsonl").open("a") as file:
            file.write(', "reward/mean": NaN, "async/failed": 1}\n')
        (run / "finished.json").write_text("{}")

    # In this module only: threads of other tests may sleep meanwhile.
    clock = SimpleNamespace(sleep=finish, monotonic=time.monotonic)
    monkeypatch.setattr("skyrl_train.entrypoints.watch.time", clock)
    assert main(["watch", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "mine-1 (sync): 3 steps" in shown
    assert "step 2/3  reward 0.250" in shown and "checkpoint step 2" in shown and "1 group (7 allowed)" in shown
    assert "step 3/3  reward nan" in shown
    assert shown.endswith("mine-1 (sync): finished, step 3\n")


@pytest.mark.parametrize("exists", [True, False])
def test_each_reader_says_the_same_of_a_run_that_is_not_there(
    exists: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "nothing"
    if exists:
        folder.mkdir()
    why = "" if exists else f" ({folder} does not exist)"
    for command in (["watch"], ["page"], ["report"], ["trace"], ["compare"], ["track"]):
        if command == ["page"] and exists:
            continue  # it waits for the runs of the folder
        assert main([*command, str(folder), *(["tensorboard"] if command == ["track"] else [])]) == 2
        assert capsys.readouterr().err.splitlines() == [
            f"NoSuchRunError: There is no run in {folder}{why}. Name a run, or a folder of runs.",
            "More: docs/tutorials/errors.md#configerror",
        ]
    for command in (["eval"], ["export"]):
        assert main([*command, str(folder), *([str(tmp_path / "new")] if command == ["export"] else [])]) == 2
        assert capsys.readouterr().err.startswith("NoSuchRunError: ")


def test_watch_shows_a_run_without_a_step_or_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("[not, settings")
    assert main(["watch", str(tmp_path), "--once"]) == 0
    assert "live, step 0" in capsys.readouterr().out
    assert main(["watch", str(tmp_path / "none")]) == 2


# doctor -----------------------------------------------------------------------------------------------------------


def test_doctor_says_what_mends_each_thing_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{closed.getsockname()[1]}")  # bound, without a listener
        monkeypatch.setattr(
            "importlib.metadata.requires", lambda _: ["numpy>=999", "pytest", "no-such>1; extra == 'x'"]
        )
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2**20))
        monkeypatch.setattr("skyrl_train.entrypoints.doctor.this_machine", lambda gpus: Machine(2**40, ()))
        monkeypatch.setattr("skyrl_train.entrypoints.doctor.why_unavailable", lambda _: "no namespaces here")
        assert main(["doctor", "quickstart", "trainer.device=cuda", f"trainer.runs_dir={tmp_path}/new/runs"]) == 1
    lines = capsys.readouterr().out.splitlines()
    mended = {line.split(":")[0].removeprefix("MEND").strip(): line for line in lines if line.startswith("MEND")}
    assert mended.keys() == {"numpy", "GPUs", "/dev/shm", "runs", "temporary files", "Ray"}
    assert "pip install 'numpy>=999'" in mended["numpy"]
    assert "--shm-size" in mended["/dev/shm"]
    fine = [line.removeprefix("OK").split(":")[0].strip() for line in lines if line.startswith("OK")]
    assert {"Python", "sandbox", "data", "recipe", "memory"} <= set(fine), (
        "the quickstart runs no program in the sandbox"
    )


@pytest.mark.parametrize(
    ("override", "missing"),
    [
        ("generator.inference_engine.backend=vllm", {"vllm": "pip install 'skyrl-async[vllm]'"}),
        ("generator.inference_engine={backend: vllm, executor: ray}", {}),  # it need not be on this machine
        ("trainer.policy.model.lora.rank=4", {"peft": "pip install 'skyrl-async[lora]'"}),
        ("trainer.seed=1", {}),
    ],
)
def test_doctor_misses_the_packages_that_a_recipe_needs(
    monkeypatch: pytest.MonkeyPatch, override: str, missing: dict[str, str]
) -> None:
    monkeypatch.setattr("skyrl_train.entrypoints.doctor.find_spec", lambda name: None)
    told = {name: remedy for name, found, remedy in packages(compose("quickstart", [override])) if found == "missing"}
    assert told.keys() == missing.keys() and all(told[name].startswith(remedy) for name, remedy in missing.items())


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["trainer.device=cuda:3"], "computes on cuda:3, and cuda:1 is the last one"),
        (
            ["trainer.device=cuda", "generator.inference_engine={backend: vllm, device: cuda, num_engines: 3}"],
            "on cuda:2",
        ),
        (["trainer.device=cuda:1"], None),
        (["trainer.strategy=fsdp2", "trainer.device=cuda", "trainer.fsdp.num_workers=16"], None),  # of a cluster
    ],
)
def test_doctor_compares_the_devices_with_those_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], told: str | None
) -> None:
    monkeypatch.setattr("skyrl_train.entrypoints.doctor.this_machine", lambda gpus: Machine(2**40, (2**36, 2**36)))
    [(name, found, remedy)] = devices(compose("quickstart", overrides))
    assert (name, found) == ("GPUs", "64 GiB, 64 GiB")
    assert remedy == "" if told is None else told in remedy


def test_doctor_finds_a_broken_recipe_and_a_missing_chat_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_model_folder(BuildModelConfig(hidden_size=32, num_layers=1), tmp_path / "model", seed=0)
    path = f"trainer.policy.model.path={tmp_path}/model"
    main(["doctor", "quickstart", path])
    assert "OK    chat template" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = None
    (tmp_path / "model" / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(tmp_path / "model")
    main(["doctor", "quickstart", path])
    assert "OK    chat template" in capsys.readouterr().out, "texts that are answered once need none"
    main(["doctor", "quickstart", path, "generator.max_turns=2"])
    assert "MEND  chat template" in capsys.readouterr().out
    (tmp_path / "mine.yaml").write_text("defaults: [quickstart, _self_]\ndata: {train_data: [nowhere.jsonl]}\n")
    assert main(["doctor", "mine", path, "--config-dir", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "MEND  recipe: DataError. nowhere.jsonl" in told and "MEND  chat template" in told
