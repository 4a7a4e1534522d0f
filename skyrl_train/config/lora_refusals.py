"""Refusals about ``trainer.policy.model.lora`` and the learning rates of single parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec

from skyrl_train.config.keys import did_you_mean
from skyrl_train.config.limits import Problems, at_least, more_than_zero, setting
from skyrl_train.config.schema.model import LoraConfig
from skyrl_train.config.schema.run import RunConfig

KEY = "trainer.policy.model.lora"
ALL_LINEAR = "all-linear"
INIT_METHODS = ("kaiming", "gaussian")
VLLM_MAX_RANK = 512
# Arguments of vLLM that follow from the adapter that is trained.
_DERIVED_ARGUMENTS = ("max_lora_rank", "max_loras")


def _adapter(config: RunConfig) -> Problems:
    lora = config.trainer.policy.model.lora
    yield from at_least(config, 0, f"{KEY}.rank")
    if lora.rank < 1:
        default = vars(LoraConfig(rank=lora.rank))
        unused = [f"{KEY}.{name}" for name, value in default.items() if getattr(lora, name) != value]
        if unused:
            yield f"{', '.join(unused)} with {KEY}.rank={lora.rank}: there is no adapter. Set {KEY}.rank, or leave it out."
        return
    yield from more_than_zero(config, f"{KEY}.alpha")
    if lora.dropout != 0:
        yield (
            f"{KEY}.dropout={lora.dropout:g}: engines sample without dropout, so that the proximal ratio of a step's first pass "
            "would not be 1, and the correction would see a mismatch that is none. Set it to 0."
        )
    if lora.init_method not in INIT_METHODS:
        yield (
            f"{KEY}.init_method={lora.init_method} is unknown or changes the base model, which engines and the reference "
            f"policy read from its folder.{did_you_mean(lora.init_method, INIT_METHODS)} Set it to "
            f"{' or '.join(INIT_METHODS)}."
        )
    if not lora.target_modules or (ALL_LINEAR in lora.target_modules and len(lora.target_modules) > 1):
        yield f"{KEY}.target_modules={lora.target_modules}: set it to [{ALL_LINEAR}], or to names such as [q_proj, v_proj]."
    if config.trainer.policy.compile:
        yield f"{KEY}.rank={lora.rank} and trainer.policy.compile=true: layers with adapters are not compiled. Set it to false."
    if find_spec("peft") is None:
        yield f"{KEY}.rank={lora.rank} needs peft: install the extra `lora` (./uvw run --extra lora ...), or set it to 0."


def _engines(config: RunConfig) -> Problems:
    rank, engine = config.trainer.policy.model.lora.rank, config.generator.inference_engine
    if rank < 1:
        return
    if engine.backend == "vllm_remote":
        yield (
            f"{KEY}.rank={rank} with generator.inference_engine.backend=vllm_remote: requests to a server name no adapter. Set "
            f"backend to vllm or embedded, or {KEY}.rank=0."
        )
    if engine.backend != "vllm":
        return
    if rank > VLLM_MAX_RANK:
        yield f"{KEY}.rank={rank}: vLLM serves ranks up to {VLLM_MAX_RANK}. Lower it, or set backend=embedded."
    for name in _DERIVED_ARGUMENTS:
        if name in engine.engine_args:
            yield f"generator.inference_engine.engine_args.{name}: follows from {KEY}.rank={rank}. Leave it out."
    if engine.engine_args.get("load_format") == "dummy":
        yield (
            "generator.inference_engine.engine_args.load_format=dummy: publications bring the adapter only, so that the engine "
            "reads the base model from its folder. Leave it out."
        )


def _rates(config: RunConfig) -> Problems:
    for key in ("trainer.policy.optimizer_config.lr_multipliers", "trainer.critic.optimizer_config.lr_multipliers"):
        for pattern, factor in setting(config, key).items():
            if not (math.isfinite(factor) and factor >= 0):
                yield f"{key}[{pattern!r}]={factor:g}: must be finite and >= 0 (0 keeps the parameters as they are)."


RULES: tuple[Callable[[RunConfig], Problems], ...] = (_adapter, _engines, _rates)
