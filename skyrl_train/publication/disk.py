"""Publication through a folder that trainer and engines share: one safetensors file per version.

gather ──write──> .name.tmp ──rename──> name-version.safetensors ──map──> engines, on this machine or on others
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path

import torch

from skyrl_train.inference.disk_weights import TRANSPORT_NAME
from skyrl_train.inference.shared_weights import checksum_text
from skyrl_train.inference.weight_update import WeightUpdate
from skyrl_train.publication.base import WeightTransport
from skyrl_train.publication.safetensors_file import write_weights
from skyrl_train.publication.staging import NUM_STAGING_AREAS
from skyrl_train.publication.weight_folder import WeightFolder

FIRST_HEADER_BYTES = 1 << 20  # a guess that is enough for thousands of weights


class DiskTransport(WeightTransport):
    """Casts to ``dtype`` (a torch name: what the engines serve) while writing; ``verify`` adds a checksum.

    The two versions written last are kept: what engines may still read, and the next one. A file is no checkpoint; it
    reaches the disk when the operating system likes, unless ``sync`` waits for that. What a killed trainer has left in the
    folder is removed with the first version.

    Args:
        folder: engines see it under the same path.
    """

    name = TRANSPORT_NAME

    def __init__(self, folder: str, dtype: str = "float32", verify: bool = False, sync: bool = False) -> None:
        self._folder = WeightFolder(folder)
        self._dtype = dtype
        self._verify = verify
        self._sync = sync
        self._files: deque[Path] = deque()
        self._data_offset = FIRST_HEADER_BYTES

    def gather(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate:
        """Writes the weights, cast, to a new file.

        Raises:
            PublicationError: the transport is closed, or the folder cannot be written.
        """
        with self._folder.writing(version):
            while len(self._files) >= NUM_STAGING_AREAS:
                self._files.popleft().unlink(missing_ok=True)
            path = self._folder.path(str(version))
            written = write_weights(
                path,
                weights,
                self._dtype,
                metadata={"version": str(version)},
                expected_offset=self._data_offset,
                sync=self._sync,
            )
        self._data_offset = written.data_offset
        if path not in self._files:
            self._files.append(path)
        return WeightUpdate(
            version=version,
            transport=self.name,
            location=str(path),
            num_bytes=written.num_bytes,
            tensors=written.specs,
            checksum=checksum_text(written.crc) if self._verify else None,
        )

    def close(self) -> None:
        """Removes the files; engines that mapped one keep it until they let go. Idempotent."""
        while self._files:
            self._files.popleft().unlink(missing_ok=True)
        self._folder.close()
