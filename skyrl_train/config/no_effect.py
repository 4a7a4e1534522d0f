"""Settings that have no effect beside the others: warnings, because people sweep over settings.

Each warning names the settings, the reason, and how to make them count. A run with such settings does what it would do
without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from skyrl_train.config import derive
from skyrl_train.config.keys import changed
from skyrl_train.config.schema import (
    DynamicSampling,
    FSDPConfig,
    KlControlType,
    ProximalPolicy,
    RejectionLevel,
    RunConfig,
    TrainerMode,
    TrainingStrategy,
)

ALGORITHM = "trainer.algorithm"
CORRECTION = f"{ALGORITHM}.off_policy_correction"
CRITIC = "trainer.critic"
ENGINE = "generator.inference_engine"
EVAL = "trainer.eval"
FULLY_ASYNC = "trainer.fully_async"
LORA = "trainer.policy.model.lora"
REFERENCE = "rollout.stages.reference"
REWARD = "rollout.stages.reward"

# Settings of trainer.fsdp that also describe the workers of a reference policy.
_SHARED_WITH_REFERENCE_WORKERS = ("cpu_offload", "reshard_after_forward", "environment", "start_timeout_s")

# Settings of trainer.algorithm, and of its off_policy_correction, that some losses and weights of this library read. A user's
# function may read any of them.
_READ_BY_LOSSES = {
    "eps_clip_low": derive.CLIPPED_LOSSES,
    "eps_clip_high": derive.CLIPPED_LOSSES,
    "clip_ratio_c": ("dual_clip",),
    **{name: (name,) for name in ("cispo", "sapo", "clip_cov", "kl_cov")},
}
_LOSSES = {*derive.CLIPPED_LOSSES, "cispo", "sapo", "kl_cov", "importance_sampling"}
_READ_BY_WEIGHTS = {
    "token_tis_ratio_clip_high": ("token",),
    "sequence_tis_ratio_clip_high": ("sequence", "geometric"),
    "icepop_ratio_low": ("icepop",),
    "icepop_ratio_high": ("icepop",),
}
_WEIGHTS = {None, "token", "sequence", "geometric", "icepop"}

Warnings = Iterator[str]  # one per setting, or per group of settings, that has no effect in this configuration


def _schedule(config: RunConfig) -> Warnings:
    mode, minibatch = derive.trainer_mode(config.trainer.mode), config.trainer.policy_mini_batch_size
    asynchronous, batch = config.trainer.fully_async, config.trainer.train_batch_size
    if mode is not TrainerMode.sync and batch not in (None, minibatch):
        yield (
            f"trainer.train_batch_size={batch}, trainer.policy_mini_batch_size={minibatch}: trainer.mode={mode} trains each "
            "minibatch when it is complete and has no larger batch. Set both to the same number, or "
            "trainer.train_batch_size=null."
        )
    factor = config.trainer.partial_rollout.oversubmit_factor
    if mode is not TrainerMode.partial_rollout and changed(config.trainer.partial_rollout):
        yield (
            f"trainer.partial_rollout.oversubmit_factor={factor:g} with trainer.mode={mode}: partial rollouts alone use it. Set "
            "trainer.mode=partial_rollout, or leave it out."
        )
    if mode is not TrainerMode.fully_async:
        return
    bound, k, depth = (
        asynchronous.max_staleness_steps,
        asynchronous.weight_sync_interval,
        derive.largest_depth(config),
    )
    if bound < depth + k - 1:
        return  # an error
    if asynchronous.overlap_weight_sync and not derive.begins_during_weight_sync(config):
        yield (
            f"{FULLY_ASYNC}.overlap_weight_sync=true with generate_ahead_steps={depth:g}: the next step has nothing to train on "
            f"before the weight sync is over. Set generate_ahead_steps=1 and max_staleness_steps={max(bound, k)}, or "
            "overlap_weight_sync=false."
        )


def _loss(config: RunConfig) -> Warnings:
    algorithm, proximal = config.trainer.algorithm, config.rollout.stages.proximal
    executor = proximal.executor
    readers = {"device": ("process", "thread", "ray"), "ray_num_cpus": ("ray",), "ray_num_gpus": ("ray",)}
    for name in changed(proximal):
        if name in readers and executor not in readers[name]:
            yield (
                f"rollout.stages.proximal.{name} with executor={executor}, so nothing uses it. Set rollout.stages.proximal."
                f"executor={' or '.join(readers[name])}, or leave it out."
            )
    if executor != "trainer" and algorithm.proximal_policy is not ProximalPolicy.arrival:
        yield (
            f"rollout.stages.proximal.executor={executor} with {ALGORITHM}.proximal_policy={algorithm.proximal_policy}: only the "
            "log-probs of arriving groups come from a replica. Set proximal_policy=arrival, or executor=trainer."
        )
    # Only then is the ratio 1 for every token when the loss is computed.
    one_pass = config.trainer.update_epochs_per_batch == 1 and algorithm.proximal_policy is ProximalPolicy.step
    # In turns, or without lag, there is no other policy at the time when a group ends.
    arrival = derive.max_staleness_steps(config) > 0 and not config.trainer.placement.colocate_all
    remedy = f"Set trainer.update_epochs_per_batch=2{' or proximal_policy=arrival' * arrival}"
    if algorithm.policy_loss_type == "kl_cov" and one_pass:
        yield (
            f"{ALGORITHM}.policy_loss_type=kl_cov with one pass around the policy of the step: its penalty has no gradient "
            f"there, so it does nothing. {remedy}."
        )
    # The sections of clip_cov and kl_cov choose tokens by their covariance, and not by the ratio.
    bounds = [
        f"{ALGORITHM}.{name}"
        for name in changed(algorithm)
        if algorithm.policy_loss_type in _READ_BY_LOSSES.get(name, ()) and name not in ("clip_cov", "kl_cov")
    ]
    if bounds and one_pass:
        yield (
            f"{', '.join(bounds)} with one pass around the policy of the step: the ratio is 1 there, so no bound is reached. "
            f"{remedy}, or leave it out."
        )
    if algorithm.max_seq_len is not None and algorithm.loss_reduction in ("token_mean", "sequence_mean", "prompt_mean"):
        yield (
            f"{ALGORITHM}.max_seq_len={algorithm.max_seq_len} with loss_reduction={algorithm.loss_reduction}, which divides by "
            "no fixed length. Set max_seq_len=null, or loss_reduction=seq_mean_token_sum_norm."
        )
    overlong = algorithm.overlong
    if overlong.buffer_len == 0 and overlong.max_response_len is not None:
        yield (
            f"{ALGORITHM}.overlong.max_response_len={overlong.max_response_len} without a penalty, which alone uses it. Set "
            f"{ALGORITHM}.overlong.buffer_len, the last tokens over which the penalty grows, or leave max_response_len out."
        )
    # Agents and generators of the user have other limits on the tokens of a response.
    longest = config.generator.sampling_params.max_tokens * config.generator.max_turns
    begins = (overlong.max_response_len or 0) - overlong.buffer_len
    if overlong.buffer_len > 0 and config.generator.name == "gym" and begins >= longest:
        yield (
            f"{ALGORITHM}.overlong: the penalty begins after {begins} tokens, and a response of this run has at most {longest}. "
            f"Set {ALGORITHM}.overlong.max_response_len={longest}, and a buffer_len below it."
        )
    if overlong.buffer_len > 0 and overlong.penalty_factor == 0:
        yield (
            f"{ALGORITHM}.overlong.penalty_factor=0 makes a penalty of 0 over the last {overlong.buffer_len} tokens. Set it "
            "above 0, or overlong.buffer_len=0 for no penalty."
        )
    if algorithm.proximal_policy is ProximalPolicy.arrival and derive.max_staleness_steps(config) == 0:
        yield (
            f"{ALGORITHM}.proximal_policy=arrival with a staleness bound of 0: the policy does not change between a group's end "
            "and its step, so both are the same. Set proximal_policy=step."
        )
    if algorithm.kl_ctrl.type is KlControlType.adaptive and not derive.needs_reference(algorithm):
        yield (
            f"{ALGORITHM}.kl_ctrl.type=adaptive without a KL term: there is no coefficient to adapt. Set kl_loss_coef or "
            "kl_reward_coef to its initial value, or kl_ctrl.type=fixed."
        )


def _bounds(config: RunConfig) -> Warnings:
    """Parameters of losses and weights that the run does not have."""
    algorithm, correction = config.trainer.algorithm, config.trainer.algorithm.off_policy_correction
    for section, key, choice, chosen, readers, known in (
        (algorithm, ALGORITHM, "policy_loss_type", algorithm.policy_loss_type, _READ_BY_LOSSES, _LOSSES),
        (correction, CORRECTION, "tis_ratio_type", correction.tis_ratio_type, _READ_BY_WEIGHTS, _WEIGHTS),
    ):
        for name in changed(section):
            # Settings without an entry are read by all, or by something else.
            if chosen in known and name in readers and chosen not in readers[name]:
                yield (
                    f"{key}.{name} with {choice}={chosen}, which does not read it. Set {key}.{choice}="
                    f"{' or '.join(readers[name])}, or leave it out."
                )


def _shaping(config: RunConfig) -> Warnings:
    """Parameters of KL terms, filters and penalties that are off."""
    algorithm = config.trainer.algorithm
    estimates = derive.needs_reference(algorithm) or algorithm.policy_loss_type not in _LOSSES
    if "kl_estimator_type" in changed(algorithm) and not estimates:
        yield (
            f"{ALGORITHM}.kl_estimator_type={algorithm.kl_estimator_type} without a KL term: nothing is estimated. Set "
            f"{ALGORITHM}.kl_loss_coef or kl_reward_coef above 0, or leave it out."
        )
    unused = [f"{ALGORITHM}.kl_ctrl.{name}" for name in changed(algorithm.kl_ctrl)]
    if unused and algorithm.kl_ctrl.type is KlControlType.fixed:
        yield (
            f"{', '.join(unused)} with kl_ctrl.type=fixed, which adapts no coefficient. Set {ALGORITHM}.kl_ctrl.type=adaptive, "
            "or leave it out."
        )
    if "max_filtered_share" in changed(algorithm) and algorithm.dynamic_sampling is not DynamicSampling.filter:
        yield (
            f"{ALGORITHM}.max_filtered_share={algorithm.max_filtered_share} with dynamic_sampling={algorithm.dynamic_sampling}, "
            "which filters nothing. Set dynamic_sampling=filter, or leave it out."
        )
    if algorithm.zero_variance_filter and algorithm.dynamic_sampling is DynamicSampling.filter:
        yield (
            f"{ALGORITHM}.zero_variance_filter=true with dynamic_sampling=filter: no group without signal is left that it could "
            "mask. Leave one of them out."
        )
    if "penalty_factor" in changed(algorithm.overlong) and algorithm.overlong.buffer_len == 0:
        yield (
            f"{ALGORITHM}.overlong.penalty_factor={algorithm.overlong.penalty_factor:g} with overlong.buffer_len=0: there is no "
            "penalty. Set overlong.buffer_len, the last tokens over which it grows, or leave it out."
        )


def _advantages(config: RunConfig) -> Warnings:
    algorithm, estimator = config.trainer.algorithm, config.trainer.algorithm.advantage_estimator
    if algorithm.gamma != 1 and estimator in ("grpo", "rloo", "maxrl"):
        yield (
            f"{ALGORITHM}.gamma={algorithm.gamma} with advantage_estimator={estimator}, which gives all tokens of a response the "
            "same advantage and discounts nothing. Set gamma=1, or advantage_estimator=reinforce++ or gae."
        )
    if not algorithm.grpo_norm_by_std and estimator in ("rloo", "maxrl", "reinforce++", "gae"):
        yield (
            f"{ALGORITHM}.grpo_norm_by_std=false with advantage_estimator={estimator}, which has no such division in it. Leave "
            "it out, or set advantage_estimator=grpo."
        )
    if derive.needs_critic(algorithm):
        return
    unused = [f"{ALGORITHM}.{name}" for name in changed(algorithm) if name in ("lambd", "value_clip")]
    unused += [f"{CRITIC}.{name}" for name in changed(config.trainer.critic)]
    if unused:
        yield (
            f"{', '.join(unused)} with {ALGORITHM}.advantage_estimator={estimator}: nothing predicts values there, so nothing "
            "uses it. Set advantage_estimator=gae, or leave it out."
        )


def _correction(config: RunConfig) -> Warnings:
    algorithm, correction = config.trainer.algorithm, config.trainer.algorithm.off_policy_correction
    for index, rule in enumerate(correction.rejections):
        key = f"{CORRECTION}.rejections[{index}]"
        if rule.low is None and rule.high is None:
            yield f"{key} ({rule.statistic} by {rule.level}) has no bounds, so it rejects nothing. Set low, high, or both."
        if rule.statistic == "ratio" and rule.low is not None and rule.low < 0:
            yield f"{key}: low={rule.low} with statistic=ratio, which is above 0. Set it to 0.5, say, or to null."
    key = f"{CORRECTION}.baseline_without_rejected=true"
    if not correction.baseline_without_rejected:
        return
    if derive.needs_critic(algorithm):
        yield (
            f"{key} with advantage_estimator=gae: samples are compared with the critic's values, not with each other. Set it to "
            "false."
        )
    whole = any(rule.level is not RejectionLevel.token for rule in correction.rejections)
    if not whole and not algorithm.overlong.filter:
        yield (
            f"{key}, but nothing rejects whole samples. Add a rule with level=sequence_mean, sequence_sum or sequence_max, set "
            f"{ALGORITHM}.overlong.filter=true, or leave it out."
        )


def _training_workers(config: RunConfig) -> Warnings:
    trainer, critic = config.trainer, config.trainer.critic
    local, has_critic = trainer.strategy is TrainingStrategy.local, derive.needs_critic(trainer.algorithm)
    reference_workers = (
        derive.needs_reference(trainer.algorithm) and config.rollout.stages.reference.executor == "workers"
    )
    if not local and trainer.executor is not None:
        yield (
            f"trainer.executor={trainer.executor} with trainer.strategy={trainer.strategy}, which trains in Ray actors. Leave it "
            "out, or set trainer.strategy=local."
        )
    in_thread = derive.training_executor(trainer, config.generator.inference_engine) == "thread"
    if in_thread and trainer.max_restarts > 0 and not reference_workers:
        yield (
            f"trainer.max_restarts={trainer.max_restarts} with training in a thread: there is no training process that could "
            "die. Set trainer.max_restarts=0, trainer.executor=process, or trainer.strategy=fsdp2."
        )
    if trainer.tf32 and not derive.trains_on_gpus(config):
        yield "trainer.tf32=true without training on a GPU: a CPU has no TF32. Leave it out, or set trainer.device=cuda."
    if local:
        used = _SHARED_WITH_REFERENCE_WORKERS if reference_workers else ()
        unused = [f"trainer.fsdp.{name}" for name in changed(trainer.fsdp) if name not in used]
        unused += [f"{CRITIC}.fsdp.{name}" for name in changed(critic.fsdp)] if has_critic else []
        if unused:
            yield (
                f"{', '.join(unused)} with trainer.strategy=local: there are no training workers, so nothing uses it. Set "
                "trainer.strategy=fsdp2, or leave it out."
            )
        if has_critic and critic.placement == "colocated":
            yield (
                f"{CRITIC}.placement=colocated with trainer.strategy=local: there are no ranks that could hold it. Leave it "
                "out, or set trainer.strategy=fsdp2."
            )
        return
    yield from _unused_gpus(trainer.fsdp, trainer.device, "trainer.fsdp", "trainer.device")
    if derive.critic_is_colocated(trainer):
        if critic.device is not None:
            yield (
                f"{CRITIC}.device={critic.device} with {CRITIC}.placement=colocated: it computes on the policy's device. Set "
                f"{CRITIC}.device=null."
            )
        for name in changed(critic.fsdp):
            if name not in derive.COLOCATED_CRITIC_SETTINGS:
                yield (
                    f"{CRITIC}.fsdp.{name} with {CRITIC}.placement=colocated: its ranks are the policy's. Set "
                    f"trainer.fsdp.{name}, and leave it out."
                )
    elif has_critic:
        device = derive.critic_trainer(trainer).device
        yield from _unused_gpus(critic.fsdp, device, f"{CRITIC}.fsdp", f"{CRITIC}.device")


def _unused_gpus(fsdp: FSDPConfig, device: str, key: str, device_key: str) -> Warnings:
    if device == "cpu" and fsdp.ray_num_gpus:
        yield f"{key}.ray_num_gpus={fsdp.ray_num_gpus:g} with {device_key}=cpu: nothing uses them. Set {device_key}=cuda."


def _reference(config: RunConfig) -> Warnings:
    reference = config.rollout.stages.reference
    if not derive.needs_reference(config.trainer.algorithm):
        unused = [f"{REFERENCE}.{name}" for name in changed(reference)]
        if unused:
            yield (
                f"{', '.join(unused)} without a term that needs a reference policy, so nothing uses it. Set "
                f"{ALGORITHM}.kl_loss_coef or kl_reward_coef above 0, or leave it out."
            )
        return
    executor, sharded = reference.executor, reference.executor in ("workers", "colocated")
    users = {"num_workers": ("workers",), "ray_num_cpus": ("ray", "workers"), "ray_num_gpus": ("ray", "workers")}
    for name in changed(reference):
        if name in users and executor not in users[name]:
            yield (
                f"{REFERENCE}.{name} with {REFERENCE}.executor={executor}, so nothing uses it. Set {REFERENCE}.executor="
                f"{' or '.join(users[name])}, or leave it out."
            )
    if executor in ("ray", "workers") and derive.reference_device(config) == "cpu" and reference.ray_num_gpus > 0:
        yield (
            f"{REFERENCE}.ray_num_gpus={reference.ray_num_gpus:g} on cpu: nothing uses them. Set {REFERENCE}.device=cuda, or "
            f"{REFERENCE}.ray_num_gpus=0."
        )
    if reference.cpu_offload is not None and not sharded:
        yield (
            f"{REFERENCE}.cpu_offload with {REFERENCE}.executor={executor}: only sharded weights are moved when they are "
            f"needed. Set {REFERENCE}.cpu_offload=null, or {REFERENCE}.executor=workers."
        )
    if reference.max_parallel != 1 and sharded:
        yield (
            f"{REFERENCE}.max_parallel={reference.max_parallel} with {REFERENCE}.executor={executor}: the ranks do one thing at "
            f"a time. Set {REFERENCE}.max_parallel=1."
        )
    if reference.device is not None and executor == "colocated":
        yield (
            f"{REFERENCE}.device={reference.device} with {REFERENCE}.executor=colocated: it computes on the policy's device. Set "
            f"{REFERENCE}.device=null."
        )


def _rollouts(config: RunConfig) -> Warnings:
    reward, rollout = config.rollout.stages.reward, config.rollout
    unused = changed(reward)
    if unused and reward.function is None:
        yield (
            f"{', '.join(f'{REWARD}.{name}' for name in unused)} without {REWARD}.function, so nothing uses it. Name the "
            "function, as package.module:function or file.py:function, or leave it out."
        )
    elif reward.executor != "ray":
        yield from _ray_resources(REWARD, unused, f"{REWARD}.executor=ray")
    if rollout.num_actors == 0:
        yield from _ray_resources("rollout", changed(rollout), "rollout.num_actors above 0")
    evaluation = config.trainer.eval
    settings = {
        "before_train=true": evaluation.before_train,
        f"num_engines={evaluation.num_engines}": evaluation.num_engines > 0,
        f"best_metric={evaluation.best_metric}": evaluation.best_metric is not None,
        f"eval_data={evaluation.eval_data}": bool(evaluation.eval_data),
    }
    asked = next((setting for setting, given in settings.items() if given), None)
    if evaluation.interval == 0 and asked is not None:
        yield f"{EVAL}.{asked} without {EVAL}.interval: nothing is ever evaluated. Set the interval, in steps."


def _ray_resources(key: str, names: list[str], remedy: str) -> Warnings:
    for name in ("ray_num_cpus", "ray_num_gpus"):
        if name in names:
            yield f"{key}.{name} without Ray actors, so nothing uses it. Set {remedy}, or leave it out."


def _engines(config: RunConfig) -> Warnings:
    engine = config.generator.inference_engine
    built_in = engine.backend in derive.BACKENDS  # a user's own factory may read any setting
    if built_in and engine.backend != "vllm_remote" and engine.remote_urls:
        yield f"{ENGINE}.remote_urls belongs to {ENGINE}.backend=vllm_remote, not to {engine.backend!r}."
    if engine.backend == "vllm_remote" and engine.executor == "ray":
        yield f"{ENGINE}.executor=ray: a remote server runs where it was started; leave it out."
    if engine.backend == "vllm" and engine.executor == "thread":
        yield f"{ENGINE}.executor=thread is for the embedded engine; vLLM has its own processes: use process or ray."
    parallel = engine.tensor_parallel_size * engine.pipeline_parallel_size
    if engine.backend == "embedded" and parallel != 1:
        yield f"{ENGINE}: the embedded engine is not parallel; set its *_parallel_size to 1, or use backend=vllm."
    if built_in and engine.backend != "vllm" and engine.engine_args:
        yield f"{ENGINE}.engine_args belongs to {ENGINE}.backend=vllm, not to {engine.backend!r}."
    if built_in and engine.backend != "embedded" and engine.batch_invariant:
        yield f"{ENGINE}.batch_invariant belongs to {ENGINE}.backend=embedded, not to {engine.backend!r}. Leave it out."
    if engine.environment and (
        engine.backend == "vllm_remote" or (engine.backend == "embedded" and engine.executor != "ray")
    ):
        yield (
            f"{ENGINE}.environment belongs to {ENGINE}.backend=vllm and to engines in Ray actors. Set the variables where the "
            f"{'server' if engine.backend == 'vllm_remote' else 'command'} starts, or leave it out."
        )
    if built_in and engine.executor != "ray":
        yield from _ray_resources(ENGINE, changed(engine), f"{ENGINE}.executor=ray")
    if built_in and engine.devices is not None:
        if engine.backend != "vllm":
            yield f"{ENGINE}.devices belongs to {ENGINE}.backend=vllm, not to {engine.backend!r}."
        elif engine.executor == "ray":
            yield f"{ENGINE}.devices with {ENGINE}.executor=ray: Ray chooses the GPUs. Leave them out."
        elif engine.device == "cpu":
            yield f"{ENGINE}.devices with {ENGINE}.device=cpu: nothing uses them. Set {ENGINE}.device=cuda."
    name = derive.weight_transport(config)
    transport = derive.TRANSPORTS.get(name)
    if transport is not None and not transport.folder and config.generator.weight_folder is not None:
        fitting = [known for known, other in derive.TRANSPORTS.items() if other.folder]
        yield (
            f"generator.weight_folder with generator.weight_transport={name}: nothing is written there. Leave the folder out, or "
            f"set generator.weight_transport={' or '.join(fitting)}."
        )
    lora = config.trainer.policy.model.lora
    unused = [name for name in changed(lora) if name != "rank"]
    if lora.rank == 0 and unused:
        names = ", ".join(f"{LORA}.{name}" for name in unused)
        yield f"{names} with {LORA}.rank=0: there is no adapter. Set {LORA}.rank, or leave it out."


RULES: tuple[Callable[[RunConfig], Warnings], ...] = (
    _schedule,
    _loss,
    _bounds,
    _shaping,
    _advantages,
    _correction,
    _training_workers,
    _reference,
    _rollouts,
    _engines,
)
