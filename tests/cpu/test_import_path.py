"""What people name in settings: a class or a function, in a package or in a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.import_path import import_name, import_path_of, place_of
from skyrl_train.errors import ConfigError


def test_a_file_is_run_once_however_many_settings_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("named_twice.py").write_text("class One: ...\n\n\nclass Two:\n    base = One\n")
    one = import_name("named_twice.py:One", "generator.name")
    two = import_name(f"{tmp_path}/named_twice.py:Two", "environment.env_class")
    assert two.base is one


def test_a_file_that_failed_is_run_again(tmp_path: Path) -> None:
    file = tmp_path / "mended.py"
    file.write_text("import no_such_package_anywhere\n")
    with pytest.raises(ConfigError, match=r"mended.py imports it: install its package"):
        import_name(f"{file}:One", "generator.name")
    file.write_text("class One: ...\n")
    assert import_name(f"{file}:One", "generator.name").__name__ == "One"


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
