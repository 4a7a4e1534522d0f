"""A running ``vllm serve`` as an inference engine: the same engine over HTTP."""

from __future__ import annotations

from typing import Any

from skyrl_train.errors import EngineDeadError, EngineError, RequestError
from skyrl_train.inference.engines.vllm.engine import VLLMEngineBase
from skyrl_train.inference.engines.vllm.remote_link import Connection, ServerLink, wait_for_server
from skyrl_train.inference.interface import EngineCapabilities, EngineHealth
from skyrl_train.weight_sync.update import WeightUpdate


class RemoteVLLMEngine(VLLMEngineBase[ServerLink]):
    """Serves with one server; ``docs/tutorials/engines.md`` has the command that starts it.

    Args:
        base_url: such as ``http://host:8000``.
        api_key: the key that the server was started with.
        start_timeout_s: how long :meth:`start` waits for a server that is not up yet.
        control_timeout_s: limit of each call but generation and pausing.

    A server that went away and came back is a dead engine until :meth:`start` is called again; it then holds no synced
    version (-1). Adapters and sleep are not offered.
    """

    NAME = "The remote vLLM engine"

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        start_timeout_s: float = 600.0,
        control_timeout_s: float = 60.0,
    ) -> None:
        super().__init__()
        self._url = base_url
        self._api_key = api_key
        self._start_timeout_s = start_timeout_s
        self._control_timeout_s = control_timeout_s
        self._instance = ""  # the server process of the last start
        self._capabilities: EngineCapabilities | None = None
        self._connected: ServerLink | None = None  # until it is closed

    @property
    def capabilities(self) -> EngineCapabilities:
        """The capabilities that the server reported at the last start.

        Raises:
            EngineDeadError: the engine was never started.
        """
        if self._capabilities is None:
            raise EngineDeadError(f"{self.NAME} is gone: {self._gone}.")
        return self._capabilities

    async def start(self) -> None:
        """Wait for the server and check it. Weights that another trainer left there do not count.

        Raises:
            ConfigError: the server lacks something, or rejects the key.
            EngineDeadError: there is no server, or a failed update has damaged its model.
        """
        await self.teardown()
        connection = Connection(self._url, self._api_key, self._control_timeout_s)
        try:
            info = await wait_for_server(connection, self._start_timeout_s)
            info.check(self._url)
            if info.instance == self._damaged:
                raise EngineDeadError(
                    f"An update failed half-way in the vLLM server at {self._url}; start a new server there."
                )
            version = self.policy_version
            # Only the process that we knew, with the version that we loaded, still holds our weights.
            if self._instance != info.instance or info.policy_version != version:
                await connection.post("/update_weight_version", {"new_version": "-1"})
                version, self._received = -1, None
            if info.paused:  # by an earlier trainer, or before the connection was lost
                await connection.post("/resume")
        except BaseException:
            await connection.close()
            raise
        self._instance, self._capabilities = info.instance, info.capabilities()
        self._end_token_ids = info.end_token_ids
        self._connected = ServerLink(connection, info.instance, version, self._on_death)
        self._begin(self._connected, version)

    async def teardown(self) -> None:
        """Fail what is pending and close the connections; the server keeps running."""
        if self._link is not None:
            self._link.die("it was torn down")
        # Kept apart from the link, because a dead engine has no link but still open connections.
        connected, self._connected = self._connected, None
        if connected is not None:
            await connected.close()

    async def health(self) -> EngineHealth:
        """See the interface. A server that was started again since ``start`` counts as dead."""
        try:
            link, requests = self._alive()
            info = await link.look()
        except EngineError:
            return EngineHealth(alive=False, policy_version=self.policy_version)
        return EngineHealth(
            alive=True,
            policy_version=info.policy_version,
            running=info.held,
            waiting=max(0, info.unfinished - info.held) + requests.gate.waiting,
            paused=info.paused,
            generated_tokens=requests.generated_tokens,
            prefill_tokens=link.prefill_tokens,
            busy_s=requests.busy.seconds,
            kv_cache_usage=info.kv_cache_usage,
        )

    def _reject(self, update: WeightUpdate) -> str | None:
        if update.transport not in self.capabilities.transports:
            return (
                f"Weights by {update.transport!r} do not reach the vLLM server at {self._url}; it must run on this "
                "machine as this user, or set generator.weight_folder to a folder that both machines see."
            )
        if update.adapter is not None:
            return (
                f"The update brings {update.adapter}; requests to a server name none. Set "
                "trainer.policy.model.lora.rank=0."
            )
        return None

    def _lora(self, name: str | None) -> Any:
        if name is not None:
            raise RequestError("A remote vLLM server takes no adapters here; ask capabilities.adapters first.")
        return None
