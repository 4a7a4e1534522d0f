"""How the tests are spread over processes (``pytest -n 4``), the tests of one room (``--room staleness``), a random order
(``--shuffle 1``), the examples of property tests, and how close float comparisons come to their tolerances (``--margins``)."""

from __future__ import annotations

import gc
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from forks import FORKS, Forks, asking_python
from groups import LONGEST_FIRST, group_of
from hypothesis import is_hypothesis_test, settings
from hypothesis.internal.conjecture import engine as examples
from rooms import ROOMS, room_of

# The tests start dozens of processes. Where the environment forbids writing bytecode, each of them compiles torch and
# transformers again, which takes 10 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Property tests. By default the examples are the same in each run, so that only a change of the code or of a test makes one
# fail. Run with -m slow, each property test tries new ones, and five times as many. An example has no deadline, because
# wall-clock time says nothing on a shared machine.
settings.register_profile("same", deadline=None, derandomize=True, max_examples=20)
# Where the variable CI is set, the profile that others inherit from derandomizes.
settings.register_profile("new", deadline=None, derandomize=False, database=None, print_blob=True, max_examples=100)
settings.load_profile("same")
# Hypothesis has no setting for this. Its own limit is 300 s; a test's time limit may come first, and then no example is shown.
examples.MAX_SHRINKING_SECONDS = 20


def tries_new_examples(config: pytest.Config) -> bool:
    expression = config.option.markexpr
    return "slow" in expression and "not slow" not in expression


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--room", help="read and run the tests of one room only; 'list' prints the rooms")
    parser.addoption("--margins", action="store_true", help="list float tolerances close to the differences")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in a random order")


@pytest.hookimpl(tryfirst=True)  # before Hypothesis takes the seed
def pytest_configure(config: pytest.Config) -> None:
    config.stash[FORKS] = Forks()
    if config.getoption("numprocesses", None):
        python = asking_python(config.stash[FORKS].address)
        config.option.tx = [f"popen//python={python}"] * len(config.option.tx)
    else:
        gc.disable()  # until everything is imported: there is no garbage, and a walk through all of it takes a second
    room = config.getoption("--room")
    if room is not None and room not in ROOMS:
        problem = "" if room == "list" else f"there is no room {room!r}. "
        pytest.exit(f"{problem}Rooms: {', '.join(sorted(ROOMS))}", returncode=0 if room == "list" else 2)
    if config.getoption("--margins"):
        if config.getoption("numprocesses", None):
            pytest.exit("--margins needs the comparisons of one process: leave out -n", returncode=2)
        from margins import Margins  # imports torch

        config.pluginmanager.register(Margins())
    if tries_new_examples(config):
        settings.load_profile("new")
        if config.option.hypothesis_seed is None:  # the processes of -n 4 get it from the one that starts them
            config.option.hypothesis_seed = str(random.SystemRandom().randrange(2**32))


def pytest_itemcollected(item: pytest.Item) -> None:
    if tries_new_examples(item.config) and is_hypothesis_test(getattr(item, "obj", None)):
        item.add_marker("slow")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if tries_new_examples(config) and terminalreporter.stats.get("failed"):
        seed = config.option.hypothesis_seed
        terminalreporter.line(
            f"The same examples again: pytest -m slow --hypothesis-seed={seed} and a failed test's name"
        )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    room = config.getoption("--room")
    if room is None or collection_path.is_dir() or not collection_path.name.startswith("test_"):
        return None
    return True if room_of(collection_path.name) != room else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--shuffle")
    if seed is None:
        places = {group: place for place, group in enumerate(LONGEST_FIRST)}
        items.sort(key=lambda item: places.get(group_of(item.nodeid), len(places)))
    else:
        order = random.Random(seed)
        # A file's tests stay together: the fixtures of a file are set up once.
        files = {path: order.random() for path in sorted({item.path for item in items})}
        order.shuffle(items)
        items.sort(key=lambda item: (files[item.path], item.get_closest_marker("last_in_its_file") is not None))
    items.sort(key=lambda item: item.get_closest_marker("ends_shared_engines") is not None)


def pytest_collection_finish() -> None:
    """Everything is imported. From now on the garbage collector passes over it, and runs seldom: with the default thresholds it
    took 7 to 11 % of the processor time of six files. Tests that look for garbage collect it themselves."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_sessionfinish(session: pytest.Session) -> None:
    # At the end of an interpreter, libraries complain about objects that are left. Forked processes end without.
    if not hasattr(session.config, "workerinput"):
        gc.unfreeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[FORKS].close()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedules whole groups of tests."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False  # groups start in the order of the tests, and not by their number of tests
    return Groups(config, log)
