"""What people name in settings: a class or a function, in a package or in a file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.import_path import import_module, import_name, import_path_of, place_of
from skyrl_train.errors import ConfigError


def test_a_file_is_run_once_however_many_settings_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("named_twice.py").write_text("class One: ...\n\n\nclass Two:\n    base = One\n")
    one = import_name("named_twice.py:One", "generator.name")
    two = import_name(f"{tmp_path}/named_twice.py:Two", "environment.env_class")
    assert two.base is one


def test_a_wrong_name_is_told_with_the_one_that_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("misspelt.py").write_text("class Calculator: ...\n")
    with pytest.raises(ConfigError, match=r"Did you mean misspelt\.py:Calculator\?"):
        import_name("misspelt.py:Calculater", "environment.env_class")
    with pytest.raises(ConfigError, match=r"Name a class as package\.module:Class or file\.py:Class\."):
        import_name("misspelt.py:Other", "environment.env_class")
    with pytest.raises(ConfigError, match=r"='misspelt\.py' is a file\. Name a function as .* file\.py:function\."):
        import_name("misspelt.py", "rollout.stages.reward.function", "function")


def test_a_file_that_failed_is_run_again(tmp_path: Path) -> None:
    file = tmp_path / "mended.py"
    file.write_text("import no_such_package_anywhere\n")
    with pytest.raises(ConfigError, match=r"mended.py imports it: install its package"):
        import_name(f"{file}:One", "generator.name")
    file.write_text("class One: ...\n")
    assert import_name(f"{file}:One", "generator.name").__name__ == "One"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("int('three')", "ValueError: invalid literal"),
        ("__import__('json').loads('{')", "JSONDecodeError: Expecting property name"),
        ("None.rewards", "AttributeError: 'NoneType' object"),
        ("open('no/such/table.json')", "FileNotFoundError: .*No such file"),
        ("import no_such_package_anywhere", "ModuleNotFoundError: No module named 'no_such_package_anywhere'"),
    ],
)
def test_an_error_in_the_users_module_names_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, said: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / f"breaks_{abs(hash(line))}.py"
    file.write_text(f"\n\nclass One: ...\n{line}\n")
    for path in (f"{file}:One", f"{file.stem}:One"):
        with pytest.raises(ConfigError, match=said) as told:
            import_name(path, "generator.name")
        assert f"{file}:4" in str(told.value) or "imports it" in str(told.value)
        assert "Name a class" not in str(told.value)
    with pytest.raises(ConfigError, match=rf"{said}.* Mend {file}:4\.$"):
        import_module(str(file), "environment.modules")


def test_a_file_with_a_dot_in_its_name_is_to_be_renamed(tmp_path: Path) -> None:
    (tmp_path / "reward.v2.py").write_text("def reward(group): ...\n")
    with pytest.raises(ConfigError, match=r"reward\.v2\.py has a dot in its name.*rename the file"):
        import_name(f"{tmp_path}/reward.v2.py:reward", "rollout.stages.reward.function", "function")


@pytest.mark.parametrize("name", ["datasets", "yaml", "random"])
def test_a_file_does_not_take_the_name_of_an_installed_module(name: str, tmp_path: Path) -> None:
    file = tmp_path / f"{name}.py"
    file.write_text("class One: ...\n")
    before = sys.modules.get(name)
    with pytest.raises(ConfigError, match=f"{name}.py has the name of an installed module.*rename the file"):
        import_name(f"{file}:One", "generator.name")
    assert sys.modules.get(name) is before


def test_files_of_one_name_in_two_folders_are_two(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same_name.py").write_text(f"PLACE = {folder!r}\n")
    found = [import_name(f"{tmp_path}/{folder}/same_name.py:PLACE", "data.sampler") for folder in "aba"]
    assert found == ["a", "b", "a"]


def test_the_place_of_an_object_of_this_process_is_its_own_and_of_a_notebooks_cell_none() -> None:
    def inner() -> None: ...

    line = inner.__code__.co_firstlineno
    assert place_of(import_path_of(inner)) == f"{__file__}:{line}"
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def in_a_cell(): ...", "<ipython-input-1>", "exec"), cell)
    assert place_of(import_path_of(cell["in_a_cell"])) is None
    assert place_of("skyrl_train.config.import_path:place_of") == (
        f"{place_of.__code__.co_filename}:{place_of.__code__.co_firstlineno}"
    )


def lambdas(factor: float, later: bool = False) -> dict[str, Callable[..., Any]]:
    if later:
        missing = 1
    return {
        "plain": lambda group, bonus=2: [group + bonus, {"a", "b", "c", "d"} & group, lambda: 3],
        "same": lambda group, bonus=2: [group + bonus, {"a", "b", "c", "d"} & group, lambda: 3],
        "constant": lambda group, bonus=2: [group + bonus, {"a", "b", "c", "e"} & group, lambda: 3],
        "inner": lambda group, bonus=2: [group + bonus, {"a", "b", "c", "d"} & group, lambda: 4],
        "default": lambda group, bonus=3: [group + bonus, {"a", "b", "c", "d"} & group, lambda: 3],
        "keyword": lambda group, *, bonus=2: [group + bonus, {"a", "b", "c", "d"} & group, lambda: 3],
        "operator": lambda group, bonus=2: [group - bonus, {"a", "b", "c", "d"} & group, lambda: 3],
        "name": lambda group, bonus=2: [group + bonus, {"a", "b", "c", "d"} & sum, lambda: 3],
        "captured": lambda group: group * factor,
        "unset": lambda group: missing,
    }


def test_a_lambda_has_the_path_of_its_code_and_of_what_it_is_bound_to() -> None:
    paths = {name: import_path_of(function) for name, function in lambdas(1.5).items()}
    assert paths["plain"] == paths["same"]
    assert len(set(paths.values())) == len(paths) - 1
    assert import_path_of(lambdas(1.5)["captured"]) == paths["captured"]
    assert import_path_of(lambdas(2.5)["captured"]) != paths["captured"]
    one, other = lambdas(1.5)["captured"], lambdas(2.5)["captured"]
    import_path_of(one), import_path_of(other)
    assert import_name(import_path_of(one), "x")(2) == 3 and import_name(import_path_of(other), "x")(2) == 5
    assert import_path_of(lambdas).endswith(":lambdas"), "a function with a name may be mended while its run is stopped"


def test_the_path_of_a_lambda_is_the_same_in_each_process() -> None:
    # Python orders sets by hashes that differ between processes.
    code = "from skyrl_train.config.import_path import import_path_of; "
    code += "print(import_path_of(lambda x: x in {'a', 'b', 'c', 'd', 'e'} or (1, 'x', None)))"
    paths = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in "1234"
    }
    assert len(paths) == 1
