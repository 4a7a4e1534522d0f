"""Imports of verl, TRL, AReaL and SkyRL: the functions that the tests call, and stand-ins for what these need not import.

The packages lie in ``.oracle``, without their dependencies (``requirements.txt``). Nothing here stands in for a formula.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

FOLDER = Path(__file__).parents[2] / ".oracle"
INSTALL = f"./uvw pip install --no-deps --target {FOLDER.name} --requirement tests/oracle/requirements.txt"


def load_verl() -> SimpleNamespace:
    _find("verl")
    return SimpleNamespace(
        algos=importlib.import_module("verl.trainer.ppo.core_algos"),
        correction=importlib.import_module("verl.trainer.ppo.rollout_corr_helper"),
        losses=importlib.import_module("verl.workers.utils.losses"),
        functional=importlib.import_module("verl.utils.torch_functional"),
        padding=importlib.import_module("verl.workers.utils.padding"),
        config=importlib.import_module("verl.workers.config"),
        AlgoConfig=importlib.import_module("verl.trainer.config").AlgoConfig,
        TensorDict=importlib.import_module("tensordict").TensorDict,
        NonTensorData=importlib.import_module("tensordict").NonTensorData,
    )


def load_trl() -> SimpleNamespace:
    _find("trl")
    # TRL imports vLLM wherever it is installed, which takes longer than all tests. No test generates text.
    importlib.import_module("trl.import_utils").is_vllm_available = lambda *args, **kwargs: False
    grpo, rloo = (importlib.import_module(f"trl.trainer.{name}_trainer") for name in ("grpo", "rloo"))
    trl = importlib.import_module("trl")
    return SimpleNamespace(
        GRPOTrainer=grpo.GRPOTrainer, GRPOConfig=trl.GRPOConfig, RLOOTrainer=rloo.RLOOTrainer, RLOOConfig=trl.RLOOConfig
    )


def load_areal() -> SimpleNamespace:
    _find("areal")
    # The initialisers of these packages import AReaL's controllers, its web servers and its experiment trackers.
    _skip_initialiser("areal")
    _skip_initialiser("areal.trainer")
    _skip_initialiser("areal.infra", TrainController=object)
    _skip_initialiser("areal.experimental.training_service.controller.controller", GatewayTrainController=object)
    policy = asyncio.get_event_loop_policy()
    actor = importlib.import_module("areal.trainer.ppo.actor")
    asyncio.set_event_loop_policy(policy)  # importing AReaL's settings makes uvloop the event loop of the process
    return SimpleNamespace(
        actor=actor,
        functional=importlib.import_module("areal.utils.functional"),
        data=importlib.import_module("areal.utils.data"),
        settings=importlib.import_module("areal.api.cli_args"),
    )


def load_skyrl() -> SimpleNamespace:
    _find("skyrl")
    # Its initialiser imports Tinker's server types, which pydantic rejects on Python 3.11.
    _skip_initialiser("skyrl.backends")
    utils = "skyrl.backends.skyrl_train.utils"
    return SimpleNamespace(
        ppo=importlib.import_module(f"{utils}.ppo_utils"),
        correction=importlib.import_module(f"{utils}.off_policy_correction_utils"),
        functional=importlib.import_module(f"{utils}.torch_utils"),
        settings=importlib.import_module("skyrl.train.config"),
    )


def load_skyrl_generator() -> type:
    """Return SkyRL's generator for skyrl-gym."""
    load_skyrl()
    _skip_initialiser("skyrl.train.generators")  # imports Tinker's server types too
    generator: type = importlib.import_module("skyrl.train.generators.skyrl_gym_generator").SkyRLGymGenerator
    return generator


def _find(package: str) -> None:
    """Make the folder importable, behind everything that is installed; fail where it lacks the package."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    if not (FOLDER / package).is_dir():
        pytest.fail(f"{package} is not in {FOLDER.name}. Run in the root of the repository: {INSTALL}", pytrace=False)


def _skip_initialiser(package: str, **names: object) -> None:
    """Register a package whose ``__init__`` is not run; ``names`` stand in for what its modules import from it."""
    module = ModuleType(package)
    module.__path__ = [str(FOLDER.joinpath(*package.split(".")))]
    vars(module).update(names)
    sys.modules[package] = module
