"""Training of the policy and the critic in this process, on one thread or one GPU: a single rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar, cast

import torch

from skyrl_train.config import derive
from skyrl_train.config.schema import TrainerConfig
from skyrl_train.models.folder import load_model, use_tf32
from skyrl_train.models.lora import adapter_of, add_adapter, base_fingerprint, policy_weights, served_weights
from skyrl_train.training.backend import CriticBackend, Training, TrainingBackend
from skyrl_train.training.collectives import Collectives
from skyrl_train.training.critic_worker import CriticMicroBatch, CriticWorker, put_value_head
from skyrl_train.training.export import export_hf
from skyrl_train.training.gradient_accumulator import GradientAccumulator, LossInputs
from skyrl_train.training.layers import checkpoint_activations, compile_layers
from skyrl_train.training.policy_worker import PolicyMicroBatch, PolicyWorker
from skyrl_train.training.state import BackendState, Snapshots, host_tensor, read_state, write_state
from skyrl_train.weight_sync.update import WeightTransport, WeightUpdate

M = TypeVar("M", bound=LossInputs)


class LocalTraining(GradientAccumulator[M], Training):
    """The state of a worker that is a training backend by itself, because it is the only rank. Common to policy and critic."""

    _snapshots: Snapshots[BackendState]
    _device: torch.device  # where it computes
    _offloaded = False

    def snapshot(self) -> dict[str, object]:
        """See :meth:`Training.snapshot`; the copies are in main memory, until the next snapshot."""
        live = self._live_state()
        number = self._snapshots.take(
            lambda buffers: BackendState(
                weights=buffers.copy_of_all("weights", live.weights),
                optimizer=buffers.copy_of_all("optimizer", live.optimizer),
                rng=buffers.copy_of_all("rng", live.rng),
            )
        )
        return {"number": number}

    def save(self, snapshot: dict[str, object], folder: Path) -> dict[str, str]:
        """See :meth:`Training.save`.

        Raises:
            OSError: the disk is full or the folder cannot be written.
            CheckpointError: another snapshot was taken since.
        """
        return write_state(self._snapshots.state(cast(int, snapshot["number"])), folder)

    def load(self, folder: Path) -> None:
        # read_state validates everything, so that a rejected checkpoint changes nothing.
        state = read_state(folder, like=self._live_state(), misfit=self.optimizer.check_state_dict)
        self.discard()
        self._snapshots.copied()  # a snapshot under way still reads the weights
        with torch.no_grad():
            for name, weight in policy_weights(self.model):
                weight.copy_(state.weights[name])
        self.optimizer.load_state_dict(state.optimizer)
        torch.set_rng_state(state.rng["cpu"])
        if "cuda" in state.rng and self._device.type == "cuda":
            torch.cuda.set_rng_state(state.rng["cuda"], self._device)

    @torch.no_grad()
    def offload_states(self) -> None:
        """See :meth:`Training.offload_states`: from a GPU to pinned memory, from main memory to files of ``tempfile``."""
        if self._offloaded:
            return
        assert not self.has_open_step, "gradients of a step that has begun would stay"
        self._snapshots.copied()  # a copy under way would keep the memory
        for tensor in self._states():
            outside = host_tensor(tensor)
            outside.copy_(tensor, non_blocking=True)
            tensor.data = outside
        self._offloaded = True
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the copies
            torch.cuda.empty_cache()  # for the engines' processes

    @torch.no_grad()
    def reload_states(self) -> None:
        """See :meth:`Training.reload_states`."""
        if not self._offloaded:
            return
        for tensor in self._states():
            tensor.data = torch.empty_like(tensor, device=self._device).copy_(tensor, non_blocking=True)
        self._offloaded = False

    def close(self) -> None:
        """See :meth:`Training.close`: main memory that the GPU copies by itself."""
        self._snapshots.close()

    def _states(self) -> Iterable[torch.Tensor]:
        # Masters may be the parameters themselves.
        return {id(tensor): tensor for tensor in (*self.model.parameters(), *self.optimizer.tensors())}.values()

    def _live_state(self) -> BackendState:
        rng = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self._device)
        weights = {name: weight.detach() for name, weight in policy_weights(self.model)} | base_fingerprint(self.model)
        return BackendState(weights=weights, optimizer=self.optimizer.state_dict(), rng=rng)


class LocalBackend(LocalTraining[PolicyMicroBatch], PolicyWorker, TrainingBackend):
    """A :class:`PolicyWorker` that trains alone.

    Same inputs give bit-identical weights on the CPU with a fixed number of threads.
    """

    def __init__(
        self, model_path: str, trainer_config: TrainerConfig, total_steps: int, temperature: float, seed: int
    ) -> None:
        """
        Args:
            total_steps: optimizer minibatches of the whole run, over which the learning rate decays.
            temperature: of the sampled responses.
            seed: of an adapter, and of torch's global generators, for models that draw random numbers in their forward pass.
                Such a run is reproducible only if nothing else in the process draws random numbers, such as an engine or a
                stage in a thread.

        Raises:
            ConfigError: an unknown name in ``trainer_config``, or a pattern of ``lr_multipliers`` that matches nothing.
            ModelError: the model folder cannot be used.
        """
        torch.manual_seed(seed)
        model = load_model(model_path, trainer_config.policy.dtype, trainer_config.device)
        if trainer_config.policy.model.lora.rank:
            add_adapter(model, trainer_config.policy.model.lora, seed=seed)
        if trainer_config.policy.compile:
            compile_layers(model)
        if derive.gradient_checkpointing(trainer_config, model.num_parameters()):
            checkpoint_activations(model)
        super().__init__(model, model_path, trainer_config, total_steps, temperature, Collectives(), Snapshots())
        self._device = model.device
        if trainer_config.tf32:
            use_tf32(self._device)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`TrainingBackend.named_weights`; tied weights appear once."""
        for name, weight in served_weights(self.model):
            yield name, weight.detach()

    def stage(self, transport: WeightTransport, version: int) -> WeightUpdate:
        update = transport.gather(self.named_weights(), version)
        return dataclasses.replace(update, adapter=adapter_of(self.model))

    def export_hf(self, folder: Path) -> None:
        """See :meth:`TrainingBackend.export_hf`."""
        export_hf(self.model, self._model_path, folder)


class LocalCritic(LocalTraining[CriticMicroBatch], CriticWorker, CriticBackend):
    """A :class:`CriticWorker` that trains alone."""

    def __init__(self, model_path: str, trainer_config: TrainerConfig, total_steps: int) -> None:
        """
        Args:
            trainer_config: from :func:`skyrl_train.config.derive.critic_trainer`.
            total_steps: optimizer minibatches of the whole run, over which the learning rate decays.

        Raises:
            ConfigError: an unknown name in ``trainer_config``, or a pattern of ``lr_multipliers`` that matches nothing.
            ModelError: the model folder cannot be used, or its model cannot predict values.
        """
        model = load_model(model_path, trainer_config.policy.dtype, trainer_config.device)
        put_value_head(model, model_path)
        if derive.gradient_checkpointing(trainer_config, model.num_parameters()):
            checkpoint_activations(model, "trainer.critic")
        super().__init__(model, trainer_config, total_steps, Collectives(), Snapshots())
        self._device = model.device
        if trainer_config.tf32:
            use_tf32(self._device)


def limit_memory(device: str, fraction: float) -> None:
    """Let this process use ``fraction`` of a GPU's memory; what it asks for beyond that fails here, not in an engine."""
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(fraction, derive.full_device_name(device))
