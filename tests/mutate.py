"""Do the tests notice wrong rules? Changes one operator, constant or statement at a time and runs the tests of that file.

    python tests/mutate.py                                  # 200 mutants of the files in ROOMS
    python tests/mutate.py --room staleness --mutants 50
    python tests/mutate.py --only skyrl_train/algorithms/kl.py:93     # every mutant of one line, after a test was added
    python tests/mutate.py skyrl_train/inference/pool/router.py --tests tests/cpu/test_fleet.py

The exit code is 1 if fewer than ``--at-least`` of the mutants are killed, and 2 if the tests fail without a mutant.

    parent: imports torch, pytest, ... ──fork──> child: imports the package and the tests; the mutated module comes from memory
            waits for the exit code     <──────         pytest -x

No file is changed. A mutant is killed if a test fails, if one test takes much more CPU time than without the mutant, or if the
tests sleep forever. Time on the clock decides nothing, so a busy machine gives the same result.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import gc
import importlib
import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import pytest

ROOT = Path(__file__).parents[1]
IMPORT_CPU_S = 60  # for importing the mutated package and the tests, which takes 2 s
TEST_CPU_S, TEST_FACTOR = 5, 10  # a test may take this much, and this many times as much as without a mutant
ASLEEP_S = 15  # without any work; the tests do not wait for real time
MEMORY_BYTES = 8 << 30  # of a process; an endless loop may also fill a list


@dataclass(frozen=True)
class Room:
    """Files that state rules, and the tests that have to notice a wrong one: quick and narrow files first."""

    sources: list[Path]
    tests: list[Path]

    @classmethod
    def of(cls, sources: str, tests: str) -> Room:
        return cls(
            [ROOT / "skyrl_train" / f"{name}.py" for name in sources.split()],
            [ROOT / "tests" / "cpu" / f"test_{name}.py" for name in tests.split()],
        )


ROOMS = {
    "staleness": Room.of(
        "rollout/staleness/manager rollout/staleness/policies",
        "staleness staleness_policies dispatcher staleness_schedules",
    ),
    "rollout": Room.of("rollout/data/ledger rollout/buffer", "ledger buffer rollout_checkpoint dataloader"),
    "continuation": Room.of(
        "inference/continuation inference/client",
        "continuation client client_updates client_fleet replay response_text client_openai client_embedded watchdog",
    ),
    "algorithms": Room.of(
        "algorithms/advantages algorithms/kl algorithms/losses algorithms/off_policy algorithms/reductions "
        "algorithms/registry algorithms/tokens",
        "algorithms_reductions algorithms_losses algorithms_value_loss algorithms_advantages algorithms_off_policy "
        "algorithms_rewards kl algorithms_settings algorithms_scopes",
    ),
    "sessions": Room.of(
        "endpoint/sessions/deduplicator endpoint/sessions/export endpoint/sessions/messages endpoint/sessions/session "
        "endpoint/sessions/store endpoint/sessions/turns",
        "sessions_turns sessions_deduplicator sessions_canonical sessions_renderer sessions_export sessions_store",
    ),
}

# Mutants -----------------------------------------------------------------------------------------------------------------

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
# Functions and methods with an opposite, and those whose result their argument could be.
OPPOSITES = {
    "min": "max",
    "max": "min",
    "minimum": "maximum",
    "maximum": "minimum",
    "any": "all",
    "all": "any",
    "mean": "sum",
    "sum": "mean",
}
NEUTRAL = {"abs", "clamp", "detach", "reversed", "sorted", "square"}
METHODS_ONLY = {"mean", "sum"}  # sum() is a builtin too, and mean() is not

Steps: TypeAlias = tuple[tuple[str, int | None], ...]  # fields of nodes, with an index where the field is a list


@dataclass(frozen=True)
class Mutant:
    """A changed place: ``steps`` lead to a node of the file's tree, and ``replacement`` takes its place."""

    file: Path
    line: int
    before: str
    after: str
    steps: Steps = field(repr=False)
    replacement: ast.AST = field(repr=False, compare=False)

    def __str__(self) -> str:
        line = self.file.read_text().splitlines()[self.line - 1].strip()
        where = "" if line.startswith(self.before) else f"  in  {line}"
        return f"{shown(self.file)}:{self.line}: {self.before}  →  {self.after}{where}"

    def tree(self) -> ast.Module:
        """The whole file with the change."""
        tree: Any = ast.parse(self.file.read_text())
        *way, (name, index) = self.steps
        parent = tree
        for step, place in way:
            parent = getattr(parent, step) if place is None else getattr(parent, step)[place]
        if index is None:
            setattr(parent, name, self.replacement)
        else:
            getattr(parent, name)[index] = self.replacement
        return ast.fix_missing_locations(tree)


def shown(path: Path) -> str:
    return os.path.relpath(path, ROOT if path.is_relative_to(ROOT) else Path.cwd())


def mutants_of(file: Path) -> list[Mutant]:
    """Every mutant of a file, in the order of its lines."""
    tree = ast.parse(file.read_text())
    found = [
        Mutant(file, getattr(node, "lineno", 0), one_line(node), one_line(replacement), steps, replacement)
        for node, steps, replacement in changes(tree)
    ]
    return sorted(dict.fromkeys(found), key=lambda mutant: mutant.line)


def one_line(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def changes(
    node: ast.AST, steps: Steps = (), function: ast.AST | None = None
) -> Iterator[tuple[ast.AST, Steps, ast.AST]]:
    """Yields each node below ``node`` that can be changed, the way to it, and what may stand there instead."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function = node
    for name, value in ast.iter_fields(node):
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or left_alone(node, name, child):
                continue
            way = (*steps, (name, index))
            for replacement in replacements(child, name, function):
                yield child, way, replacement
            yield from changes(child, way, function)


def left_alone(parent: ast.AST, name: str, node: ast.AST) -> bool:
    """Code that decides nothing, or that no test should pin."""
    match node:
        case ast.FunctionDef(name="__repr__" | "__str__"):  # for people
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="logger")))):  # for people
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.AnnAssign(annotation=ast.Name(id="TypeAlias")):  # types
            return True
        case ast.Assert():  # for what cannot happen
            return True
        case ast.keyword(arg="digest_size") | ast.Call(func=ast.Attribute(value=ast.Name(id="secrets"))):
            return True  # how unlikely two equal digests or random names are
        case ast.Call(func=ast.Attribute(value=ast.Name(id="asyncio"), attr="sleep"), args=[ast.Constant(value=0)]):
            return True  # lets other tasks run, with a negative number too
        case ast.keyword(arg="strict"):  # zip() of lists that have the same length, unless there is a bug already
            return True
    if isinstance(parent, ast.Call) and name == "args" and is_message(parent):
        return True
    return name in ("annotation", "returns", "decorator_list")


def is_message(call: ast.Call) -> bool:
    """Whether the call makes an error: tests look for the words that matter and not for the whole text."""
    return isinstance(call.func, ast.Name) and call.func.id.endswith(("Error", "Exception"))


def replacements(node: ast.AST, role: str, function: ast.AST | None) -> Iterator[ast.AST]:
    """What may stand in the place of ``node``, which is its parent's ``role``."""
    match node:
        case ast.Compare(ops=ops):
            for place, operator in enumerate(ops):
                for other in COMPARISONS[type(operator)]:
                    yield changed(node, ops=[*ops[:place], other(), *ops[place + 1 :]])
        case ast.BoolOp(op=operator, values=values):
            yield changed(node, op=ast.Or() if isinstance(operator, ast.And) else ast.And())
            for place in range(len(values)):
                rest = values[:place] + values[place + 1 :]
                yield changed(node, values=rest) if len(rest) > 1 else rest[0]
        case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
            yield operand
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield operand
        case ast.BinOp(op=operator, left=left, right=right):
            if type(operator) in OPERATORS and not (is_sequence(left) or is_sequence(right)):
                yield changed(node, op=OPERATORS[type(operator)]())
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value) if (
            abs(value) < 100
        ):  # the limits and defaults beyond are round
            yield ast.Constant(value + 1)
            yield ast.Constant(value - 1)
        case ast.IfExp(body=body, orelse=other):
            yield body
            yield other
        case ast.Subscript(slice=ast.Slice() as limits):
            for end in ("lower", "upper", "step"):
                if getattr(limits, end) is not None:
                    yield changed(node, slice=changed(limits, **{end: None}))
        case ast.Call(func=ast.Name(id=name), args=[first, *_]) if name in OPPOSITES and name not in METHODS_ONLY:
            yield changed(node, func=ast.Name(OPPOSITES[name], ast.Load()))
            if name in ("min", "max") and len(node.args) == 2 and not isinstance(first, ast.Starred):
                yield from node.args
        case ast.Call(func=ast.Name(id=name), args=[first, *_]) if name in NEUTRAL:
            yield ast.Call(ast.Name("list", ast.Load()), [first], []) if name in ("reversed", "sorted") else first
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in OPPOSITES:
            yield changed(node, func=changed(node.func, attr=OPPOSITES[name]))
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in NEUTRAL:
            yield value
        case ast.Return(value=value) if value is not None and not is_flag(value):
            yield ast.Return(ast.Constant(None))
        case ast.Continue():
            yield ast.Break()
        case ast.Break():
            yield ast.Continue()
        case ast.AugAssign(op=operator):
            if type(operator) in OPERATORS:
                yield changed(node, op=OPERATORS[type(operator)]())
    if isinstance(node, ast.stmt) and is_droppable(node, function):
        yield ast.Pass()
    # Other expressions have no operator of their own that would turn the condition round.
    if role in ("test", "ifs") and not isinstance(node, ast.Compare | ast.BoolOp | ast.UnaryOp):
        yield ast.UnaryOp(ast.Not(), node)


def changed(node: Any, **fields: Any) -> Any:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def is_flag(node: ast.AST) -> bool:
    """None, True or False. A caller that asks whether the result is true takes None for False."""
    return isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool))


def is_sequence(node: ast.AST) -> bool:
    """A literal that can only be added: another operator would raise in every test that comes along."""
    return isinstance(node, ast.JoinedStr | ast.List | ast.ListComp | ast.Tuple) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def is_droppable(node: ast.stmt, function: ast.AST | None) -> bool:
    """Whether the file could do without the statement. Without the first value of a name or an attribute it could not."""
    match node:
        case ast.AugAssign() | ast.Raise() | ast.Delete() | ast.Continue() | ast.Break():
            return True
        case ast.Expr(value=ast.Call() | ast.Await()):
            return True
        case ast.Assign(targets=targets):
            pass
        case ast.AnnAssign(target=target, value=value) if value is not None:
            targets = [target]
        case _:
            return False
    if function is None or getattr(function, "name", "") == "__init__":
        return False
    stored = Counter(
        name.id for name in ast.walk(function) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    )
    names = [
        name.id for target in targets for name in ast.walk(target)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    ]  # fmt: skip
    return all(stored[name] > 1 for name in names)


def sample(files: Iterable[Path], count: int, seed: int) -> list[Mutant]:
    """Draws mutants from each file in proportion to the number that it has. A larger sample contains the smaller ones."""
    ordered = []
    for file in files:
        mutants = mutants_of(file)
        random.Random(f"{seed} {shown(file)}").shuffle(mutants)
        ordered += [((place + 0.5) / len(mutants), mutant) for place, mutant in enumerate(mutants)]
    return [mutant for _, mutant in sorted(ordered, key=lambda item: item[0])[:count]]


# One run of the tests ----------------------------------------------------------------------------------------------------


class MutatedModule(importlib.machinery.SourceFileLoader):
    """A finder and loader of one module whose tree is changed. It writes no bytecode."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__(module_name(mutant.file), str(mutant.file))
        self._tree = mutant.tree()

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, fullname: str) -> Any:
        return compile(self._tree, self.path, "exec")


def module_name(file: Path) -> str:
    """The name that an import statement has for a file."""
    names = [file.stem]
    for folder in file.resolve().parents:
        if not (folder / "__init__.py").exists():
            break
        names.insert(0, folder.name)
    return ".".join(names)


@dataclass(eq=False)
class Supervision:
    """A plugin of pytest: bounds the CPU time of each test, and notes it."""

    limits_s: dict[str, float]
    used_s: dict[str, float] = field(default_factory=dict)
    failed: str = ""  # the first test that failed

    def pytest_configure(self) -> None:
        if importlib.util.find_spec("hypothesis"):
            from hypothesis import Phase, settings

            # The same examples for every mutant. It is enough that one fails: a smaller one is not worth its time here.
            phases = [Phase.explicit, Phase.generate]
            settings.register_profile(
                "mutants", deadline=None, derandomize=True, database=None, phases=phases, max_examples=50
            )
            settings.load_profile("mutants")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if item.nodeid in self.limits_s:
            signal.setitimer(signal.ITIMER_PROF, self.limits_s[item.nodeid])  # SIGPROF ends the process
        begin = time.process_time()
        result = yield
        self.used_s[item.nodeid] = time.process_time() - begin
        return result

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed = self.failed or f"{report.nodeid}, which cannot be imported"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid


@dataclass(frozen=True)
class Ended:
    """How a run has ended. ``code`` is pytest's exit code, or None after a signal; ``reason`` what has stopped it."""

    code: int | None
    reason: str
    cpu_s: float
    report: dict[str, Any]
    output: str


class Run:
    """The tests in a forked process, with a mutant or without one."""

    def __init__(self, tests: Sequence[Path], mutant: Mutant | None, limits_s: dict[str, float]) -> None:
        self.mutant = mutant
        self._folder = Path(tempfile.mkdtemp(prefix="mutant-"))
        self._process = multiprocessing.get_context("fork").Process(target=self._test, args=(tests, limits_s))
        self._process.start()
        assert self._process.pid is not None
        self._pid = self._process.pid
        self.watch = os.pidfd_open(self._pid)  # the process's own sentinel waits for what the tests have forked as well
        self._cpu_ticks, self._worked_at = 0, time.monotonic()

    def _test(self, tests: Sequence[Path], limits_s: dict[str, float]) -> NoReturn:
        os.setsid()  # so that end() reaches the processes that the tests start
        output = os.open(self._folder / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, resource.RLIM_INFINITY))
        if self.mutant is not None:
            sys.meta_path.insert(0, MutatedModule(self.mutant))
            signal.setitimer(signal.ITIMER_PROF, IMPORT_CPU_S)  # until the first test begins
        supervision = Supervision(limits_s)
        options = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={self._folder / 'tmp'}"]
        code = pytest.main([*options, *map(str, tests)], plugins=[supervision])
        files = {name: str(getattr(module, "__file__", "")) for name, module in sys.modules.items()}
        cpu_s = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        report = {"failed": supervision.failed, "used_s": supervision.used_s, "modules": files, "cpu_s": cpu_s}
        (self._folder / "report.json").write_text(json.dumps(report))
        sys.exit(int(code))

    def sleeps_forever(self) -> bool:
        """Whether the process has had no work for ``ASLEEP_S``. One that waits for a CPU has work."""
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        state, ticks = fields[0], int(fields[11]) + int(fields[12])
        if state != "S" or ticks - self._cpu_ticks > 5:
            self._cpu_ticks, self._worked_at = ticks, time.monotonic()
        return time.monotonic() - self._worked_at > ASLEEP_S

    def end(self) -> Ended:
        """Ends the process and all that it has started."""
        reason = "" if select.select([self.watch], [], [], 0)[0] else "the tests sleep"
        for kill in (os.kill, os.killpg):
            with contextlib.suppress(ProcessLookupError):
                kill(self._pid, signal.SIGKILL)
        self._process.join()
        os.close(self.watch)
        file = self._folder / "report.json"
        report = json.loads(file.read_text()) if file.exists() else {}
        output = (self._folder / "output").read_text(errors="replace")
        shutil.rmtree(self._folder, ignore_errors=True)
        code = self._process.exitcode
        assert code is not None
        self._process.close()
        if not reason:
            reason = report.get("failed") or (signal.Signals(-code).name if code < 0 else "")
        return Ended(None if code < 0 else code, reason, report.get("cpu_s", 0.0), report, output)


def wait(runs: list[Run]) -> Run:
    """Waits until a run has ended or sleeps forever, and removes it from the list."""
    while True:
        ready, _, _ = select.select([run.watch for run in runs], [], [], 1.0)
        for run in runs:
            if run.watch in ready or run.sleeps_forever():
                runs.remove(run)
                return run


def measure(room: Room) -> dict[str, float]:
    """Runs a room's tests without a mutant and returns the limit of CPU time of each; imports the libraries that they use, so
    that no child has to.

    Raises:
        SystemExit: they fail, or do not use the files.
    """
    ended = wait([Run(room.tests, None, {})]).end()
    if ended.code != pytest.ExitCode.OK:
        print(f"{ended.output}\nThe tests fail without a mutant ({ended.reason}).")
        raise SystemExit(2)
    modules = ended.report["modules"]
    unused = [shown(file) for file in room.sources if module_name(file) not in modules]
    if unused:
        print(f"The tests do not import {', '.join(unused)}.")
        raise SystemExit(2)
    for name, file in modules.items():
        if "site-packages" in file:
            with contextlib.suppress(Exception):  # an optional part; the tests may import it in another order
                importlib.import_module(name)
    assert threading.active_count() == 1, "a thread does not survive the fork, and the locks that it holds stay locked"
    gc.collect()
    gc.freeze()  # the children's own collections have little to walk
    return {test: TEST_CPU_S + TEST_FACTOR * used_s for test, used_s in ended.report["used_s"].items()}


def run(room: Room, mutants: list[Mutant], jobs: int) -> list[Mutant]:
    """Runs the tests for each mutant and returns those that survive."""
    limits_s = measure(room)
    waiting, runs, survivors = mutants[::-1], [], []
    while waiting or runs:
        while waiting and len(runs) < jobs:
            mutant = waiting.pop()
            # Files named after the mutated one come first: they most likely fail, and pytest stops at the first failure.
            tests = sorted(room.tests, key=lambda file: mutant.file.stem not in file.stem)
            runs.append(Run(tests, mutant, limits_s))
        over = wait(runs)
        ended = over.end()
        assert over.mutant is not None
        if ended.code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
            raise RuntimeError(f"{over.mutant}\n{ended.output}")
        killed = ended.code != pytest.ExitCode.OK
        if not killed:
            survivors.append(over.mutant)
        verdict = f"killed by {ended.reason}" if killed else "SURVIVED"
        print(f"{ended.cpu_s:5.1f} s  {over.mutant}  {verdict}", flush=True)
    return survivors


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", type=resolved, help="files to mutate; default: those of ROOMS")
    parser.add_argument("--tests", nargs="+", type=resolved, help="the tests of these files, the quickest first")
    parser.add_argument("--room", choices=ROOMS, help="only the files of one room")
    parser.add_argument(
        "--only", metavar="FILE:LINE", action="append", help="every mutant of a line, instead of a sample"
    )
    parser.add_argument("--mutants", type=int, default=200, help="size of the sample (200)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="the K-th of N parts of the sample")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once (1)")
    parser.add_argument("--at-least", type=float, default=0.95, help="smallest share of killed mutants (0.95)")
    parser.add_argument("--list", action="store_true", help="print the sample and run nothing")
    asked = parser.parse_args(arguments)
    if bool(asked.files) != bool(asked.tests):
        parser.error("files and --tests belong together")

    rooms = {"": Room(asked.files, asked.tests)} if asked.files else ROOMS
    rooms = {name: room for name, room in rooms.items() if asked.room in (None, name)}
    files = [file for room in rooms.values() for file in room.sources]
    if asked.only:
        mutants = [
            mutant for file in files for mutant in mutants_of(file) if f"{shown(file)}:{mutant.line}" in asked.only
        ]
    else:
        part, parts = map(int, asked.part.split("/"))
        mutants = sample(files, asked.mutants, asked.seed)[part - 1 :: parts]
    if asked.list or not mutants:
        print(*mutants or ["there is no mutant"], sep="\n")
        return 0 if mutants else 2

    survivors = []
    sys.path.insert(0, str(ROOT))
    for room in rooms.values():
        here = [mutant for mutant in mutants if mutant.file in room.sources]
        if here:
            survivors += run(room, here, asked.jobs)

    print(f"\n{'file':60} {'mutants':>8} {'killed':>8} {'share':>7}")
    total, left = Counter(shown(mutant.file) for mutant in mutants), Counter(shown(mutant.file) for mutant in survivors)
    for name, count, alive in [
        *((name, total[name], left[name]) for name in total),
        ("all", len(mutants), len(survivors)),
    ]:
        print(f"{name:60} {count:8} {count - alive:8} {1 - alive / count:7.1%}")
    print(f"seed {asked.seed}", *(f"survived: {mutant}" for mutant in survivors), sep="\n")
    return 0 if 1 - len(survivors) / len(mutants) >= asked.at_least else 1


def resolved(path: str) -> Path:
    return Path(path).resolve()


if __name__ == "__main__":
    sys.exit(main())
