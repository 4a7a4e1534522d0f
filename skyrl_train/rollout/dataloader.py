"""The endless stream of prompts: which is next, which row is behind an ordinal, and what became of each (SEMANTICS 5).

    source (rows) ──record(ordinal)──> PromptLoader ──issue──> in flight ──settle──> trained | failed | filtered | dropped
      data set + sampler                    │
      or files, read as needed              └── ledger of ordinals (rollout/ledger)

The loader owns the rules that need both: what is issued has a row, rows are kept while they are needed, and a checkpoint
brings both back. There is no barrier between epochs: an ordinal is a position in all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from skyrl_train.config.schema.data import DataConfig
from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import CheckpointError, DataError
from skyrl_train.rollout.dataset import PromptDataset
from skyrl_train.rollout.group import RolloutGroup
from skyrl_train.rollout.ledger import OrdinalLedger
from skyrl_train.rollout.samplers import SampledPrompts, build_sampler

if TYPE_CHECKING:  # it imports torch, which only a streaming run needs at this point
    from skyrl_train.rollout.streaming import StreamingPrompts


def build_loader(dataset: PromptDataset | StreamingPrompts, data: DataConfig, seed: int) -> PromptLoader:
    """The loader of a data set in the order of ``data.sampler``, or of a stream in its own.

    Raises:
        ConfigError: there is no such sampler, or it cannot be constructed.
    """
    if not isinstance(dataset, PromptDataset):
        return PromptLoader(dataset, seed)
    return PromptLoader(SampledPrompts(dataset, build_sampler(data, dataset, seed)), seed)


class PromptSource(Protocol):
    """Where prompts come from: a data set and a sampler (``rollout/samplers``), or files that are read as they are
    needed (``rollout/streaming``). Everything is called on the event loop and returns at once."""

    def identity(self) -> dict[str, Any]:
        """What a run and its checkpoint must have in common, JSON-able."""

    async def start(self, changed: Callable[[], None]) -> None:
        """Called once, after a checkpoint was restored. ``changed`` is to be called whenever :meth:`ready` may have."""

    async def aclose(self) -> None:
        """Frees threads and files. Idempotent."""

    def ready(self, ordinal: int) -> bool:
        """Whether the row of ``ordinal`` is there, or will never be."""

    @property
    def end(self) -> int | None:
        """The first ordinal without a row; None as long as that is not known, and for endless data."""

    def prepare(self, ordinal: int) -> None:
        """Called when the source is ready and before ``ordinal`` is issued: chooses its row, if that is not done yet.

        Raises:
            DataError: there is a row, but it cannot be read, or the sampler failed.
        """

    def record(self, ordinal: int) -> PromptRecord:
        """The prompt of an ordinal that is in flight or buffered."""

    def settled(self, ordinals: Iterable[int], frontier: int) -> None:
        """The rows of these ordinals, and of all below ``frontier``, are not needed any more."""

    def observe(self, group: RolloutGroup) -> None:
        """What became of an ordinal's row, before :meth:`settled`."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; what it takes to have the rows of all open ordinals again."""

    def may_change(self, state: Mapping[str, Any]) -> Collection[str]:
        """The keys of the identity that need not be those of a checkpoint with this state."""

    def load_state_dict(self, state: Mapping[str, Any], is_open: Callable[[int], bool], issued: int) -> None:
        """Restores the state. Ordinals from ``issued`` on are new; of those below, only the open ones are needed."""


class PromptLoader:
    """Issues ordinals, knows their prompts, and records their outcome.

    Args:
        source: of the prompts.
        seed: of the run.
    """

    def __init__(self, source: PromptSource, seed: int) -> None:
        self._source = source
        self._seed = seed
        self._ledger = OrdinalLedger()
        self._broken: Exception | None = None  # what a sampler of somebody else's raised

    # Issuing ------------------------------------------------------------------------------------------------------

    async def start(self, changed: Callable[[], None]) -> None:
        """Opens the source. After a resume, the prompts that were in flight are known when this returns.

        Args:
            changed: called on the event loop whenever :attr:`ready` or :attr:`ended` may have changed.

        Raises:
            DataError: a file cannot be read.
        """
        await self._source.start(changed)

    async def aclose(self) -> None:
        """Stops reading. Idempotent."""
        await self._source.aclose()

    @property
    def ready(self) -> bool:
        """Whether :meth:`issue` has an answer now; not while a stream's next row is still being read."""
        return self._broken is not None or self._source.ready(self._ledger.next)

    @property
    def ended(self) -> bool:
        """Whether nothing is left to issue, for good."""
        return self._source.end is not None and self._ledger.next >= self._source.end

    def issue(self) -> int | None:
        """The next ordinal to generate: those in flight at the last checkpoint first, in their order.

        None: the data has ended for good, as a finite stream does after its epochs. A data set in memory never ends.

        Raises:
            DataError: a row cannot be read, or the sampler failed.
            RuntimeError: the loader is not :attr:`ready`.
        """
        if self._broken is not None:
            raise DataError(f"the sampler failed in observe(): {self._broken!r}") from self._broken
        ordinal = self._ledger.next
        if not self._source.ready(ordinal):
            raise RuntimeError(f"the row of ordinal {ordinal} is still being read; wait until the loader is ready")
        if self.ended:
            return None
        self._source.prepare(ordinal)
        return self._ledger.issue()

    def record(self, ordinal: int) -> PromptRecord:
        """The prompt of an ordinal that is in flight or buffered."""
        return self._source.record(ordinal)

    # Outcomes -----------------------------------------------------------------------------------------------------

    def settle(self, ordinals: Iterable[int], outcome: str, groups: Iterable[RolloutGroup] = ()) -> None:
        """Records what became of issued ordinals: ``trained``, ``failed``, ``filtered`` or ``dropped``.

        Args:
            groups: those of the ordinals that finished, for samplers that learn from them.

        Raises:
            ValueError: one of them is not in flight.
        """
        settled = list(ordinals)
        self._ledger.settle(settled, outcome)
        try:
            for group in groups:
                self._source.observe(group)
        except Exception as error:  # user code; the step that is being settled stands, the next issue() raises
            self._broken = error
        self._source.settled(settled, self._ledger.frontier)

    @property
    def frontier(self) -> int:
        """The first ordinal without an outcome."""
        return self._ledger.frontier

    @property
    def failed(self) -> list[int]:
        """Ordinals that failed, in the order in which they did; never cleared."""
        return self._ledger.failed

    @property
    def filtered(self) -> list[int]:
        """Ordinals whose groups were filtered, in that order; never cleared."""
        return self._ledger.filtered

    @property
    def dropped(self) -> list[int]:
        """Ordinals whose groups were dropped, in that order; never cleared."""
        return self._ledger.dropped

    # Checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state; in-flight ordinals are what is neither settled nor buffered."""
        return {
            "identity": self._identity(),
            "ledger": self._ledger.state_dict(),
            "source": self._source.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], buffered: Iterable[int]) -> None:
        """Restores the state, before :meth:`start`; every issued ordinal without an outcome or a finished group in
        ``buffered`` is issued again.

        Raises:
            CheckpointError: the checkpoint is of another data set, seed or sampler.
        """
        may_change = self._source.may_change(state["source"])
        for key, value in self._identity().items():
            theirs = state["identity"].get(key)
            if theirs != value and key not in may_change:
                raise CheckpointError(
                    f"the checkpoint's data has {key} {theirs!r}, this run's has {value!r}; resume with the data set, "
                    "data.sampler and trainer.seed of the original run, or start a new one with another trainer.run_dir"
                )
        self._ledger.load_state_dict(state["ledger"], buffered)
        self._source.load_state_dict(state["source"], self._ledger.is_open, self._ledger.issued)

    def _identity(self) -> dict[str, Any]:
        return {**self._source.identity(), "seed": self._seed}
