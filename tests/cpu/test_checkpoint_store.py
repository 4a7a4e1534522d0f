"""A checkpoint is published whole or not at all, whatever instant a crash chooses (SEMANTICS 5.3), and read only if it is
intact (5.6)."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_worlds import DAMAGES, Crash, QuickFileSystem, content, damage, writing
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.errors import CheckpointError
from skyrl_train.runtime.checksums import file_checksum
from skyrl_train.training import checkpoint
from skyrl_train.training.checkpoint import (
    CheckpointStore,
    Evaluated,
    FileSystem,
    best_step,
    checkpoint_step,
    find_damage,
    is_complete,
    read_manifest,
)


class CrashingFileSystem(QuickFileSystem):
    """Ends the process at the n-th operation: before it, or in the middle of it where it is not atomic."""

    def __init__(self, crash_at: int, midway: bool = False) -> None:
        self.operations = 0
        self._crash_at, self._midway = crash_at, midway

    def _step(self, half: Callable[[], object] | None = None) -> None:
        self.operations += 1
        if self.operations == self._crash_at:
            if self._midway and half is not None:
                half()
            raise Crash

    def make_folder(self, path: Path) -> None:
        self._step()
        super().make_folder(path)

    def write_text(self, path: Path, text: str) -> None:
        self._step(half=lambda: path.write_text(text[: len(text) // 2]))
        super().write_text(path, text)

    def sync(self, path: Path) -> None:
        self._step()
        super().sync(path)

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        super().rename(source, target)

    def remove_tree(self, path: Path) -> None:
        self._step(half=lambda: next(p for p in sorted(path.rglob("*")) if p.is_file()).unlink())
        super().remove_tree(path)

    def remove_file(self, path: Path) -> None:
        self._step()
        super().remove_file(path)


def steps(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_checkpoint_is_found_again_with_its_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", max_to_keep=2)
    assert store.latest() is None
    folder = store.write(7, writing("seven"))
    assert folder == tmp_path / "checkpoints" / "global_step_7" == store.latest()
    assert content(folder) == "seven"
    assert checkpoint_step(folder) == 7
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "global_step_7"


def test_only_the_newest_are_kept_by_number_not_by_name(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, max_to_keep=2)
    for step in (8, 9, 10, 11):
        store.write(step, writing(str(step)))
    assert steps(tmp_path) == ["global_step_10", "global_step_11", "latest"]


STEPS = st.sets(st.integers(1, 30))
SCORES = st.dictionaries(st.integers(0, 30), st.sampled_from([-1.0, 0.0, 0.5, 1.0]))


@given(STEPS, SCORES, STEPS)
def test_the_best_and_those_under_evaluation_are_kept(
    steps: set[int], scores: dict[int, float], unfinished: set[int]
) -> None:
    best = best_step(steps, scores)
    assert Evaluated(scores, unfinished).kept(steps) == {step for step in steps if step == best or step in unfinished}
    if scored := steps & scores.keys():
        assert best in scored and all((scores[step], step) <= (scores[best], best) for step in scored)
    else:
        assert best is None


def test_the_best_stays_on_the_disk_until_there_is_a_better_one(tmp_path: Path) -> None:
    store, scores = CheckpointStore(tmp_path, max_to_keep=1), dict[int, float]()
    kept = {}
    for step, score in ((1, 0.5), (2, 0.9), (3, 0.1), (4, 0.2), (5, 0.95), (6, 0.3), (7, 0.3)):
        store.write(step, writing(str(step)), Evaluated(dict(scores), unfinished={step - 1}))
        kept[step] = [name.rpartition("_")[2] for name in steps(tmp_path) if name != "latest"]
        scores[step] = score
    assert kept[4] == ["2", "3", "4"] and kept[5] == ["2", "4", "5"]
    assert kept[6] == ["5", "6"] and kept[7] == ["5", "6", "7"]
    assert content(tmp_path / "global_step_5") == "5" and content(store.latest()) == "7"


def test_the_same_step_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, max_to_keep=1)
    store.write(3, writing("old"))
    store.write(3, writing("new"))
    assert content(store.latest()) == "new"
    assert steps(tmp_path) == ["global_step_3", "latest"]


def test_later_steps_of_an_abandoned_history_are_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, max_to_keep=3)
    for step in (5, 10):
        store.write(step, writing(str(step)))
    (tmp_path / "latest").write_text("global_step_5")  # the run was resumed from step 5
    store.write(7, writing("7"))
    assert steps(tmp_path) == ["global_step_5", "global_step_7", "latest"]


@pytest.mark.parametrize("midway", [False, True])
@pytest.mark.parametrize("max_to_keep", [1, 2])
@pytest.mark.parametrize(
    ("existing", "step"), [((), 1), ((1,), 2), ((1, 2), 3), ((1, 2), 2)], ids=["first", "second", "third", "same"]
)
def test_a_crash_at_any_instant_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, existing: tuple[int, ...], step: int, max_to_keep: int, midway: bool
) -> None:
    crash_at = 0
    survived = False
    while not survived:
        crash_at += 1
        root = tmp_path / str(crash_at)
        healthy = CheckpointStore(root, max_to_keep, QuickFileSystem())
        for earlier in existing:
            healthy.write(earlier, writing(f"old {earlier}"))
        old = content(healthy.latest())

        try:
            CheckpointStore(root, max_to_keep, CrashingFileSystem(crash_at, midway)).write(step, writing("new"))
            survived = True
        except Crash:
            pass

        allowed = {"new"} if survived else {old, "new"}
        assert content(healthy.latest()) in allowed

        # The run comes back, and what the crash left behind is gone after the next checkpoint.
        healthy.write(step + 1, writing("next"))
        assert content(healthy.latest()) == "next"
        kept = [name for name in steps(root) if name != "latest"]
        assert len(kept) <= max_to_keep
        assert all(is_complete(root / name) for name in kept)
    assert crash_at > 12  # the loop met every operation of a whole write


def test_two_crashes_in_a_row_leave_a_complete_checkpoint(tmp_path: Path) -> None:
    total = 21  # more than the operations of a write of the same step, after whatever a crash left
    for first in range(1, total):
        for second in range(1, total):
            root = tmp_path / f"{first}-{second}"
            store = CheckpointStore(root, 1, QuickFileSystem())
            store.write(4, writing("old"))
            for crash_at in (first, second):
                with contextlib.suppress(Crash):
                    CheckpointStore(root, 1, CrashingFileSystem(crash_at, midway=True)).write(4, writing("new"))
                assert content(store.latest()) in {"old", "new"}


@pytest.mark.parametrize("pointer", [None, "", "global_step_9", "nonsense", "..", "global_step_2\n"])
def test_a_lost_or_wrong_pointer_falls_back_to_the_newest_complete_folder(tmp_path: Path, pointer: str | None) -> None:
    store = CheckpointStore(tmp_path, max_to_keep=2)
    store.write(1, writing("one"))
    store.write(2, writing("two"))
    if pointer is None:
        (tmp_path / "latest").unlink()
    else:
        (tmp_path / "latest").write_text(pointer)
    assert content(store.latest()) == "two"


@pytest.mark.parametrize("how", ["truncate", "delete", "no manifest", "torn manifest"])
def test_a_torn_folder_is_not_a_checkpoint(tmp_path: Path, how: str) -> None:
    store = CheckpointStore(tmp_path, max_to_keep=2)
    store.write(1, writing("one"))
    torn = store.write(2, writing("two"))
    match how:
        case "truncate":
            (torn / "weights").write_text("t")
        case "delete":
            (torn / "policy" / "state").unlink()
        case "no manifest":
            (torn / "manifest.json").unlink()
        case "torn manifest":
            (torn / "manifest.json").write_text('{"step": 2, "fi')
    assert content(store.latest()) == "one"
    store.write(2, writing("two again"))
    assert content(store.latest()) == "two again"


class TestFullDisk:
    @pytest.fixture
    def store(self, tmp_path: Path) -> CheckpointStore:
        store = CheckpointStore(tmp_path, max_to_keep=2)
        store.write(1, writing("one"))
        return store

    @staticmethod
    def fills_the_disk(folder: Path) -> None:
        (folder / "weights").write_text("x" * 1000)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def test_says_how_much_is_needed_and_what_to_do(self, store: CheckpointStore) -> None:
        with pytest.raises(CheckpointError, match=r"step 2 needs at least 1000 bytes.*free space") as caught:
            store.write(2, self.fills_the_disk)
        assert isinstance(caught.value.__cause__, OSError)

    def test_leaves_the_earlier_checkpoint_the_pointer_and_nothing_else(
        self, store: CheckpointStore, tmp_path: Path
    ) -> None:
        with pytest.raises(CheckpointError):
            store.write(2, self.fills_the_disk)
        assert content(store.latest()) == "one"
        assert steps(tmp_path) == ["global_step_1", "latest"]

    def test_is_recognised_behind_the_error_that_torch_makes_of_it(self, store: CheckpointStore) -> None:
        def writer(folder: Path) -> None:
            try:
                self.fills_the_disk(folder)
            except OSError:
                raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904 (torch keeps it as the context only)

        with pytest.raises(CheckpointError, match="disk is full"):
            store.write(2, writer)

    def test_a_quota_that_is_used_up_is_no_full_disk(self, store: CheckpointStore) -> None:
        def writer(folder: Path) -> dict[str, str]:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

        with pytest.raises(CheckpointError, match="Your quota of the disk is used up") as caught:
            store.write(2, writer)
        assert "are free" not in str(caught.value)

    @pytest.mark.parametrize("operation", range(1, 12))
    def test_at_any_operation_of_the_store_leaves_a_complete_checkpoint(
        self, store: CheckpointStore, tmp_path: Path, operation: int
    ) -> None:
        class Full(CrashingFileSystem):
            def _step(self, half: Callable[[], object] | None = None) -> None:
                try:
                    super()._step(half)
                except Crash:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None

        with pytest.raises(CheckpointError):
            CheckpointStore(tmp_path, 2, Full(operation)).write(2, writing("new"))
        assert content(store.latest()) in {"one", "new"}


def test_an_unwritable_folder_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file is in the way")
    with pytest.raises(CheckpointError, match="step 1 cannot be written"):
        CheckpointStore(tmp_path / "checkpoints", 1).write(1, writing("one"))


def test_a_writers_own_error_passes_through_and_leaves_nothing(tmp_path: Path) -> None:
    def writer(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise ZeroDivisionError

    store = CheckpointStore(tmp_path, 1)
    with pytest.raises(ZeroDivisionError):
        store.write(1, writer)
    assert steps(tmp_path) == []


def test_a_file_that_a_rank_has_written_elsewhere_is_missed(tmp_path: Path) -> None:
    """Without a disk that all nodes share, a checkpoint would lack the shards of all nodes but one."""
    store = CheckpointStore(tmp_path, max_to_keep=1)
    store.write(1, writing("old"))

    def writer(folder: Path) -> dict[str, str]:
        return {**writing("new")(folder), "policy/shard-00002": "crc32:00000000"}

    with pytest.raises(CheckpointError, match=r"1 of its files, such as policy/shard-00002, .* trainer\.runs_dir"):
        store.write(2, writer)
    assert content(store.latest()) == "old" and steps(tmp_path) == ["global_step_1", "latest"]


def test_a_file_that_the_folder_does_not_list_yet_is_in_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, listed = CheckpointStore(tmp_path, max_to_keep=1), Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda path, how: (at for at in listed(path, how) if at.name != "weights"))
    assert content(store.write(1, writing("one"))) == "one"
    assert read_manifest(tmp_path / "global_step_1").sizes == {"weights": 3, "policy/state": 6}


def test_an_old_checkpoint_that_cannot_be_removed_does_not_fail_the_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Stubborn(FileSystem):
        def remove_tree(self, path: Path) -> None:
            raise PermissionError(path)

    CheckpointStore(tmp_path, 1).write(1, writing("one"))
    store = CheckpointStore(tmp_path, 1, Stubborn())
    store.write(2, writing("two"))
    assert content(store.latest()) == "two"
    assert "could not be removed" in caplog.text


@pytest.mark.parametrize("reason", [errno.EMFILE, errno.ESTALE, errno.EACCES])
def test_checkpoints_that_cannot_be_looked_at_for_a_moment_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: int
) -> None:
    def out_of_reach(folder: Path) -> checkpoint.Manifest:
        raise OSError(reason, os.strerror(reason), str(folder))

    store = CheckpointStore(tmp_path, 2, QuickFileSystem())
    for step in (1, 2):
        store.write(step, writing(f"step {step}"))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "read_manifest", out_of_reach)
        store.write(3, writing("step 3"))
        with pytest.raises(CheckpointError, match="cannot be written"):
            store.write(3, writing("step 3 again"))
    assert "could not be removed" in caplog.text
    assert [content(tmp_path / f"global_step_{step}") for step in (1, 2, 3)] == ["step 1", "step 2", "step 3"]
    assert content(store.latest(pytest.fail)) == "step 3"
    store.write(4, writing("step 4"))
    assert steps(tmp_path) == ["global_step_3", "global_step_4", "latest"]


# Crashes by default: at steps from the one that was fallen back to, to the one after the damaged one.
QUICK = ((4, 1, True), (5, 2, True), (6, 1, False), (7, 2, True))


class TestDamage:
    """Damage that a disk does to a checkpoint after it was written."""

    FILES = ("weights", "policy/state", "manifest.json")

    @pytest.fixture
    def store(self, tmp_path: Path) -> CheckpointStore:
        """With the checkpoints of steps 2, 4 and 6."""
        store = CheckpointStore(tmp_path, 3, QuickFileSystem())
        for step in (2, 4, 6):
            store.write(step, writing(f"step {step}"))
        return CheckpointStore(tmp_path, 2, QuickFileSystem())  # of the process that comes back

    @pytest.mark.parametrize("file", FILES)
    @pytest.mark.parametrize("how", DAMAGES)
    def test_is_passed_over_with_one_line(self, store: CheckpointStore, tmp_path: Path, file: str, how: str) -> None:
        damage(tmp_path / "global_step_6" / file, how)
        lines: list[str] = []
        assert content(store.latest(lines.append)) == "step 4"
        (line,) = lines
        assert f"global_step_6 ({file} " in line and line.endswith("The run resumes from global_step_4 instead.")
        assert "\n" not in line

    def test_of_several_checkpoints_is_one_line_too(self, store: CheckpointStore, tmp_path: Path) -> None:
        damage(tmp_path / "global_step_6" / "weights", "overwrite")
        damage(tmp_path / "global_step_4" / "policy" / "state", "remove")
        lines: list[str] = []
        assert content(store.latest(lines.append)) == "step 2"
        assert lines == [
            f"Damage in {tmp_path}: global_step_6 (weights differs from its checksum), global_step_4 (policy/state is missing). "
            "The run resumes from global_step_2 instead."
        ]

    @pytest.mark.parametrize(
        "every", [7, pytest.param(1, marks=pytest.mark.slow)]
    )  # 7: each byte, and each place in a byte
    def test_of_any_bit_is_found(self, store: CheckpointStore, tmp_path: Path, every: int) -> None:
        folder = tmp_path / "global_step_6"
        assert find_damage(folder) is None
        for name in self.FILES:
            data = (folder / name).read_bytes()
            for bit in range(0, 8 * len(data), every):
                changed = bytearray(data)
                changed[bit // 8] ^= 1 << bit % 8
                (folder / name).write_bytes(changed)
                assert find_damage(folder) is not None, (name, bit)
            (folder / name).write_bytes(data)
        assert find_damage(folder) is None

    def test_an_intact_checkpoint_needs_no_line(self, store: CheckpointStore) -> None:
        assert content(store.latest(pytest.fail)) == "step 6"

    def test_without_an_intact_checkpoint_is_an_error_and_changes_nothing(
        self, store: CheckpointStore, tmp_path: Path
    ) -> None:
        for step in (2, 4, 6):
            damage(tmp_path / f"global_step_{step}" / "weights", "overwrite")
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        every = ", ".join(rf"global_step_{step} \(weights differs from its checksum\)" for step in (6, 4, 2))
        with pytest.raises(CheckpointError, match=rf"No checkpoint in .* is intact: {every}\. .*trainer.resume=never"):
            store.latest()
        assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    @pytest.mark.parametrize("pointer", ["global_step_6", "\0\0\0"])
    def test_a_pointer_to_checkpoints_that_are_gone_is_an_error(self, tmp_path: Path, pointer: str) -> None:
        (tmp_path / "latest").write_text(pointer)
        with pytest.raises(CheckpointError, match=r"No checkpoint in .* is intact"):
            CheckpointStore(tmp_path, 1).latest()

    @pytest.mark.parametrize("step", [4, 5, 6, 7, 8])
    def test_the_checkpoint_that_was_fallen_back_to_stays_and_the_damaged_one_goes(
        self, store: CheckpointStore, tmp_path: Path, step: int
    ) -> None:
        damage(tmp_path / "global_step_6" / "weights", "overwrite")
        store.latest(lambda line: None)
        store.write(step, writing("new"))
        kept = {f"global_step_{step}", "global_step_4" if step > 4 else "global_step_2"}
        assert {name for name in steps(tmp_path) if name != "latest"} == kept
        assert all(find_damage(tmp_path / name) is None for name in kept)
        assert content(CheckpointStore(tmp_path, 2).latest(pytest.fail)) == "new"

    @pytest.mark.parametrize(
        ("step", "max_to_keep", "midway"),
        [
            case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product((4, 5, 6, 7), (1, 2), (False, True))
        ],
    )
    def test_a_crash_after_the_fall_back_leaves_the_old_or_the_new_checkpoint(
        self, tmp_path: Path, step: int, max_to_keep: int, midway: bool
    ) -> None:
        crash_at, survived = 0, False
        while not survived:
            crash_at += 1
            root = tmp_path / str(crash_at)
            for earlier in (2, 4, 6):
                CheckpointStore(root, 3, QuickFileSystem()).write(earlier, writing(f"step {earlier}"))
            damage(root / "global_step_6" / "weights", "overwrite")
            crashing = CheckpointStore(root, max_to_keep, CrashingFileSystem(crash_at, midway))
            crashing.latest(lambda line: None)
            try:
                crashing.write(step, writing("new"))
                survived = True
            except Crash:
                pass
            returned = CheckpointStore(root, max_to_keep, QuickFileSystem())
            assert content(returned.latest(lambda line: None)) in ({"new"} if survived else {"step 4", "new"})
            returned.write(9, writing("next"))
            assert content(returned.latest(pytest.fail)) == "next"
            assert len(steps(root)) <= max_to_keep + 1  # and the pointer
        assert crash_at > 12

    def test_never_leads_to_a_newer_checkpoint_than_the_pointers(self, store: CheckpointStore, tmp_path: Path) -> None:
        (tmp_path / "latest").write_text("global_step_4")  # the history of step 6 was given up
        damage(tmp_path / "global_step_4" / "weights", "overwrite")
        assert content(store.latest(lambda line: None)) == "step 2"

    @pytest.mark.parametrize("number", [errno.EIO, errno.ENOTCONN, errno.EACCES])
    def test_is_not_assumed_where_the_disk_is_out_of_reach(
        self, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        def read(path: Path) -> str:
            if path.parts[-2:] == ("global_step_6", "weights"):
                raise OSError(number, os.strerror(number))
            return file_checksum(path)

        monkeypatch.setattr(checkpoint, "file_checksum", read)
        if number == errno.EIO:
            assert content(store.latest(lambda line: None)) == "step 4"
        else:
            with pytest.raises(CheckpointError, match=r"cannot be read: .*Nothing has changed"):
                store.latest()

    def test_of_large_files_is_found(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checkpoint, "_SMALL_BYTES", 0)  # as for files that several threads read
        folder = CheckpointStore(tmp_path, 1).write(1, writing("one"))
        assert find_damage(folder) is None
        damage(folder / "policy" / "state", "overwrite")
        assert find_damage(folder) == "policy/state differs from its checksum"


def test_the_manifest_has_the_writers_checksums_and_computes_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(checkpoint, "file_checksum", lambda path: (read.append(path.name), file_checksum(path))[1])
    folder = CheckpointStore(tmp_path, 1).write(1, writing("one"))
    assert read == ["state"]
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert files == {
        "policy/state": {"bytes": 6, "checksum": f"crc32:{zlib.crc32(b'oneone'):08x}"},
        "weights": {"bytes": 3, "checksum": f"crc32:{zlib.crc32(b'one'):08x}"},
    }


def test_a_manifest_of_an_earlier_version_has_sizes_only(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, max_to_keep=2)
    store.write(1, writing("one"))
    folder = store.write(2, writing("two"))
    (folder / "manifest.json").write_text(json.dumps({"step": 2, "files": {"policy/state": 6, "weights": 3}}, indent=1))
    assert content(store.latest(pytest.fail)) == "two" and checkpoint_step(folder) == 2
    damage(folder / "weights", "truncate")
    assert content(store.latest(lambda line: None)) == "one"
