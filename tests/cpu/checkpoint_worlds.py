"""Contents of checkpoints, and the crash of a process while it writes one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from skyrl_train.runtime.checksums import ChecksumWriter, file_checksum
from skyrl_train.training.checkpoint import FileSystem, find_damage, is_complete

DAMAGES = ("overwrite", "truncate", "grow", "remove")


def damage(file: Path, how: str) -> None:
    """Damages a file as a disk, or a copy that ends too early, may do; ``overwrite`` keeps its size."""
    data = file.read_bytes()
    match how:
        case "overwrite":
            middle = data[len(data) // 2 :][:4096]
            start = len(data) // 2
            file.write_bytes(data[:start] + bytes(byte ^ 0x55 for byte in middle) + data[start + len(middle) :])
        case "truncate":
            file.write_bytes(data[: len(data) // 2])
        case "grow":
            file.write_bytes(data + b"\n")
        case "remove":
            file.unlink()


class Crash(BaseException):
    """The process is gone: no handler of ``Exception`` runs, nothing is cleaned up."""


class QuickFileSystem(FileSystem):
    """Does not wait for the disk: these crashes end the process, not the machine."""

    def sync(self, path: Path) -> None:
        assert path.exists()


def checksums_of(folder: Path) -> dict[str, str]:
    """The checksums of all files in a folder, by their paths below it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): file_checksum(path) for path in files}


def writing(text: str) -> Callable[[Path], dict[str, str]]:
    """A writer of a checkpoint with a file, whose checksum it knows, and a folder."""

    def writer(folder: Path) -> dict[str, str]:
        with ChecksumWriter(folder / "weights") as file:
            file.write(text.encode())
        (folder / "policy").mkdir()
        (folder / "policy" / "state").write_text(text * 2)
        return {"weights": file.checksum}

    return writer


def content(folder: Path | None) -> str | None:
    """Returns the content of a complete checkpoint; fails on an incomplete one."""
    if folder is None:
        return None
    assert is_complete(folder) and find_damage(folder) is None
    text = (folder / "weights").read_text()
    assert (folder / "policy" / "state").read_text() == text * 2
    return text
