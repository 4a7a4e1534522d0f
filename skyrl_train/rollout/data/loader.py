"""The endless stream of prompts: which comes next, which row a group index stands for, and its outcome.

    source (rows) ──record(group index)──> PromptLoader ──issue──> in flight ──settle──> trained | failed | filtered | dropped
      data set + sampler                    │
      or files, read as needed              └── ledger of group indices (ledger.py)

The loader has the rules that need both: an issued group index has a row, rows are kept while they are needed, and a
checkpoint restores both. There is no barrier between epochs: a group index is a position in all epochs together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from skyrl_train.config.schema import DataConfig, RunConfig
from skyrl_train.environments.base import PromptRecord
from skyrl_train.environments.registry import resolve_environment
from skyrl_train.errors import CheckpointError, DataError
from skyrl_train.rollout.data.dataset import PromptDataset, RecordMaker, load_dataset
from skyrl_train.rollout.data.ledger import GroupLedger
from skyrl_train.rollout.data.samplers import SampledPrompts, build_sampler
from skyrl_train.types import RolloutGroup

if TYPE_CHECKING:  # imports torch, which only a streaming run needs at this point
    from skyrl_train.rollout.data.streaming import StreamingPrompts


def open_prompts(config: RunConfig) -> PromptDataset | StreamingPrompts:
    """Open the prompts of a run: a data set in memory, or with ``data.streaming`` a reader that loads them as needed.

    Raises:
        DataError, ConfigError: see :func:`load_dataset`. A stream raises for a broken row only when it reads it.
    """
    if not config.data.streaming:
        return load_dataset(config.data, config.environment)
    from skyrl_train.rollout.data.streaming import StreamingPrompts

    # A wrong environment must fail before the run starts; for data in memory, load_dataset checks it.
    resolve_environment(config.environment)
    maker = RecordMaker(config.data.prompt_key, config.environment.env_class)
    return StreamingPrompts([Path(name) for name in config.data.train_data], maker, config.trainer.epochs)


def build_loader(dataset: PromptDataset | StreamingPrompts, data: DataConfig, seed: int) -> PromptLoader:
    """Build the loader of a data set in the order of ``data.sampler``, or of a stream in the order of its files.

    Raises:
        ConfigError: the sampler is unknown or cannot be constructed.
    """
    if not isinstance(dataset, PromptDataset):
        return PromptLoader(dataset, seed)
    return PromptLoader(SampledPrompts(dataset, build_sampler(data, dataset, seed)), seed)


class PromptSource(Protocol):
    """The rows behind group indices: a data set with a sampler (``samplers.py``), or a stream (``streaming.py``).

    All calls come from the event loop and return at once.
    """

    def identity(self) -> dict[str, Any]:
        """Return the JSON-able facts that a run and its checkpoint must have in common."""

    async def start(self, changed: Callable[[], None]) -> None:
        """Start, once, after a checkpoint was restored. Calls ``changed`` when the result of :meth:`ready` may change."""

    async def aclose(self) -> None:
        """Free threads and files. Idempotent."""

    def ready(self, group_index: int) -> bool:
        """Return whether the row of ``group_index`` is loaded, or will never exist."""

    @property
    def end(self) -> int | None:
        """The first group index without a row; None: unknown, or the data is endless."""

    def prepare(self, group_index: int) -> None:
        """Choose the row of ``group_index``, if that is not done. Called when ready, before the index is issued.

        Raises:
            DataError: the row exists but cannot be read, or the sampler failed.
        """

    def record(self, group_index: int) -> PromptRecord:
        """Return the prompt of a group index that is in flight or buffered."""

    def settled(self, group_indices: Iterable[int], frontier: int) -> None:
        """Forget the rows of these group indices and of all below ``frontier``."""

    def observe(self, group: RolloutGroup) -> None:
        """Learn from a finished group. Called before :meth:`settled`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-able state from which the rows of all open group indices can be restored."""

    def may_change(self, state: Mapping[str, Any]) -> Collection[str]:
        """Return the keys of the identity that may differ from a checkpoint with this state."""

    def load_state_dict(self, state: Mapping[str, Any], is_open: Callable[[int], bool], issued: int) -> None:
        """Restore the state. Of the group indices below ``issued``, only the open ones are needed."""


class PromptLoader:
    """Issues group indices, knows their prompts, and records their outcomes.

    Args:
        seed: seed of the run.

    Attributes:
        ledger: outcomes of all group indices. Read-only for others.
    """

    def __init__(self, source: PromptSource, seed: int) -> None:
        self._source = source
        self._seed = seed
        self.ledger = GroupLedger()
        self._observe_error: Exception | None = None  # raised by a user's sampler

    # Issuing ------------------------------------------------------------------------------------------------------

    async def start(self, changed: Callable[[], None]) -> None:
        """Open the source. After a resume, the prompts that were in flight are loaded when this returns.

        Args:
            changed: called on the event loop when :attr:`ready` or :attr:`ended` may have changed.

        Raises:
            DataError: a file cannot be read.
        """
        await self._source.start(changed)

    async def aclose(self) -> None:
        """Stop reading. Idempotent."""
        await self._source.aclose()

    @property
    def ready(self) -> bool:
        """True if :meth:`issue` has a result now. False while a stream reads the next row."""
        return self._observe_error is not None or self._source.ready(self.ledger.next)

    @property
    def ended(self) -> bool:
        """True if no group index will ever be issued again."""
        return self._source.end is not None and self.ledger.next >= self._source.end

    def issue(self) -> int | None:
        """Issue the next group index. Those in flight at the last checkpoint come first, in their order.

        Returns:
            None: the data has ended, as a stream does after its epochs. A data set in memory never ends.

        Raises:
            DataError: a row cannot be read, or the sampler failed.
            RuntimeError: the loader is not :attr:`ready`.
        """
        if self._observe_error is not None:
            raise DataError(f"the sampler failed in observe(): {self._observe_error!r}") from self._observe_error
        group_index = self.ledger.next
        if not self._source.ready(group_index):
            raise RuntimeError(
                f"the row of group index {group_index} is still being read; wait until the loader is ready"
            )
        if self.ended:
            return None
        # This may raise, so it comes before the ledger: an index without a row must not count as issued.
        self._source.prepare(group_index)
        return self.ledger.issue()

    def record(self, group_index: int) -> PromptRecord:
        """Return the prompt of a group index that is in flight or buffered."""
        return self._source.record(group_index)

    def settle(self, group_indices: Iterable[int], outcome: str, groups: Iterable[RolloutGroup] = ()) -> None:
        """Record the outcome of issued group indices: ``trained``, ``failed``, ``filtered`` or ``dropped``.

        Args:
            groups: the finished groups among them, for samplers that learn.

        Raises:
            ValueError: a group index is not in flight.
        """
        settled = list(group_indices)
        self.ledger.settle(settled, outcome)
        # Observe before the source forgets the rows.
        try:
            for group in groups:
                self._source.observe(group)
        except Exception as error:  # user code: the current step stands, the next issue() raises
            self._observe_error = error
        self._source.settled(settled, self.ledger.frontier)

    # Checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return JSON-able state. Group indices in flight are those that are neither settled nor buffered."""
        return {
            "identity": {**self._source.identity(), "seed": self._seed},
            "ledger": self.ledger.state_dict(),
            "source": self._source.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], buffered: Iterable[int]) -> None:
        """Restore the state, before :meth:`start`.

        Every issued group index without an outcome and not in ``buffered`` is issued again.

        Raises:
            CheckpointError: the checkpoint belongs to another data set, seed or sampler.
        """
        # With other data, the stored group indices would mean other prompts, and nothing would notice later.
        may_change = self._source.may_change(state["source"])
        for key, value in {**self._source.identity(), "seed": self._seed}.items():
            theirs = state["identity"].get(key)
            if theirs != value and key not in may_change:
                raise CheckpointError(
                    f"the checkpoint's data has {key} {theirs!r}, this run's has {value!r}; resume with the data set, "
                    "data.sampler and trainer.seed of the original run, or start a new one with another trainer.run_dir"
                )
        # The ledger comes first: it tells the source which rows are still open.
        self.ledger.load_state_dict(state["ledger"], buffered)
        self._source.load_state_dict(state["source"], self.ledger.is_open, self.ledger.issued)
