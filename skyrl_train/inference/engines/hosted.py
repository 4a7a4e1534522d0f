"""Engines whose work is done by a hosted object (:mod:`skyrl_train.workers`): control calls, and the engine's death."""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_train.errors import EngineDeadError, EngineError
from skyrl_train.inference.interface import EngineHealth, InferenceEngineInput, InferenceEngineInterface, SamplingParams
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.update import WeightUpdate
from skyrl_train.workers.connection import WorkerConnection, WorkerLink


class HostedEngine(InferenceEngineInterface):
    """Forwards control calls to the hosted object. After its death every call raises ``EngineDeadError`` at once.

    Args:
        name: for errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._connection: WorkerConnection | None = None
        self._loaded: tuple[WorkerConnection, bool] | None = None  # who has a tokenizer, and whether also for grammars
        self._version = -1

    @property
    def policy_version(self) -> int:
        return self._version

    async def abort_generation(self) -> None:
        await self.connection.call("abort_generation")

    async def pause(self, mode: PauseMode) -> None:
        await self.connection.call("pause", PauseMode(mode))

    async def resume(self) -> None:
        await self.connection.call("resume")

    async def sleep(self, level: int = 1) -> None:
        await self.connection.call("sleep", level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        await self.connection.call("wake_up", tags)

    async def load_tokenizer(self, grammars: bool) -> None:
        connection = self.connection
        if self._loaded not in ((connection, True), (connection, grammars)):
            await connection.call("load_tokenizer", grammars)
            self._loaded = connection, grammars

    async def receive_weights(self, update: WeightUpdate) -> None:
        await self.connection.call("receive_weights", update)

    async def load_weights(self, update: WeightUpdate) -> None:
        await self.connection.call("load_weights", update)

    async def served_checksum(self) -> str:
        return str(await self.connection.call("served_checksum"))

    async def health(self) -> EngineHealth:
        """Return a snapshot; of a dead engine one that says so."""
        try:
            health: EngineHealth = await self.connection.call("health")
        except EngineDeadError:
            return EngineHealth(alive=False, policy_version=self._version)
        return health

    async def teardown(self) -> None:
        """Let the hosted object clean up if it can, then end it. Idempotent; pending calls raise ``EngineDeadError``."""
        if self._connection is not None:
            await self._connection.stop("it was torn down")

    @property
    def connection(self) -> WorkerConnection:
        """The connection of the last start.

        Raises:
            EngineDeadError: the engine was never started.
        """
        if self._connection is None:
            raise self._gone_error("it was not started; call start() first")
        return self._connection

    def _connect(self, link: WorkerLink) -> WorkerConnection:
        """Begin a new life of the engine, without weights; the caller starts the connection."""

        def take_version(version: int) -> None:
            self._version = version

        self._version = -1
        self._connection = WorkerConnection(
            link,
            gone_error=self._gone_error,
            call_error=lambda failure: failure.error(EngineError, "the hosted engine"),
            on_state=take_version,
        )
        return self._connection

    def _gone_error(self, reason: str) -> EngineDeadError:
        return EngineDeadError(f"{self._name} is gone: {reason.removesuffix('.')}.")


def plain_request(engine_input: InferenceEngineInput) -> tuple[list[list[int]] | None, SamplingParams]:
    """Return prompts and sampling parameters of a request as plain data, which can travel to the hosted engine."""
    prompts, params = engine_input.get("prompt_token_ids"), SamplingParams.parse(engine_input.get("sampling_params"))
    return None if prompts is None else [list(map(int, prompt)) for prompt in prompts], params
