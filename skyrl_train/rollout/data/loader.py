"""The endless stream of prompts: which comes next, which row a group index stands for, and its outcome.

    source (rows) ──ready, prepare──> PromptLoader ──issue──> in flight ──settle──> trained | failed | filtered | dropped
      data set + sampler                │
      or files, read as needed          └── ledger of group indices (ledger.py)

The loader has the rules that need both: an issued group index has a row, rows are kept while they are needed, and a
checkpoint restores both. There is no barrier between epochs: a group index is a position in all epochs together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from skyrl_train.config.schema import DataConfig, RunConfig
from skyrl_train.environments.registry import resolve_environment
from skyrl_train.errors import CheckpointError
from skyrl_train.rollout.data.dataset import PromptDataset, RecordMaker, load_dataset
from skyrl_train.rollout.data.ledger import GroupLedger
from skyrl_train.rollout.data.samplers import PromptSource, SampledPrompts, build_sampler
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
    return StreamingPrompts(config.data.train_data, maker, config.trainer.epochs)


def build_loader(dataset: PromptDataset | StreamingPrompts, data: DataConfig, seed: int) -> PromptLoader:
    """Build the loader of a data set in the order of ``data.sampler``, or of a stream in the order of its files.

    Raises:
        ConfigError: the sampler is unknown or cannot be constructed.
    """
    if not isinstance(dataset, PromptDataset):
        return PromptLoader(dataset, seed)
    return PromptLoader(SampledPrompts(dataset, build_sampler(data, dataset, seed)), seed)


class PromptLoader:
    """Issues group indices and records their outcomes.

    Args:
        seed: seed of the run.

    Attributes:
        source: the prompts of the group indices; it must be started.
        ledger: outcomes of all group indices. Read-only for others.
    """

    def __init__(self, source: PromptSource, seed: int) -> None:
        self.source = source
        self._seed = seed
        self.ledger = GroupLedger()

    @property
    def ready(self) -> bool:
        """True if :meth:`issue` has a result now. False while a stream reads the next row."""
        return self.source.ready(self.ledger.next)

    def issue(self) -> int | None:
        """Issue the next group index. Those in flight at the last checkpoint come first, in their order.

        Returns:
            None: the data has ended, as a stream does after its epochs. A data set in memory never ends.

        Raises:
            DataError: a row cannot be read, or the sampler failed.
            RuntimeError: the loader is not :attr:`ready`.
        """
        group_index = self.ledger.next
        if not self.source.ready(group_index):
            raise RuntimeError(
                f"the row of group index {group_index} is still being read; wait until the loader is ready"
            )
        if self.source.end is not None and group_index >= self.source.end:
            return None
        # This may raise, so it comes before the ledger: an index without a row must not count as issued.
        self.source.prepare(group_index)
        return self.ledger.issue()

    def settle(self, group_indices: Iterable[int], outcome: str, groups: Iterable[RolloutGroup] = ()) -> None:
        """Record the outcome of issued group indices: ``trained``, ``failed``, ``filtered`` or ``dropped``.

        Args:
            groups: the finished groups among them, for samplers that learn.

        Raises:
            ValueError: a group index is not in flight.
        """
        settled = list(group_indices)
        self.ledger.settle(settled, outcome)
        self.source.settled(settled, self.ledger.frontier, groups)

    def state_dict(self) -> dict[str, Any]:
        """Return JSON-able state. Group indices in flight are those that are neither settled nor buffered."""
        return {
            "identity": {**self.source.identity(), "seed": self._seed},
            "ledger": self.ledger.state_dict(),
            "source": self.source.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], buffered: Iterable[int]) -> None:
        """Restore the state, before the source is started.

        Every issued group index without an outcome and not in ``buffered`` is issued again.

        Raises:
            CheckpointError: the checkpoint belongs to another data set, seed or sampler.
        """
        # With other data, the stored group indices would mean other prompts, and nothing would notice later.
        for key, value in {**self.source.identity(), "seed": self._seed}.items():
            theirs = state["identity"].get(key)
            # Fixing a broken row changes the fingerprint; the stream itself then compares the rows that were issued.
            fixed = key == "fingerprint" and "broken" in state["source"]
            if theirs != value and not fixed:
                raise CheckpointError(
                    f"the checkpoint's data has {key} {theirs!r}, this run's has {value!r}; resume with the data set, "
                    "data.sampler and trainer.seed of the original run, or start a new one with another trainer.run_dir"
                )
        # The ledger comes first: it tells the source which rows are still open.
        self.ledger.load_state_dict(state["ledger"], buffered)
        self.source.load_state_dict(state["source"], self.ledger.is_open, self.ledger.issued)
