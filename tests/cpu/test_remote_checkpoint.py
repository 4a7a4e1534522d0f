"""A checkpoint behind a URL is complete or never resumed from, whatever instant a crash or an outage chooses."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from checkpoint_worlds import Crash, QuickFileSystem, content, damage, writing
from fsspec.implementations.memory import MemoryFileSystem

from skyrl_train.config.compose import compose, to_yaml
from skyrl_train.config.schema import RunConfig
from skyrl_train.config.validate import validate
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.training import remote_checkpoint
from skyrl_train.training.checkpoint import CheckpointStore, Evaluated, checkpoint_step
from skyrl_train.training.remote_checkpoint import RemoteCheckpointStore

URL = "memory://bucket/global_step_1/run"  # a folder that is named like a checkpoint is none


@pytest.fixture(autouse=True)
def empty_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Writing a configuration takes longer than all the rest.
    monkeypatch.setattr(remote_checkpoint, "to_yaml", lambda config: written(config.trainer.seed))
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield
    MemoryFileSystem.store.clear()


@functools.cache
def written(seed: int) -> str:
    return to_yaml(configured(f"trainer.seed={seed}"))


def store(local: Path, *overrides: str) -> RemoteCheckpointStore:
    return RemoteCheckpointStore(URL, configured(*overrides), CheckpointStore(local, 1, QuickFileSystem()))


@functools.cache
def configured(*overrides: str) -> RunConfig:
    return compose("quickstart", [f"trainer.ckpt_path={URL}", *overrides])


def there() -> list[str]:
    return sorted(path.rpartition("/")[2] for path in fsspec.filesystem("memory").ls(URL, detail=False))


def test_another_machine_resumes_from_it(tmp_path: Path) -> None:
    assert store(tmp_path / "a").latest() is None
    store(tmp_path / "a").write(7, writing("seven"))
    folder = store(tmp_path / "b").latest()
    assert content(folder) == "seven" and folder is not None and checkpoint_step(folder) == 7
    assert there() == ["config.yaml", "global_step_7", "latest"]


def test_the_newest_are_kept_and_a_history_that_was_given_up_is_not(tmp_path: Path) -> None:
    first = store(tmp_path / "a", "trainer.max_ckpts_to_keep=2")
    for step in (8, 9, 10):
        first.write(step, writing(str(step)))
    assert there() == ["config.yaml", "global_step_10", "global_step_9", "latest"]
    first.write(9, writing("9 again"))
    assert there() == ["config.yaml", "global_step_9", "global_step_9.1", "latest"]
    assert content(store(tmp_path / "b").latest()) == "9 again"


def test_the_remote_state_counts_and_not_the_local_copy(tmp_path: Path) -> None:
    here, elsewhere = store(tmp_path / "a"), store(tmp_path / "b")
    here.write(3, writing("mine"))
    elsewhere.write(3, writing("hers"))  # as long, and of the same step
    assert content(here.latest()) == "hers"


def test_a_checkpoint_that_is_here_already_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = store(tmp_path)
    here.write(3, writing("three"))
    monkeypatch.setattr(MemoryFileSystem, "get", None)
    assert content(here.latest()) == "three"


def test_a_run_that_gets_a_url_later_resumes_from_its_local_checkpoint(tmp_path: Path) -> None:
    CheckpointStore(tmp_path, 2, QuickFileSystem()).write(6, writing("six"))
    moved, lines = store(tmp_path), []
    moved.check()
    assert content(moved.latest(lines.append)) == "six"
    assert lines == [f"{URL} has no checkpoint yet. The run resumes from {tmp_path / 'global_step_6'}."]
    moved.write(8, writing("eight"))
    assert content(store(tmp_path / "b").latest(pytest.fail)) == "eight"


def test_a_run_whose_first_upload_failed_resumes_from_its_local_checkpoint(tmp_path: Path) -> None:
    first = store(tmp_path)
    assert first.latest() is None
    with pytest.MonkeyPatch.context() as patch:
        Interruption(2, midway=True, error=TimeoutError).install(patch)
        with pytest.raises(CheckpointError, match="does not take the checkpoint of step 1"):
            first.write(1, writing("one"))
    again = store(tmp_path)
    assert content(again.latest(lambda line: None)) == "one"
    again.write(1, writing("one again"))
    assert content(store(tmp_path / "b").latest(pytest.fail)) == "one again"


@pytest.mark.parametrize("other", [None, "memory://bucket/another/run"])
def test_a_run_that_went_on_without_its_url_does_not_go_back_silently(tmp_path: Path, other: str | None) -> None:
    store(tmp_path).write(3, writing("three"))
    local = CheckpointStore(tmp_path, 1, QuickFileSystem())
    elsewhere = local if other is None else RemoteCheckpointStore(other, configured(), local)
    assert content(elsewhere.latest(lambda line: None)) == "three"
    elsewhere.write(6, writing("six"))
    for _ in range(2):
        with pytest.raises(
            CheckpointError, match=r"global_step_6 was not written for .*, which has global_step_3: .*none"
        ):
            store(tmp_path).latest()
    assert content(local.latest(pytest.fail)) == "six", "nothing is lost"
    shutil.rmtree(tmp_path)
    assert content(store(tmp_path).latest(pytest.fail)) == "three"


def test_a_checkpoint_that_was_copied_to_another_url_is_the_same(tmp_path: Path) -> None:
    store(tmp_path).write(3, writing("three"))
    files = fsspec.filesystem("memory")
    files.copy(URL, f"{URL}-moved", recursive=True)
    moved = RemoteCheckpointStore(f"{URL}-moved", configured(), CheckpointStore(tmp_path, 1, QuickFileSystem()))
    assert content(moved.latest(pytest.fail)) == "three"


def store_whose_second_upload_failed(folder: Path) -> RemoteCheckpointStore:
    first = store(folder)
    first.write(1, writing("one"))
    with pytest.MonkeyPatch.context() as patch:
        Interruption(2, midway=True, error=TimeoutError).install(patch)
        with pytest.raises(CheckpointError, match="does not take the checkpoint of step 2"):
            first.write(2, writing("two"))
    return first


def test_a_checkpoint_whose_upload_failed_is_not_resumed_from(tmp_path: Path) -> None:
    store_whose_second_upload_failed(tmp_path)
    assert content(store(tmp_path).latest(pytest.fail)) == "one"


def test_the_step_of_the_policy_that_a_run_started_from_is_beside_its_checkpoints(tmp_path: Path) -> None:
    def opened(machine: str) -> RemoteCheckpointStore:
        local = CheckpointStore(tmp_path / machine / "checkpoints", 1, QuickFileSystem())
        return RemoteCheckpointStore(URL, configured(), local, tmp_path / machine / "origin.json")

    for machine in "ab":
        (tmp_path / machine).mkdir()
    (tmp_path / "a" / "origin.json").write_text('{"run": "old", "step": 7}')
    assert opened("a").origin_step() is None
    opened("a").write(1, writing("one"))
    assert opened("b").origin_step() == 7


class Interruption:
    """Ends the process at the n-th operation that changes the bucket: before it, or in the middle of it."""

    def __init__(self, at: int, midway: bool, error: type[BaseException] = Crash) -> None:
        self.operations, self._at, self._midway, self._error = 0, at, midway, error

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def put_file(of: MemoryFileSystem, local: str, path: str, **_: object) -> None:
            of.pipe_file(path, Path(local).read_bytes())

        def wrapped(original: Callable[..., None], half: Callable[..., None]) -> Callable[..., None]:
            def operation(of: MemoryFileSystem, *args: object, **kwargs: object) -> None:
                self.operations += 1
                if self.operations == self._at:
                    if self._midway:
                        half(of, *args)
                    raise self._error
                original(of, *args, **kwargs)

            return operation

        pipe_file, rm_file = MemoryFileSystem.pipe_file, MemoryFileSystem.rm_file
        half_written = wrapped(pipe_file, lambda of, path, data: pipe_file(of, path, data[: len(data) // 2]))
        monkeypatch.setattr(MemoryFileSystem, "pipe_file", half_written)
        monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
        monkeypatch.setattr(MemoryFileSystem, "rm_file", wrapped(rm_file, rm_file))


@pytest.mark.parametrize("midway", [False, True])
@pytest.mark.parametrize("max_to_keep", [1, 2])
@pytest.mark.parametrize("existing", [(), (1,), (1, 2)], ids=str)
def test_a_crash_at_any_instant_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, existing: tuple[int, ...], max_to_keep: int, midway: bool
) -> None:
    keep, at, survived = f"trainer.max_ckpts_to_keep={max_to_keep}", 0, False
    while not survived:
        at += 1
        MemoryFileSystem.store.clear()
        for step in existing:
            store(tmp_path / f"old-{at}", keep).write(step, writing(f"old {step}"))
        old = f"old {existing[-1]}" if existing else None
        with pytest.MonkeyPatch.context() as patch:
            Interruption(at, midway).install(patch)
            try:
                store(tmp_path / f"new-{at}", keep).write(2, writing("new"))
                survived = True
            except Crash:
                pass
        returned = store(tmp_path / f"back-{at}", keep)
        assert content(returned.latest()) in ({"new"} if survived else {old, "new"})
        returned.write(3, writing("next"))
        assert content(store(tmp_path / f"next-{at}", keep).latest()) == "next"
        assert len([name for name in there() if name.startswith("global_step")]) <= max_to_keep
    assert at > 5 + (not existing)  # three files, manifest, pointer; before the first one the configuration


@pytest.mark.parametrize("how", ["delete", "truncate", "manifest", "pointer"])
def test_half_a_checkpoint_is_passed_over(tmp_path: Path, how: str) -> None:
    first = store(tmp_path / "a", "trainer.max_ckpts_to_keep=2")
    first.write(1, writing("one"))
    first.write(2, writing("two"))
    files = fsspec.filesystem("memory")
    match how:
        case "delete":
            files.rm_file(f"{URL}/global_step_2/policy/state")
        case "truncate":
            files.pipe_file(f"{URL}/global_step_2/weights", b"t")
        case "manifest":
            files.pipe_file(f"{URL}/global_step_2/manifest.json", b'{"files"')
        case "pointer":
            files.pipe_file(f"{URL}/latest", b"global_st")
    assert content(store(tmp_path / "b").latest()) == ("two" if how == "pointer" else "one")


def overwrite(path: str) -> None:
    """Changes a file behind the URL, and keeps its size."""
    files = fsspec.filesystem("memory")
    files.pipe_file(f"{URL}/{path}", bytes(byte ^ 0x55 for byte in files.cat_file(f"{URL}/{path}")))


@pytest.mark.parametrize("file", ["weights", "policy/state", "id", "manifest.json"])
def test_damage_that_keeps_the_size_is_passed_over_with_one_line(tmp_path: Path, file: str) -> None:
    first = store(tmp_path / "a", "trainer.max_ckpts_to_keep=2")
    for step in (1, 2):
        first.write(step, writing(f"step {step}"))
    overwrite(f"global_step_2/{file}")
    returned, lines = store(tmp_path / "b", "trainer.max_ckpts_to_keep=2"), []
    returned.check()
    assert content(returned.latest(lines.append)) == "step 1"
    (line,) = lines
    assert f"global_step_2 ({file} " in line and line.endswith("The run resumes from global_step_1 instead.")
    returned.write(3, writing("step 3"))
    assert there() == ["config.yaml", "global_step_1", "global_step_3", "latest"], "the intact one stays"
    returned.write(4, writing("step 4"))
    assert content(store(tmp_path / "c").latest(pytest.fail)) == "step 4"


def test_no_intact_checkpoint_is_an_error(tmp_path: Path) -> None:
    store(tmp_path / "a").write(1, writing("one"))
    overwrite("global_step_1/weights")
    before = there()
    with pytest.raises(CheckpointError, match=r"No checkpoint in memory:.* is intact: global_step_1 \(weights differs"):
        store(tmp_path / "b").latest()
    fsspec.filesystem("memory").rm(f"{URL}/global_step_1", recursive=True)
    with pytest.raises(CheckpointError, match=r"is intact: global_step_1 \(manifest.json is missing"):
        store(tmp_path / "b").latest()
    assert before == ["config.yaml", "global_step_1", "latest"]


def test_a_damaged_copy_is_downloaded_again_and_an_intact_one_saves_a_damaged_original(tmp_path: Path) -> None:
    here = store(tmp_path)
    folder = here.write(1, writing("one"))
    damage(folder / "weights", "overwrite")
    assert content(here.latest(pytest.fail)) == "one"
    overwrite("global_step_1/weights")
    assert content(here.latest(pytest.fail)) == "one"


def test_a_copy_is_not_taken_for_a_checkpoint_of_the_same_sizes_and_an_earlier_version(tmp_path: Path) -> None:
    here = store(tmp_path)
    folder = here.write(1, writing("one"))
    sizes = {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    del sizes["manifest.json"]
    earlier = json.dumps({"step": 1, "files": sizes})
    (folder / "manifest.json").write_text(earlier)
    fsspec.filesystem("memory").pipe_file(f"{URL}/global_step_1/manifest.json", earlier.encode())
    (folder / "weights").write_bytes(bytes(sizes["weights"]))
    assert content(here.latest(pytest.fail)) == "one"


def test_a_run_without_an_intact_checkpoint_is_told_to_use_another_url(tmp_path: Path) -> None:
    store(tmp_path / "a").write(1, writing("one"))
    fsspec.filesystem("memory").rm(f"{URL}/global_step_1/weights")
    with pytest.raises(CheckpointError, match=r"start a new run with another trainer\.ckpt_path\.$"):
        store(tmp_path / "b").latest()
    with pytest.raises(ConfigError, match="resume=never"):
        store(tmp_path / "b", "trainer.resume=never").check()


@pytest.mark.parametrize("midway", [False, True])
@pytest.mark.parametrize("existing", [0, 3])
def test_a_write_that_fails_at_any_instant_can_be_tried_again(tmp_path: Path, existing: int, midway: bool) -> None:
    keep, at, failed = "trainer.max_ckpts_to_keep=3", 0, True
    while failed:
        at += 1
        MemoryFileSystem.store.clear()
        first = store(tmp_path / f"first-{at}", keep)
        for step in range(1, existing + 1):
            first.write(step, writing(f"step {step}"))
        for damaged in range(2, existing + 1):
            overwrite(f"global_step_{damaged}/weights")
        returned = store(tmp_path / f"back-{at}", keep)
        assert content(returned.latest(lambda line: None)) == ("step 1" if existing else None)
        with pytest.MonkeyPatch.context() as patch:
            Interruption(at, midway, TimeoutError).install(patch)
            try:
                returned.write(4, writing("step 4"))
                failed = False
            except CheckpointError:
                failed = True
        if failed:
            returned.write(4, writing("step 4"))
        assert content(store(tmp_path / f"next-{at}").latest(pytest.fail)) == "step 4"
    assert at > (12 if existing else 5)  # two folders of four files; configuration, three files, manifest, pointer


def test_an_outage_is_an_error_and_never_a_new_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = store_whose_second_upload_failed(tmp_path)
    assert content(store(tmp_path / "b").latest()) == "one"

    def out(*_: object, **__: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(MemoryFileSystem, "ls", out)
    with pytest.raises(CheckpointError, match=r"does not read.*reached"):
        first.latest()


def test_a_crash_at_any_instant_leaves_the_configuration(tmp_path: Path) -> None:
    at, survived = 0, False
    store(tmp_path / "a").write(1, writing("one"))
    while not survived:
        at += 1
        with pytest.MonkeyPatch.context() as patch:
            Interruption(at, midway=True).install(patch)
            try:
                store(tmp_path / f"new-{at}").write(1 + at, writing("more"))
                survived = True
            except Crash:
                pass
        store(tmp_path / "b").check()
    assert at > 5


@pytest.mark.parametrize("outage", ["torn", "out"])
def test_an_incomplete_download_is_not_resumed_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outage: str
) -> None:
    store(tmp_path / "a").write(1, writing("one"))
    get = MemoryFileSystem.get

    def torn(of: MemoryFileSystem, there: list[str], here: list[str]) -> None:
        get(of, there, here)
        Path(here[-1]).write_text("t")
        if outage == "out":
            raise ConnectionResetError

    monkeypatch.setattr(MemoryFileSystem, "get", torn)
    with pytest.raises(CheckpointError, match=r"trainer.ckpt_path=.* does not read"):
        store(tmp_path / "b").latest()
    monkeypatch.undo()
    assert content(store(tmp_path / "b").latest()) == "one"


def test_two_runs_do_not_remove_each_others(tmp_path: Path) -> None:
    one, other = store(tmp_path / "a"), store(tmp_path / "b")
    assert one.latest() is None and other.latest() is None
    one.write(5, writing("one"))
    with pytest.raises(
        CheckpointError, match=r"global_step_5 of another run, which is untouched.*another trainer.ckpt_path"
    ):
        other.write(3, writing("other"))
    assert content(store(tmp_path / "c").latest()) == "one"
    one.write(6, writing("one more"))
    assert content(other.latest()) == "one more"
    other.write(7, writing("other"))  # in the place of the first one


def test_the_best_stays_behind_the_url_and_on_the_disk(tmp_path: Path) -> None:
    one = store(tmp_path / "a", "trainer.max_ckpts_to_keep=2")
    assert one.latest() is None
    for step in range(1, 6):
        one.write(step, writing(str(step)), Evaluated({2: 0.9, 3: 0.5}))
    assert there() == ["config.yaml", "global_step_2", "global_step_4", "global_step_5", "latest"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["global_step_2", "global_step_5", "latest"]


def test_checkpoints_of_another_run_are_rejected(tmp_path: Path) -> None:
    store(tmp_path / "a").check()
    store(tmp_path / "a").write(1, writing("one"))
    store(tmp_path / "b", "trainer.ckpt_interval=9", f"trainer.run_dir={tmp_path}").check()
    with pytest.raises(ConfigError, match=r"other settings:\n  trainer.seed: was 0, now 1\nSet these as in"):
        store(tmp_path / "b", "trainer.seed=1").check()
    with pytest.raises(ConfigError, match="drop resume=never"):
        store(tmp_path / "b", "trainer.resume=never").check()
    store(tmp_path / "a", "trainer.resume=never").check()  # its own: the run goes on after a worker has died


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("checkpoints", "trainer.run_dir"),
        ("nowhere://a/b", "fsspec knows"),
        ("://a", "no folder"),
        ("file:///", "no folder"),
        ("memory://bucket/run", "gone when this process ends"),
    ],
)
def test_a_url_that_keeps_no_checkpoints_is_rejected(url: str, remedy: str) -> None:
    (problem,) = validate(compose("quickstart", [f"trainer.ckpt_path={url}"])).errors
    assert remedy in problem


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("run_dir", "Set trainer.ckpt_path=s3://bucket/run"),
        ("runs_dir", "Set trainer.ckpt_path=s3://bucket/run"),
        ("init_from", "Copy its folder"),
    ],
)
def test_the_folder_of_a_run_is_on_a_disk(key: str, remedy: str) -> None:
    (problem,) = validate(compose("quickstart", [f"trainer.{key}=s3://bucket/run"])).errors
    assert f"trainer.{key}=s3://bucket/run is a URL" in problem and remedy in problem
