"""The folder that trainer and engines share, as a transport writes to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from skyrl_train.errors import PublicationError
from skyrl_train.publication.folder_claim import FolderClaim


class WeightFolder:
    """Is claimed with the first file, so that copies of a transport do not share the claim.

    Args:
        folder: engines see it under the same path.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._claim: FolderClaim | None = None
        self._closed = False

    @contextlib.contextmanager
    def writing(self, version: int) -> Iterator[None]:
        """Within it, files of ``version`` are written.

        Raises:
            PublicationError: it is closed, or cannot be written.
        """
        if self._closed:
            raise PublicationError("The weight transport is closed; make a new one to publish again.")
        try:
            self._claim = self._claim or FolderClaim(self._folder)
            yield
        except OSError as error:
            raise PublicationError(
                f"The weights of version {version} cannot be written to {self._folder}: {error.strerror}. Make room there, "
                "or set generator.weight_folder to another folder that trainer and engines share."
            ) from error

    def path(self, name: str) -> Path:
        """A file of this transport's; within :meth:`writing`."""
        assert self._claim is not None, "nothing is being written"
        return self._claim.path(name)

    def close(self) -> None:
        """Gives up the claim; the files are removed by whoever made them. Idempotent."""
        self._closed = True
        if self._claim is not None:
            self._claim.release()
            self._claim = None
