"""Settings of other libraries, translated into ours: ``skyrl-train train --from skyrl ...``.

a library's table below (data) + its yaml file and overrides ──migrate──> RunConfig, and what has no counterpart

``docs/reference/migration.md`` is generated from the tables. The oracle tests compare SkyRL's table with its package: every
setting, and every default.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from skyrl_train.config.compose import from_settings, with_overrides
from skyrl_train.config.keys import did_you_mean, in_free_section, known_keys, setting
from skyrl_train.config.schema import RunConfig
from skyrl_train.errors import ConfigError, first_line

_OTHER_FILES = (
    "hydra's other files are not read: {}. Write all settings into one file; "
    "the script of the other library prints them with `--cfg job --resolve`"
)
UNSET: Any = object()  # no default; as a converted value: our default stays
Theirs = Mapping[str, Any]  # settings of the other library by their names, with its defaults


@dataclass(frozen=True)
class Without:
    """A value that has no counterpart, though its setting has one."""

    reason: str


@dataclass(frozen=True)
class Setting:
    """A setting of another library.

    Attributes:
        name: its name there. ``section.*`` stands for all settings in a section.
        here: our setting, or ``section.*``; None: it has no counterpart.
        note: the difference; without a counterpart, the reason.
        default: there, if a run from that library keeps it. The settings of one name have it once.
        convert: (value, all settings there) -> our value, UNSET to leave ours, or Without.
    """

    name: str
    here: str | None
    note: str = ""
    default: Any = UNSET
    convert: Callable[[Any, Theirs], Any] = lambda value, theirs: value


@dataclass(frozen=True)
class Library:
    """A library, the version that its table describes, its settings, and former names of some of them."""

    title: str
    version: str
    settings: Sequence[Setting]
    renamed: Mapping[str, str] = field(default_factory=dict)

    def rows(self, name: str) -> list[Setting]:
        """Return the rows of the setting ``name``: those of its full name, else of the nearest section around it."""
        exact = [row for row in self.settings if row.name == name]
        inside = [row for row in self.settings if row.name.endswith(".*") and name.startswith(row.name[:-1])]
        longest = max((len(row.name) for row in inside), default=0)
        return exact or [row for row in inside if len(row.name) == longest]


@dataclass(frozen=True)
class Migration:
    """Settings of another library in our terms.

    Attributes:
        title: of the library.
        config: the whole configuration.
        mapped: each given setting with a counterpart: its name and value there, our setting, and our value (UNSET: ours
            stays).
        defaults: our setting and value of each default there that differs from ours, and that the run keeps.
        without: name and reason of each given setting without a counterpart.
    """

    title: str
    config: RunConfig
    mapped: list[tuple[str, Any, str, Any]]
    defaults: list[tuple[str, Any]]
    without: list[tuple[str, str]]

    def describe(self) -> str:
        """Return the settings whose name or value changes, the defaults that are kept, and what has no counterpart."""
        names = {name for name, *_ in self.mapped} | {name for name, _ in self.without}
        lacking = {name for name, _ in self.without}
        lines = [f"{self.title}: {len(names - lacking)} of {len(names)} settings have a counterpart."]
        lines += [
            f"  {name}={_text(value)} -> {key}={_text(here)}"
            for name, value, key, here in self.mapped
            if here is not UNSET and (name, value) != (key, here)
        ]
        if self.defaults:
            lines.append(f"Defaults of {self.title} that are kept, and differ from ours:")
            lines += [f"  {key}={_text(value)}" for key, value in self.defaults]
        if self.without:
            lines.append("Without a counterpart:")
            lines += [f"  {name}: {reason}" for name, reason in self.without]
        return "\n".join(lines)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def migrate(library: str, arguments: Sequence[str]) -> Migration:
    """Translate the settings of another library.

    Args:
        library: a key of ``LIBRARIES``.
        arguments: a yaml file of its settings, ``key=value`` overrides of them, or both. Overrides with names that only we
            have are applied last, as they are.

    Raises:
        ConfigError: the file cannot be read, a name is known to neither, or a value is of another type here.
    """
    if library not in LIBRARIES:
        raise ConfigError(
            f"--from {library}: there is no such table.{did_you_mean(library, LIBRARIES)} Known: {', '.join(LIBRARIES)}."
        )
    table = LIBRARIES[library]
    files = [text for text in arguments if "=" not in text]
    if len(files) > 1:
        raise ConfigError(f"--from {library} takes one yaml file and key=value settings, not {' and '.join(files)}.")
    ours: list[str] = []  # overrides that only we have
    texts: list[str] = []
    for text in arguments:
        if "=" in text:
            key = text.partition("=")[0].lstrip("+~")
            known_here = key in known_keys() or in_free_section(key)
            (ours if known_here and not table.rows(table.renamed.get(key, key)) else texts).append(text)
    given: dict[str, Any] = {}
    settings: dict[str, Any] = {}  # ours
    without: list[tuple[str, str]] = []
    read = _read(library, files, texts)
    if other_files := [entry for entry in _list(read.pop("defaults", None), {}) if entry != "_self_"]:
        without.append(("defaults", _OTHER_FILES.format(", ".join(map(_text, other_files)))))
    for name, value in _leaves(read):
        name = table.renamed.get(name, name)
        if not table.rows(name):
            if name in known_keys() or in_free_section(name):
                settings[name] = value
                continue
            known = [row.name.removesuffix(".*") for row in table.settings]
            raise ConfigError(
                f"{name} is a setting of neither {table.title} nor skyrl_train.{did_you_mean(name, known)}"
            )
        given[name] = value
        numbers = [row.default for row in table.rows(name) if isinstance(row.default, bool | int | float)]
        if numbers and (not isinstance(value, int | float) or isinstance(value, bool) != isinstance(numbers[0], bool)):
            holds = "true or false" if isinstance(numbers[0], bool) else "a number"
            raise ConfigError(f"{name}={_text(value)} (in {table.title}'s settings) must be {holds}.")

    default = RunConfig()
    theirs = {row.name: row.default for row in table.settings if row.default is not UNSET} | given
    mapped, kept = [], {}
    for name, value in theirs.items():
        for row in table.rows(name):
            try:
                ours_value = row.convert(value, theirs) if row.here is not None else Without(row.note)
            except (TypeError, ValueError, AttributeError) as error:
                raise ConfigError(
                    f"{name}={_text(value)} (in {table.title}'s settings) cannot be translated: {error}."
                ) from error
            if isinstance(ours_value, Without):
                if name in given:
                    without.append((name, ours_value.reason))
                continue
            key = str(row.here)
            if key.endswith(".*"):
                key = key[:-1] + name.removeprefix(row.name[:-1])
            if name in given:
                mapped.append((name, value, key, ours_value))
            elif ours_value is not UNSET and ours_value != _default(default, key):
                kept[key] = ours_value
            if ours_value is not UNSET:
                settings[key] = ours_value
    changed = {key: value for key, value in settings.items() if value != _default(default, key)}
    config = from_settings(changed, where=f"{table.title}'s settings")
    given_here = {key for _, _, key, _ in mapped}
    return Migration(
        table.title,
        config=with_overrides(config, ours) if ours else config,
        mapped=mapped,
        defaults=[(key, value) for key, value in kept.items() if key not in given_here],
        without=without,
    )


def _read(library: str, files: Sequence[str], overrides: Sequence[str]) -> dict[Any, Any]:
    """Return the sections and settings in ``files`` and ``overrides``, interpolations resolved."""
    for text in overrides:
        if text.startswith("~"):
            raise ConfigError(f"Cannot read the override {text!r}: leave the setting out instead.")
    place = files[0] if files else "the command line"
    try:
        read = [OmegaConf.load(path) for path in files]
        read.append(OmegaConf.from_dotlist([text.lstrip("+") for text in overrides]))
        settings = OmegaConf.to_container(OmegaConf.merge(*read), resolve=True)
    except OSError as error:
        raise ConfigError(f"--from {library}: cannot read {place}: {error.strerror or error}.") from error
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, AssertionError) as error:
        raise ConfigError(f"--from {library}: {place} does not hold readable settings: {first_line(error)}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"--from {library}: {place} is not a mapping of settings.")
    return settings


def _leaves(section: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _default(default: RunConfig, key: str) -> Any:
    return setting(default, key) if key in known_keys() else UNSET


# ---- SkyRL


def _same(section: str, here: str | None = None, **defaults: Any) -> list[Setting]:
    """Return settings with the same name in a section of theirs and of ours."""
    return [Setting(f"{section}.{name}", f"{here or section}.{name}", "", value) for name, value in defaults.items()]


def _without(reason: str, *names: str) -> list[Setting]:
    return [Setting(name, None, reason) for name in names]


def _list(value: Any, theirs: Theirs) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _files(value: Any, theirs: Theirs) -> list[str]:
    return [str(Path(path).expanduser()) if str(path).startswith("~") else path for path in _list(value, theirs)]


def _or_0(value: Any, theirs: Theirs) -> Any:
    return 0 if value is None or value < 0 else value


def _steps(value: Any, theirs: Theirs) -> Any:
    """Steps there are batches, here minibatches."""
    if _mode(theirs) != "fully_async" and value is not None:
        return int(value) * max(
            theirs["trainer.train_batch_size"] // max(theirs["trainer.policy_mini_batch_size"], 1), 1
        )
    return value


def _interval(value: Any, theirs: Theirs) -> int:
    return max(int(_steps(value, theirs)), 0)


def _mode(theirs: Theirs) -> str:
    return str(theirs.get("trainer.mode") or ("fully_async" if theirs["trainer.fully_async.enabled"] else "sync"))


def _asynchronous(value: Any, theirs: Theirs) -> Any:
    return value if _mode(theirs) == "fully_async" else UNSET


def _gae(value: Any, theirs: Theirs) -> Any:
    return value if theirs["trainer.algorithm.advantage_estimator"] == "gae" else UNSET


def _evaluated(value: Any, theirs: Theirs) -> Any:
    return value if theirs["trainer.eval_interval"] > 0 else UNSET


def _vllm(value: Any, theirs: Theirs) -> Any:
    return value if theirs[f"{_SKYRL_ENGINE}.backend"] == "vllm" else UNSET


def _ranks(model: str) -> Callable[[Any, Theirs], int]:
    names = (f"trainer.placement.{model}_num_nodes", f"trainer.placement.{model}_num_gpus_per_node")
    return lambda value, theirs: theirs[names[0]] * theirs[names[1]]


def _is_local(theirs: Theirs) -> bool:
    """Return whether the run is ``trainer.strategy=local`` here: given as such, or one GPU that engines and trainer share."""
    shared = theirs["trainer.placement.colocate_all"] and _ranks("policy")(None, theirs) == 1
    return bool(shared) or theirs["trainer.strategy"] == "local"


def _policy_ranks(value: Any, theirs: Theirs) -> Any:
    return UNSET if _is_local(theirs) else _ranks("policy")(value, theirs)


def _strategy(value: Any, theirs: Theirs) -> Any:
    return ("local" if _is_local(theirs) else "fsdp2") if value in ("fsdp", "fsdp2") else value


def _reference(value: Any, theirs: Theirs) -> Any:
    algorithm = "trainer.algorithm"
    if not (theirs[f"{algorithm}.use_kl_loss"] or theirs[f"{algorithm}.use_kl_in_reward"]) or _is_local(theirs):
        return UNSET
    return "colocated" if theirs["trainer.placement.colocate_policy_ref"] else "workers"


def _of_reference_workers(value: Any, theirs: Theirs) -> Any:
    return _ranks("ref")(None, theirs) if _reference(None, theirs) == "workers" else UNSET


def _micro_batch(value: Any, theirs: Theirs) -> int:
    if theirs["trainer.max_tokens_per_microbatch"] > 0:
        return int(theirs["trainer.max_tokens_per_microbatch"])
    longest = _input(None, theirs) + theirs["generator.sampling_params.max_generate_length"]
    return int(theirs["trainer.micro_train_batch_size_per_gpu"] * longest)


def _input(value: Any, theirs: Theirs) -> int:
    return int(theirs["generator.max_input_length"] or theirs["trainer.max_prompt_length"])


def _coefficient(use: str, name: str) -> Callable[[Any, Theirs], float]:
    return lambda value, theirs: theirs[f"trainer.algorithm.{name}"] if theirs[f"trainer.algorithm.{use}"] else 0.0


def _loss(value: Any, theirs: Theirs) -> Any:
    if value in ("dppo", "cross_entropy"):
        return Without(
            f"there is no loss {value} here; algorithms.md says which losses there are, and how to write DPPO"
        )
    return {"regular": "ppo_clip", "rollout_is": "importance_sampling"}.get(value, value)


def _for_loss(name: str) -> Callable[[Any, Theirs], Any]:
    return lambda value, theirs: value if theirs["trainer.algorithm.policy_loss_type"] == name else UNSET


def _clip(value: Any, theirs: Theirs) -> Any:
    return UNSET if value == 0.2 and theirs["trainer.algorithm.policy_loss_type"] != "gspo" else value


def _is_rollout_is(theirs: Theirs) -> bool:
    return bool(theirs["trainer.algorithm.policy_loss_type"] == "rollout_is")


def _proximal(value: Any, theirs: Theirs) -> Any:
    """SkyRL's old log-probs are of the policy at the beginning of a batch, also in its later minibatches."""
    minibatches = theirs["trainer.train_batch_size"] > theirs["trainer.policy_mini_batch_size"]
    return "arrival" if _mode(theirs) == "sync" and minibatches and not _is_local(theirs) else UNSET


def _weights(value: Any, theirs: Theirs) -> Any:
    if _is_rollout_is(theirs):
        return "icepop" if value is None else Without("rollout_is has weights already; they would be multiplied")
    # In a synchronous run, our weights stand in for SkyRL's ratio to the policy at the beginning of the batch.
    ratio_is_there = _mode(theirs) != "sync" or _proximal(None, theirs) == "arrival"
    return value if value is not None or ratio_is_there else UNSET


def _uncorrected(value: Any, theirs: Theirs) -> Any:
    return True if _weights(value, theirs) is None and not _rejections(None, theirs) else UNSET


def _icepop(name: str, sign: int) -> Callable[[Any, Theirs], Any]:
    return lambda value, theirs: 1 + sign * value if _is_rollout_is(theirs) else UNSET


def _rejections(value: Any, theirs: Theirs) -> list[dict[str, Any]]:
    prefix = "trainer.algorithm.off_policy_correction."
    bounds = {"token": "token_mask_is_threshold", "sequence_max": "outlier_token_is_threshold"}
    metric = theirs[f"{prefix}sequence_mask_metric"]
    if metric == "geometric":
        bounds["sequence_mean"] = "geo_mask"
    elif metric == "product":
        bounds["sequence_sum"] = "product_mask"
    rules = [
        {"level": level, "low": theirs[f"{prefix}{name}_low"], "high": theirs[f"{prefix}{name}_high"]}
        for level, name in bounds.items()
    ]
    return [{"statistic": "ratio", **rule} for rule in rules if rule["low"] is not None or rule["high"] is not None]


def _sampling_of_evaluation(name: str, here: str) -> Setting:
    def convert(value: Any, theirs: Theirs) -> Any:
        return UNSET if value == theirs[f"generator.sampling_params.{name}"] else _evaluated(value, theirs)

    default = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "top_k": -1}.get(name, UNSET)
    return Setting(
        f"generator.eval_sampling_params.{name}", f"trainer.eval.sampling_params.{here}", "", default, convert
    )


_SKYRL_ENGINE = "generator.inference_engine"
_CORRECTION = "trainer.algorithm.off_policy_correction"
_MEGATRON = "Megatron is not there; trainer.strategy=fsdp2 shards"
_VISION = "images are not supported"
_DEBUG = "the run folder, its report and its page show it"

_SKYRL: list[Setting] = [
    # The mode is the first line: SkyRL chooses it by the module that a script starts.
    Setting("trainer.mode", "trainer.mode", "there: the module that a script starts; of `main_async`: one_step_off"),
    Setting(
        "trainer.fully_async.enabled",
        "trainer.mode",
        "true: fully_async; false: sync",
        False,
        lambda value, theirs: _mode(theirs),
    ),
    # Data
    Setting("data.train_data", "data.train_data", "", ["~/data/gsm8k/train.parquet"], _files),
    Setting(
        "data.val_data",
        "trainer.eval.eval_data",
        "",
        ["~/data/gsm8k/validation.parquet"],
        lambda value, theirs: _evaluated(_files(value, theirs), theirs),
    ),
    *_without("data is read in the trainer's process, or with data.streaming when it is needed", "data.dataloader.*"),
    Setting("trainer.max_prompt_length", "generator.max_input_length", "", 512, _input),
    Setting("trainer.max_prompt_length", "data.on_long_prompt", "there: filter", UNSET, lambda value, theirs: "filter"),
    Setting("generator.max_input_length", "generator.max_input_length", "", None, _input),
    # Length of the run, batches
    *_same("trainer", epochs=1, update_epochs_per_batch=1, seed=42, policy_mini_batch_size=256),
    Setting("trainer.max_training_steps", "trainer.max_steps", "there batches, here minibatches", None, _steps),
    Setting(
        "trainer.train_batch_size",
        "trainer.train_batch_size",
        "sync only; the other modes train each minibatch when it is complete",
        1024,
        lambda value, theirs: value if _mode(theirs) == "sync" else UNSET,
    ),
    Setting(
        "trainer.train_batch_size",
        "trainer.algorithm.proximal_policy",
        "sync, several minibatches in a batch, engines on their own GPUs: arrival",
        UNSET,
        _proximal,
    ),
    Setting(
        "trainer.micro_train_batch_size_per_gpu",
        "trainer.micro_batch_tokens",
        "times the longest input and response",
        1,
        _micro_batch,
    ),
    Setting("trainer.max_tokens_per_microbatch", "trainer.micro_batch_tokens", "", -1, _micro_batch),
    *_without(
        "passes without gradients use trainer.micro_batch_tokens too", "trainer.micro_forward_batch_size_per_gpu"
    ),
    *_without("the critic trains on the minibatches of the policy", "trainer.critic_mini_batch_size"),
    Setting(
        "trainer.remove_microbatch_padding",
        "trainer.packing",
        "",
        True,
        lambda value, theirs: UNSET if value else False,
    ),
    *_without("each minibatch is scored before it trains", "trainer.recompute_old_logprobs_per_minibatch"),
    # Placement
    Setting("trainer.strategy", "trainer.strategy", "local on one shared GPU, else fsdp2", "fsdp", _strategy),
    Setting("trainer.strategy", "trainer.device", "there: always cuda", UNSET, lambda value, theirs: "cuda"),
    Setting(
        "trainer.strategy",
        "generator.inference_engine.device",
        "there: always cuda",
        UNSET,
        lambda value, theirs: "cuda",
    ),
    Setting(
        "trainer.placement.colocate_all",
        "trainer.placement.colocate_all",
        "on one GPU; several GPUs are not shared",
        True,
        lambda value, theirs: (
            value
            if not value or _is_local(theirs)
            else Without("engines and trainer share one GPU, not several: the engines need further GPUs")
        ),
    ),
    Setting(
        "trainer.placement.colocate_all",
        "generator.inference_engine.executor",
        "on a shared GPU process, else ray",
        UNSET,
        lambda value, theirs: "process" if _is_local(theirs) else "ray",
    ),
    Setting("trainer.placement.policy_num_nodes", "trainer.fsdp.num_workers", "nodes x GPUs", 1, _policy_ranks),
    Setting("trainer.placement.policy_num_gpus_per_node", "trainer.fsdp.num_workers", "", 1, _policy_ranks),
    *[
        Setting(
            f"trainer.placement.critic_{name}",
            "trainer.critic.fsdp.num_workers",
            "with advantage_estimator=gae",
            1,
            lambda value, theirs: _gae(_ranks("critic")(None, theirs), theirs),
        )
        for name in ("num_nodes", "num_gpus_per_node")
    ],
    Setting(
        "trainer.placement.colocate_policy_ref",
        "rollout.stages.reference.executor",
        "true: colocated; false: workers",
        True,
        _reference,
    ),
    *[
        Setting(
            f"trainer.placement.ref_{name}",
            "rollout.stages.reference.num_workers",
            "a colocated reference is in the policy's workers",
            1,
            _of_reference_workers,
        )
        for name in ("num_nodes", "num_gpus_per_node")
    ],
    # Policy
    Setting("trainer.policy.model.path", "trainer.policy.model.path", "", "Qwen/Qwen2.5-1.5B-Instruct"),
    *_same("trainer.policy.model.lora", rank=0, alpha=16, dropout=0.0, init_method="kaiming"),
    Setting(
        "trainer.policy.model.lora.target_modules",
        "trainer.policy.model.lora.target_modules",
        "a list here",
        "all-linear",
        _list,
    ),
    Setting(
        "trainer.policy.model.lora.exclude_modules",
        "trainer.policy.model.lora.exclude_modules",
        "a list here",
        None,
        _list,
    ),
    *_without(
        "the transport sends the adapter",
        "trainer.policy.model.lora.lora_sync_path",
        "trainer.policy.model.lora.max_loras",
        "trainer.policy.model.lora.max_cpu_loras",
    ),
    *_without("quantized training is not there", "trainer.policy.model.fake_int4_qat.*"),
    *_same(
        "trainer.policy.optimizer_config",
        lr=1e-6,
        adam_betas=[0.9, 0.999],
        weight_decay=0.01,
        max_grad_norm=1.0,
        num_warmup_steps=0,
    ),
    Setting(
        "trainer.policy.optimizer_config.scheduler",
        "trainer.policy.optimizer_config.scheduler",
        "",
        "constant_with_warmup",
        lambda value, theirs: "constant" if value == "constant_with_warmup" else value,
    ),
    *_without("colocate_all moves it, nothing else does", "trainer.policy.optimizer_config.offload_after_step"),
    Setting("trainer.policy.fsdp_config.cpu_offload", "trainer.fsdp.cpu_offload", "", False),
    Setting("trainer.policy.fsdp_config.reshard_after_forward", "trainer.fsdp.reshard_after_forward", "", True),
    Setting(
        "trainer.policy.fsdp_config.fsdp_size",
        "trainer.fsdp.shard_size",
        "-1: null",
        -1,
        lambda value, theirs: None if value < 0 else value,
    ),
    Setting("trainer.policy.sequence_parallel_size", "trainer.fsdp.sequence_parallel_size", "", 1),
    *_without(
        "each layer is wrapped; gradients are reduced in float32",
        "trainer.policy.fsdp_config.mixed_precision.*",
        "trainer.policy.fsdp_config.mixed_precision",
        "trainer.policy.fsdp_config.wrap_policy.*",
    ),
    Setting(
        "trainer.bf16",
        "trainer.policy.dtype",
        "true: bfloat16, with float32 copies in the optimizer",
        True,
        lambda value, theirs: "bfloat16" if value else "float32",
    ),
    Setting(
        "trainer.bf16",
        "trainer.critic.dtype",
        "the same, with advantage_estimator=gae",
        UNSET,
        lambda value, theirs: _gae("bfloat16" if value else "float32", theirs),
    ),
    Setting("trainer.gradient_checkpointing", "trainer.policy.gradient_checkpointing", "", True),
    Setting("trainer.gradient_checkpointing", "trainer.critic.gradient_checkpointing", "with gae", UNSET, _gae),
    *_without("it compiles the logits; trainer.policy.compile compiles the layers", "trainer.policy.use_torch_compile"),
    *_without("change the model folder's config.json", "trainer.policy.model_config_kwargs.*"),
    *_without(_VISION, "trainer.policy.language_model_only", "trainer.ref.language_model_only"),
    *_without(_MEGATRON, "trainer.policy.megatron_config.*", "trainer.ref.megatron_config.*", "trainer.mtp.*"),
    *_without(
        "the workers have no profiler",
        "trainer.policy.record_memory",
        "trainer.policy.torch_profiler_config.*",
    ),
    *_without("skyrl-train eval runs a policy without a trainer", "trainer.policy.inference_only_init"),
    # Critic and reference
    Setting("trainer.critic.model.path", "trainer.critic.model.path", "", None, _gae),
    *[
        Setting(f"trainer.critic.optimizer_config.{name}", f"trainer.critic.optimizer_config.{name}", "", default, _gae)
        for name, default in {
            "lr": 5e-6,
            "adam_betas": [0.9, 0.999],
            "weight_decay": 0.01,
            "max_grad_norm": 1.0,
            "num_warmup_steps": 0,
        }.items()
    ],
    Setting(
        "trainer.critic.optimizer_config.scheduler",
        "trainer.critic.optimizer_config.scheduler",
        "",
        "constant_with_warmup",
        lambda value, theirs: _gae("constant" if value == "constant_with_warmup" else value, theirs),
    ),
    Setting("trainer.critic.fsdp_config.cpu_offload", "trainer.critic.fsdp.cpu_offload", "", False, _gae),
    Setting("trainer.critic.sequence_parallel_size", "trainer.critic.fsdp.sequence_parallel_size", "", 1, _gae),
    *_without(
        "the critic is trained as a whole, sharded like the policy",
        "trainer.critic.model.*",
        "trainer.critic.fsdp_config.*",
        "trainer.critic.optimizer_config.offload_after_step",
        "trainer.critic.model_config_kwargs.*",
    ),
    *_without(
        "the reference is the policy that the run starts from", "trainer.ref.*", "trainer.update_ref_every_epoch"
    ),
    Setting(
        "trainer.ref.fsdp_config.cpu_offload",
        "rollout.stages.reference.cpu_offload",
        "",
        UNSET,
        lambda value, theirs: UNSET if _reference(None, theirs) is UNSET else value,
    ),
    # Algorithm
    *_same(
        "trainer.algorithm",
        advantage_estimator="grpo",
        grpo_norm_by_std=True,
        gamma=1.0,
        lambd=1.0,
        value_clip=0.2,
        clip_ratio_c=3.0,
        loss_reduction="token_mean",
        max_seq_len=None,
        zero_variance_filter=False,
        kl_estimator_type="k3",
    ),
    *_same("trainer.algorithm.kl_ctrl", type="fixed", kl_target=0.1, horizon=10000),
    Setting(
        "trainer.algorithm.use_kl_loss",
        "trainer.algorithm.kl_loss_coef",
        "false: 0",
        True,
        _coefficient("use_kl_loss", "kl_loss_coef"),
    ),
    Setting(
        "trainer.algorithm.kl_loss_coef",
        "trainer.algorithm.kl_loss_coef",
        "",
        0.001,
        _coefficient("use_kl_loss", "kl_loss_coef"),
    ),
    Setting(
        "trainer.algorithm.use_kl_in_reward",
        "trainer.algorithm.kl_reward_coef",
        "there: kl_loss_coef",
        False,
        _coefficient("use_kl_in_reward", "kl_loss_coef"),
    ),
    Setting(
        "trainer.algorithm.use_entropy_loss",
        "trainer.algorithm.entropy_coef",
        "false: 0",
        False,
        _coefficient("use_entropy_loss", "entropy_loss_coef"),
    ),
    Setting(
        "trainer.algorithm.entropy_loss_coef",
        "trainer.algorithm.entropy_coef",
        "",
        0.01,
        _coefficient("use_entropy_loss", "entropy_loss_coef"),
    ),
    Setting(
        "trainer.algorithm.advantage_batch_normalize",
        "trainer.algorithm.advantage_batch_normalize",
        "null here: with reinforce++ and gae",
        False,
        lambda value, theirs: (
            value
            if value or theirs["trainer.algorithm.advantage_estimator"] not in ("grpo", "rloo", "maxrl")
            else UNSET
        ),
    ),
    Setting(
        "trainer.algorithm.policy_loss_type",
        "trainer.algorithm.policy_loss_type",
        "regular: ppo_clip; rollout_is: importance_sampling with tis_ratio_type=icepop",
        "regular",
        _loss,
    ),
    Setting("trainer.algorithm.eps_clip_low", "trainer.algorithm.eps_clip_low", "", 0.2, _clip),
    Setting("trainer.algorithm.eps_clip_high", "trainer.algorithm.eps_clip_high", "", 0.2, _clip),
    Setting(
        "trainer.algorithm.eps_clip_low", f"{_CORRECTION}.icepop_ratio_low", "rollout_is", UNSET, _icepop("low", -1)
    ),
    Setting(
        "trainer.algorithm.eps_clip_high", f"{_CORRECTION}.icepop_ratio_high", "rollout_is", UNSET, _icepop("high", 1)
    ),
    *[
        Setting(f"trainer.algorithm.{loss}.{name}", f"trainer.algorithm.{loss}.{name}", "", default, _for_loss(loss))
        for loss, defaults in {
            "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
            "cispo": {"cispo_eps_clip_low": 0.0, "cispo_eps_clip_high": 5.0},
            "clip_cov": {"clip_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0},
            "kl_cov": {"kl_cov_frac": 0.2, "ppo_kl_coef": 1.0},
        }.items()
        for name, default in defaults.items()
    ],
    *_without("the ratio is to the proximal policy, and tis_ratio_type corrects the rest", "trainer.algorithm.cispo.*"),
    *_without("write it as importance_sampling with rejections; see algorithms.md", "trainer.algorithm.dppo.*"),
    Setting(
        f"{_CORRECTION}.tis_ratio_type", f"{_CORRECTION}.tis_ratio_type", "the default here: token", None, _weights
    ),
    Setting(f"{_CORRECTION}.tis_ratio_type", f"{_CORRECTION}.allow_uncorrected", "null: true", UNSET, _uncorrected),
    *_same(_CORRECTION, token_tis_ratio_clip_high=2.0, sequence_tis_ratio_clip_high=5.0),
    *[
        Setting(
            f"{_CORRECTION}.{name}", f"{_CORRECTION}.rejections", "a rule with statistic=ratio", default, _rejections
        )
        for name, default in {
            "sequence_mask_metric": None,
            "geo_mask_low": 0.99,
            "geo_mask_high": 1.01,
            "product_mask_low": 0.5,
            "product_mask_high": 2.0,
            "outlier_token_is_threshold_low": None,
            "outlier_token_is_threshold_high": None,
            "token_mask_is_threshold_low": None,
            "token_mask_is_threshold_high": None,
        }.items()
    ],
    *_without(
        "SkyRL replaced it by off_policy_correction", "trainer.algorithm.use_tis", "trainer.algorithm.tis_imp_ratio_cap"
    ),
    Setting(
        "trainer.algorithm.dynamic_sampling.type",
        "trainer.algorithm.dynamic_sampling",
        "null: none",
        None,
        lambda value, theirs: (
            "filter" if theirs["trainer.fully_async.sample_full_batch"] else "none" if value is None else value
        ),
    ),
    Setting(
        "trainer.fully_async.sample_full_batch",
        "trainer.algorithm.dynamic_sampling",
        "true: filter",
        False,
        lambda value, theirs: "filter" if value else theirs["trainer.algorithm.dynamic_sampling.type"] or "none",
    ),
    *_without("max_filtered_share stops a run that filters too much", "trainer.algorithm.dynamic_sampling.*"),
    *_without("rewards are compared exactly", "trainer.algorithm.zero_variance_filter_tol"),
    *_without("log-probs are taken at the sampling temperature", "trainer.algorithm.temperature"),
    *_without("the critic's head has no name", "trainer.algorithm.value_head_prefix"),
    # Asynchronous training
    Setting(
        "trainer.fully_async.max_staleness_steps",
        "trainer.fully_async.max_staleness_steps",
        "here it bounds the age of trained groups",
        4,
        _asynchronous,
    ),
    Setting(
        "trainer.fully_async.max_staleness_steps",
        "trainer.fully_async.generate_ahead_steps",
        "there it bounds the groups that are admitted",
        UNSET,
        _asynchronous,
    ),
    Setting(
        "trainer.fully_async.max_staleness_steps",
        "trainer.fully_async.staleness_policy",
        "there older groups are trained: accept",
        UNSET,
        lambda value, theirs: _asynchronous("accept", theirs),
    ),
    Setting(
        "trainer.fully_async.num_parallel_generation_workers",
        "trainer.fully_async.num_parallel_generation_workers",
        "",
        768,
        _asynchronous,
    ),
    Setting(
        "trainer.fully_async.clear_kv_cache_on_weight_sync",
        "generator.pause_mode",
        "true: recompute; false: keep",
        False,
        lambda value, theirs: "recompute" if value else "keep",
    ),
    *_without(
        "skyrl-train simulate runs a configuration in virtual time",
        "trainer.fully_async.simulate_training",
        "trainer.fully_async.simulate_training_step_seconds",
        "trainer.fully_async.simulate_weight_sync_seconds",
    ),
    # Generator
    Setting("generator.n_samples_per_prompt", "generator.n_samples_per_prompt", "", 5),
    Setting("generator.max_turns", "generator.max_turns", "", 1),
    Setting("generator.sampling_params.max_generate_length", "generator.sampling_params.max_tokens", "", 1024),
    *_same("generator.sampling_params", temperature=1.0, top_p=1.0, min_p=0.0, top_k=-1),
    Setting("generator.sampling_params.stop", "generator.sampling_params.stop", "", None, _list),
    *_without(
        "log-probs are always recorded", "generator.sampling_params.logprobs", "generator.eval_sampling_params.logprobs"
    ),
    *_without(
        "the sampled distribution must be the one that trains",
        "generator.sampling_params.repetition_penalty",
        "generator.sampling_params.additional_kwargs",
        "generator.sampling_params.additional_kwargs.*",
        "generator.eval_sampling_params.repetition_penalty",
        "generator.eval_sampling_params.additional_kwargs",
        "generator.eval_sampling_params.additional_kwargs.*",
    ),
    *[_sampling_of_evaluation(name, name) for name in ("temperature", "top_p", "min_p", "top_k")],
    _sampling_of_evaluation("max_generate_length", "max_tokens"),
    Setting(
        "generator.eval_sampling_params.stop",
        "trainer.eval.sampling_params.stop",
        "",
        UNSET,
        lambda value, theirs: _evaluated(_list(value, theirs), theirs),
    ),
    Setting("generator.eval_n_samples_per_prompt", "trainer.eval.n_samples_per_prompt", "", 1, _evaluated),
    Setting("generator.chat_template_kwargs.*", "generator.chat_template_kwargs.*"),
    Setting(
        "generator.chat_template.name_or_path",
        "generator.chat_template",
        "a file here",
        None,
        lambda value, theirs: (
            value
            if value is None or theirs.get("generator.chat_template.source") == "file"
            else Without("there are no templates by name; write it into a file: generator.chat_template=FILE")
        ),
    ),
    *_without("a template is always a file", "generator.chat_template.source"),
    Setting("generator.apply_overlong_filtering", "trainer.algorithm.overlong.filter", "", False),
    *_without("engines batch all requests that run", "generator.batched"),
    *_without("each turn is a message of its own", "generator.use_conversation_multi_turn"),
    *_without("the template ends a turn", "generator.append_eos_token_after_stop_str_in_multi_turn"),
    *_without("a reward function sees the stop reason of each sample", "generator.zero_reward_on_non_stop"),
    *_without("cached prefixes serve their own policy version only", "generator.use_cache_salt"),
    *_without(
        "the tokens of a trajectory are one sequence; your own generator may return several rows (is_last_step)",
        "generator.step_wise_trajectories",
        "generator.merge_stepwise_output",
    ),
    *_without(_VISION, "generator.vision_language_generator", f"{_SKYRL_ENGINE}.language_model_only"),
    # Engines
    Setting(
        f"{_SKYRL_ENGINE}.backend",
        f"{_SKYRL_ENGINE}.backend",
        "",
        "vllm",
        lambda value, theirs: value if theirs[f"{_SKYRL_ENGINE}.run_engines_locally"] else "vllm_remote",
    ),
    Setting(
        f"{_SKYRL_ENGINE}.run_engines_locally",
        f"{_SKYRL_ENGINE}.backend",
        "false: vllm_remote",
        True,
        lambda value, theirs: theirs[f"{_SKYRL_ENGINE}.backend"] if value else "vllm_remote",
    ),
    Setting(f"{_SKYRL_ENGINE}.external_server_urls", f"{_SKYRL_ENGINE}.remote_urls", "", None, _list),
    *_same(_SKYRL_ENGINE, num_engines=1, tensor_parallel_size=1, pipeline_parallel_size=1, max_num_seqs=1024),
    Setting(f"{_SKYRL_ENGINE}.model_dtype", f"{_SKYRL_ENGINE}.dtype", "", "bfloat16"),
    Setting(
        f"{_SKYRL_ENGINE}.weight_sync_backend",
        "generator.weight_transport",
        "nccl: null, which is cuda_ipc on a shared GPU, else shared_memory; gloo reaches other nodes",
        "nccl",
        lambda value, theirs: UNSET if value == "nccl" else value,
    ),
    Setting(f"{_SKYRL_ENGINE}.delta_weight_sync.sync_dir", "generator.weight_folder"),
    *_without(
        "generator.weight_transport_kwargs has the transport's own",
        f"{_SKYRL_ENGINE}.delta_weight_sync",
        f"{_SKYRL_ENGINE}.delta_weight_sync.*",
    ),
    Setting(
        f"{_SKYRL_ENGINE}.gpu_memory_utilization", f"{_SKYRL_ENGINE}.engine_args.gpu_memory_utilization", "", 0.8, _vllm
    ),
    Setting(
        f"{_SKYRL_ENGINE}.max_num_batched_tokens",
        f"{_SKYRL_ENGINE}.engine_args.max_num_batched_tokens",
        "",
        8192,
        _vllm,
    ),
    *[
        Setting(f"{_SKYRL_ENGINE}.{name}", f"{_SKYRL_ENGINE}.engine_args.{name}", "", UNSET, _vllm)
        for name in ("enforce_eager", "enable_prefix_caching", "enable_chunked_prefill", "fully_sharded_loras")
    ],
    Setting(f"{_SKYRL_ENGINE}.engine_init_kwargs.*", f"{_SKYRL_ENGINE}.engine_args.*"),
    Setting(f"{_SKYRL_ENGINE}.speculative_config.*", f"{_SKYRL_ENGINE}.engine_args.speculative_config.*"),
    *_without(
        "start several engines instead", f"{_SKYRL_ENGINE}.data_parallel_size", f"{_SKYRL_ENGINE}.expert_parallel_size"
    ),
    *_without(
        "the client routes requests itself",
        f"{_SKYRL_ENGINE}.external_proxy_url",
        f"{_SKYRL_ENGINE}.router_init_kwargs.*",
    ),
    *_without("prefill and decoding share an engine", f"{_SKYRL_ENGINE}.enable_pd", f"{_SKYRL_ENGINE}.num_prefill"),
    *_without("routing of experts is not replayed", f"{_SKYRL_ENGINE}.enable_return_routed_experts"),
    *_without("requests name the model `policy`", f"{_SKYRL_ENGINE}.served_model_name"),
    *_without(
        "it has no counterpart",
        f"{_SKYRL_ENGINE}.async_engine",
        f"{_SKYRL_ENGINE}.weight_transfer_threshold_cuda_ipc_GB",
        f"{_SKYRL_ENGINE}.vllm_v1_disable_multiproc",
        f"{_SKYRL_ENGINE}.enable_ray_prometheus_stats",
        f"{_SKYRL_ENGINE}.distributed_executor_backend",
        f"{_SKYRL_ENGINE}.offload_kv_for_weight_sync",
        f"{_SKYRL_ENGINE}.speculative_config",
    ),
    *_without(
        "set PYTORCH_CUDA_ALLOC_CONF in trainer.fsdp.environment and generator.inference_engine.environment",
        "trainer.use_expandable_segments",
        f"{_SKYRL_ENGINE}.use_expandable_segments",
    ),
    # Environment
    Setting("environment.env_class", "environment.env_class", "a name of skyrl-gym, or an import path", "gsm8k"),
    *[
        Setting(
            f"environment.skyrl_gym.{name}.*",
            "environment.kwargs.*",
            f"with env_class={name}",
            UNSET,
            lambda value, theirs, name=name: value if theirs["environment.env_class"] == name else UNSET,  # type: ignore[misc]
        )
        for name in ("text2sql", "llm_as_a_judge", "search")
    ],
    *_without("environments that block run in threads", "environment.skyrl_gym.max_env_workers"),
    # Evaluation
    Setting("trainer.eval_interval", "trainer.eval.interval", "there batches, here minibatches", 5, _interval),
    Setting("trainer.eval_before_train", "trainer.eval.before_train", "", True, _evaluated),
    Setting("trainer.eval_batch_size", "trainer.eval.max_parallel", "prompts at once", 1024, _evaluated),
    # Outputs
    Setting("trainer.run_name", "trainer.run_name"),
    Setting(
        "trainer.ckpt_path",
        "trainer.run_dir",
        "a folder: the run folder, which holds the checkpoints",
        UNSET,
        lambda value, theirs: UNSET if value is None or "://" in value else str(Path(value).expanduser()),
    ),
    Setting(
        "trainer.ckpt_path",
        "trainer.ckpt_path",
        "a URL",
        UNSET,
        lambda value, theirs: value if value is not None and "://" in value else UNSET,
    ),
    Setting("trainer.ckpt_interval", "trainer.ckpt_interval", "there batches, here minibatches", 10, _interval),
    Setting(
        "trainer.max_ckpts_to_keep",
        "trainer.max_ckpts_to_keep",
        "-1: a million",
        -1,
        lambda value, theirs: 1_000_000 if value < 0 else value,
    ),
    Setting("trainer.hf_save_interval", "trainer.hf_save_interval", "there batches, here minibatches", -1, _interval),
    Setting(
        "trainer.resume_mode",
        "trainer.resume",
        "null: never",
        "latest",
        lambda value, theirs: (
            Without("set trainer.run_dir to the run's folder; the same command resumes it")
            if value == "from_path"
            else "never"
            if value in (None, "none")
            else value
        ),
    ),
    *_without(
        "set trainer.run_dir to the run's folder; trainer.init_from takes its policy alone", "trainer.resume_path"
    ),
    Setting(
        "trainer.logger",
        "trainer.trackers",
        "console: none; the default here is tensorboard",
        UNSET,
        lambda value, theirs: [name for name in _list(value, theirs) if name != "console"],
    ),
    *_without("trackers take it from the environment: WANDB_PROJECT, ...", "trainer.project_name", "trainer.tags"),
    *_without("the run folder holds it", "trainer.export_path", "trainer.log_path"),
    *_without(
        _DEBUG,
        "trainer.dump_data_batch",
        "trainer.dump_eval_results",
        "trainer.print_example_interval",
        "trainer.log_example_interval",
        "trainer.num_logger_eval_samples",
        "trainer.num_logger_train_samples",
        "trainer.enable_ray_gpu_monitor",
    ),
    *_without(
        "it is chosen by the model and the device",
        "trainer.flash_attn",
        "trainer.sequence_parallel_backend",
        "trainer.gradient_checkpointing_use_reentrant",
        "trainer.disable_fast_tokenizer",
        "trainer.logprobs_chunk_size",
        "trainer.vocab_entropy_chunk_size",
        "trainer.vocab_entropy_chunk_memory_mb",
        "trainer.fused_lm_head_logprob",
        "trainer.fused_lm_head_logprob_backend",
    ),
]

_SKYRL_RENAMED = {
    "generator.num_inference_engines": f"{_SKYRL_ENGINE}.num_engines",
    "generator.inference_engine_tensor_parallel_size": f"{_SKYRL_ENGINE}.tensor_parallel_size",
    "generator.inference_engine_pipeline_parallel_size": f"{_SKYRL_ENGINE}.pipeline_parallel_size",
    **{
        f"generator.{name}": f"{_SKYRL_ENGINE}.{name}"
        for name in (
            "async_engine",
            "backend",
            "enforce_eager",
            "gpu_memory_utilization",
            "max_num_batched_tokens",
            "max_num_seqs",
            "model_dtype",
            "run_engines_locally",
            "weight_sync_backend",
        )
    },
    "trainer.use_sample_packing": "trainer.remove_microbatch_padding",
}


# ---- verl, TRL, prime-rl, AReaL: the settings that most scripts have


def _names(section: str, names: Mapping[str, str]) -> list[Setting]:
    return [Setting(f"{section}{name}", here) for name, here in names.items()]


def _mapped(values: Mapping[Any, Any]) -> Callable[[Any, Theirs], Any]:
    return lambda value, theirs: values.get(value, value)


_VERL = [
    *_names(
        "actor_rollout_ref.actor.",
        {
            "optim.lr": "trainer.policy.optimizer_config.lr",
            "optim.weight_decay": "trainer.policy.optimizer_config.weight_decay",
            "optim.betas": "trainer.policy.optimizer_config.adam_betas",
            "optim.lr_scheduler_type": "trainer.policy.optimizer_config.scheduler",
            "grad_clip": "trainer.policy.optimizer_config.max_grad_norm",
            "ppo_mini_batch_size": "trainer.policy_mini_batch_size",
            "ppo_epochs": "trainer.update_epochs_per_batch",
            "ppo_max_token_len_per_gpu": "trainer.micro_batch_tokens",
            "clip_ratio_low": "trainer.algorithm.eps_clip_low",
            "clip_ratio_high": "trainer.algorithm.eps_clip_high",
            "clip_ratio_c": "trainer.algorithm.clip_ratio_c",
            "entropy_coeff": "trainer.algorithm.entropy_coef",
            "fsdp_config.offload_policy": "trainer.fsdp.cpu_offload",
            "ulysses_sequence_parallel_size": "trainer.fsdp.sequence_parallel_size",
        },
    ),
    Setting(
        "actor_rollout_ref.actor.optim.lr_warmup_steps",
        "trainer.policy.optimizer_config.num_warmup_steps",
        "-1: 0",
        UNSET,
        _or_0,
    ),
    Setting(
        "actor_rollout_ref.actor.strategy",
        "trainer.strategy",
        "fsdp, fsdp2: fsdp2",
        UNSET,
        _mapped({"fsdp": "fsdp2"}),
    ),
    Setting(
        "actor_rollout_ref.actor.policy_loss.loss_mode",
        "trainer.algorithm.policy_loss_type",
        "vanilla: dual_clip",
        UNSET,
        _mapped({"vanilla": "dual_clip"}),
    ),
    Setting(
        "actor_rollout_ref.actor.loss_agg_mode",
        "trainer.algorithm.loss_reduction",
        "token-mean, seq-mean-token-mean, seq-mean-token-sum-norm",
        UNSET,
        _mapped(
            {
                "token-mean": "token_mean",
                "seq-mean-token-mean": "sequence_mean",
                "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
            }
        ),
    ),
    Setting(
        "actor_rollout_ref.actor.use_kl_loss",
        "trainer.algorithm.kl_loss_coef",
        "false: 0",
        UNSET,
        lambda value, theirs: theirs.get("actor_rollout_ref.actor.kl_loss_coef", 0.001) if value else 0.0,
    ),
    Setting(
        "actor_rollout_ref.actor.kl_loss_coef",
        "trainer.algorithm.kl_loss_coef",
        "with use_kl_loss",
        UNSET,
        lambda value, theirs: value if theirs.get("actor_rollout_ref.actor.use_kl_loss") else 0.0,
    ),
    Setting(
        "actor_rollout_ref.actor.kl_loss_type",
        "trainer.algorithm.kl_estimator_type",
        "low_var_kl: k3; mse: k2; kl: k1",
        UNSET,
        _mapped({"low_var_kl": "k3", "mse": "k2", "kl": "k1"}),
    ),
    *_names(
        "actor_rollout_ref.",
        {
            "model.path": "trainer.policy.model.path",
            "model.enable_gradient_checkpointing": "trainer.policy.gradient_checkpointing",
            "model.lora_rank": "trainer.policy.model.lora.rank",
            "model.lora_alpha": "trainer.policy.model.lora.alpha",
            "rollout.name": "generator.inference_engine.backend",
            "rollout.n": "generator.n_samples_per_prompt",
            "rollout.temperature": "generator.sampling_params.temperature",
            "rollout.top_p": "generator.sampling_params.top_p",
            "rollout.top_k": "generator.sampling_params.top_k",
            "rollout.tensor_model_parallel_size": "generator.inference_engine.tensor_parallel_size",
            "rollout.gpu_memory_utilization": "generator.inference_engine.engine_args.gpu_memory_utilization",
            "rollout.enforce_eager": "generator.inference_engine.engine_args.enforce_eager",
            "rollout.max_num_seqs": "generator.inference_engine.max_num_seqs",
            "rollout.max_model_len": "generator.inference_engine.max_model_len",
            "rollout.dtype": "generator.inference_engine.dtype",
            "rollout.multi_turn.max_assistant_turns": "generator.max_turns",
            "rollout.agent.num_workers": "rollout.num_actors",
            "rollout.val_kwargs.temperature": "trainer.eval.sampling_params.temperature",
            "rollout.val_kwargs.top_p": "trainer.eval.sampling_params.top_p",
            "rollout.val_kwargs.n": "trainer.eval.n_samples_per_prompt",
            "hybrid_engine": "trainer.placement.colocate_all",
        },
    ),
    Setting(
        "algorithm.adv_estimator",
        "trainer.algorithm.advantage_estimator",
        "reinforce_plus_plus: reinforce++",
        UNSET,
        _mapped({"reinforce_plus_plus": "reinforce++"}),
    ),
    *_names(
        "algorithm.",
        {
            "gamma": "trainer.algorithm.gamma",
            "lam": "trainer.algorithm.lambd",
            "norm_adv_by_std_in_grpo": "trainer.algorithm.grpo_norm_by_std",
        },
    ),
    Setting("data.train_files", "data.train_data", "", UNSET, _files),
    Setting("data.val_files", "trainer.eval.eval_data", "", UNSET, _files),
    *_names(
        "data.",
        {
            "prompt_key": "data.prompt_key",
            "train_batch_size": "trainer.train_batch_size",
            "max_prompt_length": "generator.max_input_length",
            "max_response_length": "generator.sampling_params.max_tokens",
        },
    ),
    Setting(
        "data.filter_overlong_prompts",
        "data.on_long_prompt",
        "true: filter",
        UNSET,
        lambda value, theirs: "filter" if value else UNSET,
    ),
    *_names(
        "trainer.",
        {
            "total_epochs": "trainer.epochs",
            "total_training_steps": "trainer.max_steps",
            "val_before_train": "trainer.eval.before_train",
            "default_local_dir": "trainer.run_dir",
            "experiment_name": "trainer.run_name",
            "max_actor_ckpt_to_keep": "trainer.max_ckpts_to_keep",
        },
    ),
    Setting("trainer.test_freq", "trainer.eval.interval", "-1: 0", UNSET, _or_0),
    Setting("trainer.save_freq", "trainer.ckpt_interval", "-1: 0", UNSET, _or_0),
    Setting(
        "trainer.resume_mode",
        "trainer.resume",
        "auto: latest; disable: never",
        UNSET,
        _mapped({"auto": "latest", "disable": "never"}),
    ),
    *[
        Setting(
            f"trainer.{name}",
            "trainer.fsdp.num_workers",
            "nodes x GPUs",
            UNSET,
            lambda value, theirs: theirs.get("trainer.nnodes", 1) * theirs.get("trainer.n_gpus_per_node", 8),
        )
        for name in ("nnodes", "n_gpus_per_node")
    ],
    Setting(
        "trainer.logger",
        "trainer.trackers",
        "console: none",
        UNSET,
        lambda value, theirs: [name for name in _list(value, theirs) if name != "console"],
    ),
    *_names(
        "async_training.",
        {
            "staleness_threshold": "trainer.fully_async.generate_ahead_steps",
            "trigger_parameter_sync_step": "trainer.fully_async.weight_sync_interval",
        },
    ),
    Setting(
        "async_training.partial_rollout",
        "generator.pause_mode",
        "true: keep; false: wait",
        UNSET,
        _mapped({True: "keep", False: "wait"}),
    ),
    *_without("trainer.fully_async.streaming_min_groups counts groups, not batches", "async_training.require_batches"),
    *_without("rollout.stages.reward.function takes a function `group -> list of numbers`", "custom_reward_function.*"),
    *_without(
        "trainer.micro_batch_tokens limits tokens, not sequences",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    ),
    *_without("prompts and responses are not padded", "actor_rollout_ref.model.use_remove_padding"),
    *_without(
        "passes without gradients use trainer.micro_batch_tokens too",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    ),
    *_without("trackers take it from the environment: WANDB_PROJECT, ...", "trainer.project_name"),
]

_TRL = [
    Setting("model", "trainer.policy.model.path", "an argument of the trainer"),
    *_names(
        "",
        {
            "num_generations": "generator.n_samples_per_prompt",
            "max_completion_length": "generator.sampling_params.max_tokens",
            "temperature": "generator.sampling_params.temperature",
            "top_p": "generator.sampling_params.top_p",
            "learning_rate": "trainer.policy.optimizer_config.lr",
            "weight_decay": "trainer.policy.optimizer_config.weight_decay",
            "max_grad_norm": "trainer.policy.optimizer_config.max_grad_norm",
            "lr_scheduler_type": "trainer.policy.optimizer_config.scheduler",
            "warmup_steps": "trainer.policy.optimizer_config.num_warmup_steps",
            "num_train_epochs": "trainer.epochs",
            "num_iterations": "trainer.update_epochs_per_batch",
            "beta": "trainer.algorithm.kl_loss_coef",
            "entropy_coef": "trainer.algorithm.entropy_coef",
            "mask_truncated_completions": "trainer.algorithm.overlong.filter",
            "seed": "trainer.seed",
            "gradient_checkpointing": "trainer.policy.gradient_checkpointing",
            "output_dir": "trainer.run_dir",
            "run_name": "trainer.run_name",
            "save_steps": "trainer.ckpt_interval",
            "save_total_limit": "trainer.max_ckpts_to_keep",
            "eval_steps": "trainer.eval.interval",
            "metric_for_best_model": "trainer.eval.best_metric",
            "chat_template_kwargs.*": "generator.chat_template_kwargs.*",
            "vllm_gpu_memory_utilization": "generator.inference_engine.engine_args.gpu_memory_utilization",
            "vllm_tensor_parallel_size": "generator.inference_engine.tensor_parallel_size",
            "vllm_max_model_length": "generator.inference_engine.max_model_len",
        },
    ),
    Setting("max_steps", "trainer.max_steps", "-1: null", UNSET, lambda value, theirs: None if value < 0 else value),
    Setting("top_k", "generator.sampling_params.top_k", "0: -1", UNSET, lambda value, theirs: value or -1),
    Setting("min_p", "generator.sampling_params.min_p", "None: 0", UNSET, lambda value, theirs: value or 0.0),
    Setting("epsilon", "trainer.algorithm.eps_clip_low"),
    Setting(
        "epsilon",
        "trainer.algorithm.eps_clip_high",
        "without epsilon_high",
        UNSET,
        lambda value, theirs: theirs.get("epsilon_high") or value,
    ),
    Setting("epsilon_high", "trainer.algorithm.eps_clip_high"),
    Setting(
        "loss_type",
        "trainer.algorithm.loss_reduction",
        "dapo: token_mean; grpo: sequence_mean; dr_grpo: seq_mean_token_sum_norm",
        UNSET,
        lambda value, theirs: {
            "dapo": "token_mean",
            "grpo": "sequence_mean",
            "dr_grpo": "seq_mean_token_sum_norm",
        }.get(value, Without(f"{value}: set trainer.algorithm.policy_loss_type and loss_reduction")),
    ),
    Setting(
        "importance_sampling_level",
        "trainer.algorithm.policy_loss_type",
        "token: ppo_clip; sequence: gspo",
        UNSET,
        _mapped({"token": "ppo_clip", "sequence": "gspo"}),
    ),
    Setting(
        "scale_rewards",
        "trainer.algorithm.grpo_norm_by_std",
        "group, true: true; none, false: false",
        UNSET,
        lambda value, theirs: {"group": True, True: True, "none": False, False: False}.get(
            value, Without("trainer.algorithm.advantage_batch_normalize divides by the deviation of a minibatch")
        ),
    ),
    Setting(
        "use_vllm",
        "generator.inference_engine.backend",
        "true: vllm; false: embedded",
        UNSET,
        _mapped({True: "vllm", False: "embedded"}),
    ),
    Setting("bf16", "trainer.policy.dtype", "true: bfloat16", UNSET, _mapped({True: "bfloat16", False: "float32"})),
    Setting(
        "report_to",
        "trainer.trackers",
        "none: []",
        UNSET,
        lambda value, theirs: [] if value == "none" else _list(value, theirs),
    ),
    *_without(
        "trainer.policy_mini_batch_size counts prompts per optimizer step, over all devices",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "generation_batch_size",
        "steps_per_generation",
    ),
    *_without("train(reward_fn=...) takes TRL's functions; see your_own_task.md", "reward_funcs"),
    *_without("add the rewards in one function", "reward_weights"),
    *_without("vLLM runs in separate processes, or as vllm_remote", "vllm_mode"),
]

_PRIME_RL = [
    *_names(
        "",
        {
            "max_steps": "trainer.max_steps",
            "model.name": "trainer.policy.model.path",
            "output_dir": "trainer.run_dir",
            "ckpt.interval": "trainer.ckpt_interval",
            "ckpt.keep_last": "trainer.max_ckpts_to_keep",
            "trainer.optim.lr": "trainer.policy.optimizer_config.lr",
            "trainer.optim.weight_decay": "trainer.policy.optimizer_config.weight_decay",
            "trainer.optim.max_norm": "trainer.policy.optimizer_config.max_grad_norm",
            "trainer.scheduler.type": "trainer.policy.optimizer_config.scheduler",
            "trainer.scheduler.warmup_steps": "trainer.policy.optimizer_config.num_warmup_steps",
            "trainer.model.lora.rank": "trainer.policy.model.lora.rank",
            "trainer.model.lora.alpha": "trainer.policy.model.lora.alpha",
            "trainer.model.lora.target_modules": "trainer.policy.model.lora.target_modules",
            "trainer.model.fsdp_cpu_offload": "trainer.fsdp.cpu_offload",
            "trainer.model.reshard_after_forward": "trainer.fsdp.reshard_after_forward",
            "orchestrator.train.sampling.temperature": "generator.sampling_params.temperature",
            "orchestrator.train.sampling.max_completion_tokens": "generator.sampling_params.max_tokens",
            "orchestrator.group_size": "generator.n_samples_per_prompt",
            "orchestrator.eval.interval": "trainer.eval.interval",
            "orchestrator.eval.group_size": "trainer.eval.n_samples_per_prompt",
            "deployment.num_train_gpus": "trainer.fsdp.num_workers",
            "seq_len": "generator.inference_engine.max_model_len",
        },
    ),
    Setting(
        "orchestrator.batch_size",
        "trainer.policy_mini_batch_size",
        "there: samples, here: groups",
        UNSET,
        lambda value, theirs: -(-value // theirs.get("orchestrator.group_size", 1)),
    ),
    Setting("orchestrator.max_off_policy_steps", "trainer.fully_async.max_staleness_steps"),
    Setting(
        "orchestrator.max_off_policy_steps",
        "trainer.fully_async.staleness_policy",
        "drop",
        UNSET,
        lambda value, theirs: "drop",
    ),
    Setting(
        "orchestrator.max_off_policy_steps", "trainer.mode", "fully_async", UNSET, lambda value, theirs: "fully_async"
    ),
    Setting("max_async_level", "trainer.fully_async.generate_ahead_steps", "earlier versions"),
    Setting(
        "orchestrator.train.filter_zero_advantages",
        "trainer.algorithm.dynamic_sampling",
        "true: filter",
        UNSET,
        _mapped({True: "filter", False: "none"}),
    ),
    Setting(
        "weight_broadcast.type",
        "generator.weight_transport",
        "filesystem: disk",
        UNSET,
        _mapped({"filesystem": "disk"}),
    ),
    *_without("environments of verifiers run as agents over HTTP; see agent_harness.md", "orchestrator.train.source"),
    *_without(
        "the loss is importance_sampling with a rejection by probability_difference; see algorithms.md",
        "trainer.loss.*",
    ),
    *_without("trackers take it from the environment: WANDB_PROJECT, ...", "monitors.*"),
]

_AREAL = _names(
    "rollout.",
    {
        "max_head_offpolicyness": "trainer.fully_async.generate_ahead_steps",
        "consumer_batch_size": "trainer.policy_mini_batch_size",
        "max_concurrent_rollouts": "trainer.fully_async.num_parallel_generation_workers",
    },
)

LIBRARIES: dict[str, Library] = {
    "skyrl": Library("SkyRL", "0.3.0", _SKYRL, _SKYRL_RENAMED),
    "verl": Library("verl", "0.9.1", _VERL),
    "trl": Library("TRL", "1.16.0", _TRL),
    "prime-rl": Library("prime-rl", "August 2026", _PRIME_RL),
    "areal": Library("AReaL", "1.0.4", _AREAL),
}
