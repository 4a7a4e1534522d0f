"""The gym generator against a client that answers from a script."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from kept_events import KeptEvents, assert_declared
from scripted import settle

from skyrl_train.config.schema import EnvironmentConfig, GeneratorConfig, InferenceEngineConfig, SamplingConfig
from skyrl_train.environments.base import Environment, EnvironmentStep
from skyrl_train.errors import ConfigError, EngineError, RolloutError
from skyrl_train.generators.gym import GymGenerator
from skyrl_train.generators.validation import to_samples
from skyrl_train.inference.chat import ChatRenderer
from skyrl_train.inference.interface import InferenceEngineInput, InferenceEngineOutput, SamplingParams
from skyrl_train.models.tiny import character_tokenizer
from skyrl_train.runtime.seeds import derive_seed
from skyrl_train.types import BatchMetadata, GeneratorInput, GeneratorOutput, TrajectoryID

TOKENIZER = character_tokenizer("0123456789?+-!=>abcdef")
EOS = TOKENIZER.eos_token_id


class ScriptedClient:
    """Answers a request's text with ``script(text, seed)``; a text without the final "." was cut off."""

    def __init__(self, script: Callable[[str, int | None], str]) -> None:
        self.script = script
        self.requests: list[InferenceEngineInput] = []
        self.events = KeptEvents()

    async def generate(self, engine_input: InferenceEngineInput) -> InferenceEngineOutput:
        self.requests.append(engine_input)
        await asyncio.sleep(0)
        prompt = list((engine_input["prompt_token_ids"] or [])[0])
        params = SamplingParams.parse(engine_input["sampling_params"])
        text = self.script(TOKENIZER.decode(prompt), params.seed or 0)
        ended = text.endswith(".")
        ids = encode(text.removesuffix(".")) + [EOS] * ended
        version = len(self.requests)
        return InferenceEngineOutput(
            responses=[text],
            response_ids=[ids],
            stop_reasons=["stop" if ended else "length"],
            response_logprobs=[[-0.5] * len(ids)],
            response_versions=[[version] * len(ids)],
        )


class Ledger(Environment):
    """Counts how many are open; what it does is in its extras."""

    open = 0

    def __init__(self, extras: Mapping[str, Any]) -> None:
        super().__init__(extras)
        type(self).open += 1

    def step(self, action: str) -> EnvironmentStep:
        self.extras.get("threads", set()).add(threading.current_thread())
        if self.extras.get("fails"):
            raise OSError("sandbox gone")
        return {
            "observations": self.extras.get("observations", []),
            "reward": 0.5,
            "done": self.extras.get("done", False),
            "postprocessed_action": self.extras.get("postprocessed_action"),
        }

    def end_early(self) -> float:
        return float(self.extras.get("for_the_rest", 0.0))

    def close(self) -> None:
        type(self).open -= 1

    def get_metrics(self) -> dict[str, Any]:
        return dict(self.extras.get("metrics", {}))


class QuickLedger(Ledger):
    is_blocking = False


class AsInSkyRL:
    """Shaped like skyrl-gym's environments, which count the turns themselves."""

    def __init__(self, env_config: Any, extras: Mapping[str, Any]) -> None:
        self.left = extras["max_turns"]

    def init(self, prompt: Any) -> tuple[Any, dict[str, Any]]:
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        self.left -= 1
        return {"observations": [{"role": "user", "content": "+"}], "reward": self.left, "done": self.left == 0}

    def close(self) -> None: ...

    def get_metrics(self) -> dict[str, Any]:
        return {"left": self.left}


LEDGER, QUICK = f"{__name__}:Ledger", f"{__name__}:QuickLedger"


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text)["input_ids"])


def batch(env_class: str, extras: list[dict[str, Any]], prompt: str = "?", **fields: Any) -> GeneratorInput:
    count = len(extras)
    given: dict[str, Any] = {
        "prompts": [[{"role": "user", "content": prompt}]] * count,
        "env_classes": [env_class] * count,
        "env_extras": extras,
        "sampling_params": None,
        "trajectory_ids": [TrajectoryID("p", repetition) for repetition in range(count)],
        "batch_metadata": BatchMetadata(1, "train", tuple(range(100, 100 + count))),
        **fields,
    }
    return GeneratorInput(**given)  # type: ignore[typeddict-item]


def generator(client: ScriptedClient, env_class: str, max_turns: int = 1, **config: Any) -> GymGenerator:
    config.setdefault("sampling_params", SamplingConfig(max_tokens=32))
    return GymGenerator(
        client,
        TOKENIZER,
        GeneratorConfig(max_turns=max_turns, **config),
        EnvironmentConfig(env_class=env_class),
        model_path="",
    )


async def play(script: Callable[[str, int | None], str], request: GeneratorInput, **config: Any) -> GeneratorOutput:
    output = await generator(ScriptedClient(script), request["env_classes"][0], **config).generate(request)
    to_samples(output, len(request["prompts"]))
    return output


async def test_one_turn_is_the_prompt_the_sampled_tokens_and_the_reward_on_the_last_of_them() -> None:
    output = await play(lambda text, seed: "ccc.", batch("run_length", [{"answer": "cccc"}], prompt="04c="))
    ((sample,),) = (sample.sequences for sample in to_samples(output, 1))
    assert sample.prompt_token_ids == encode("04c=")
    assert sample.response_ids == [*encode("ccc"), EOS]
    assert sample.loss_mask == [1, 1, 1, 1]
    assert sample.logprobs == [-0.5] * 4
    assert sample.versions == [1] * 4
    assert sample.rewards == [0.0, 0.0, 0.0, 0.75]
    assert sample.stop_reason == "stop"
    assert output["rollout_metrics"] == {
        "generate/turns": 1.0,
        "generate/response_tokens": 4.0,
        "generate/unfinished_episodes": 0.0,
        "generate/postprocessed_actions": 0.0,
        "environment/exact": 0.0,
    }


async def test_the_environment_is_told_that_an_answer_was_cut_off() -> None:
    output = await play(lambda text, seed: "cccc", batch("run_length", [{"answer": "cccc"}]))
    assert to_samples(output, 1)[0].reward == 0.5
    assert output["stop_reasons"] == ["length"]


async def test_several_turns_are_one_response_with_the_observations_masked_out() -> None:
    guesses = {"?": "4.", "?4+": "7.", "?4+7-": "6."}

    def script(text: str, seed: int | None) -> str:
        return guesses[text.replace("<eos>", "")]

    client = ScriptedClient(script)
    output = await generator(client, "guess_number", max_turns=4).generate(batch("guess_number", [{"number": 6}]))
    ((sample,),) = (sample.sequences for sample in to_samples(output, 1))
    assert TOKENIZER.decode(sample.response_ids) == "4<eos>+7<eos>-6<eos>"
    assert sample.loss_mask == [1, 1, 0, 1, 1, 0, 1, 1]
    assert sample.logprobs == [-0.5, -0.5, 0.0, -0.5, -0.5, 0.0, -0.5, -0.5]
    assert sample.versions == [1, 1, -1, 2, 2, -1, 3, 3]
    assert sample.rewards == [0.0] * 7 + [1.0]
    assert output["rollout_metrics"] is not None
    assert output["rollout_metrics"]["generate/turns"] == 3
    assert output["rollout_metrics"]["generate/response_tokens"] == 6
    whole = sample.prompt_token_ids + sample.response_ids
    for request in client.requests:
        (input_ids,) = request["prompt_token_ids"] or []
        assert list(input_ids) == whole[: len(input_ids)], "token in, token out"
    assert [request.get("priority") for request in client.requests] == [None, 1, 1], "the oldest version it is made of"


@pytest.mark.parametrize("env_class", [LEDGER, QUICK])
@pytest.mark.parametrize("fails", [False, True])
async def test_each_call_of_an_environment_is_recorded_under_its_sample(env_class: str, fails: bool) -> None:
    client = ScriptedClient(lambda text, seed: "ab.")
    request = batch(env_class, [{"fails": fails}], trajectory_ids=[TrajectoryID("p@7", 3)])
    running = generator(client, env_class).generate(request)
    if fails:
        with pytest.raises(RolloutError, match="sandbox gone"):
            await running
    else:
        await running
    events = client.events.of("environment")
    for event in events:
        assert_declared(event)
    methods = ("step", "end_early", "get_metrics", "close")
    ends = [("step", False)] if fails else [(method, True) for method in methods]
    assert [(event["call"], event["ok"]) for event in events] == [("make", True), ("init", True), *ends]
    assert {(event["session"], event["group"], event["sample"]) for event in events} == {("p@7_3", 7, 3)}


async def test_a_call_too_short_to_show_is_not_recorded() -> None:
    client = ScriptedClient(lambda text, seed: "ab.")
    client.events.now = lambda: 5.0
    await generator(client, QUICK).generate(batch(QUICK, [{}]))
    assert client.events.kept == []


async def test_each_turn_has_its_reward_on_its_own_last_token_and_max_turns_ends_it() -> None:
    extras = {"observations": [{"role": "user", "content": "!"}]}
    output = await play(lambda text, seed: "ab.", batch(QUICK, [extras]), max_turns=3)
    ((sample,),) = (sample.sequences for sample in to_samples(output, 1))
    assert sample.loss_mask == [1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1]
    assert [i for i, reward in enumerate(sample.rewards) if reward] == [2, 6, 10]
    assert sum(sample.rewards) == 1.5


async def test_each_turn_of_each_trajectory_has_its_own_seed_and_its_session() -> None:
    client = ScriptedClient(lambda text, seed: "a.")
    await generator(client, QUICK, max_turns=2).generate(batch(QUICK, [{}, {}]))
    asked = {(r["session_ids"][0], r["sampling_params"].seed) for r in client.requests}  # type: ignore[index]
    assert asked == {(f"p_{i}", derive_seed(100 + i, turn)) for i in range(2) for turn in range(2)}


async def test_without_seeds_the_request_keeps_its_own() -> None:
    client = ScriptedClient(lambda text, seed: "a.")
    request = batch(QUICK, [{}], sampling_params={"seed": 7}, batch_metadata=BatchMetadata(1, "eval"))
    await generator(client, QUICK).generate(request)
    assert client.requests[0]["sampling_params"].seed == 7  # type: ignore[index]


async def test_the_trajectories_of_a_group_run_at_once() -> None:
    waiting = 0
    everyone = asyncio.Event()

    class Together(ScriptedClient):
        async def generate(self, engine_input: InferenceEngineInput) -> InferenceEngineOutput:
            nonlocal waiting
            waiting += 1
            if waiting == 4:
                everyone.set()
            await asyncio.wait_for(everyone.wait(), 60)
            return await super().generate(engine_input)

    await generator(Together(lambda text, seed: "a."), QUICK).generate(batch(QUICK, [{}] * 4))


async def test_a_turn_samples_no_more_than_the_context_leaves() -> None:
    client = ScriptedClient(lambda text, seed: "a.")
    config = {
        "inference_engine": InferenceEngineConfig(max_model_len=6),
        "sampling_params": SamplingConfig(max_tokens=4, min_tokens=3),
    }
    output = await generator(client, QUICK, max_turns=9, **config).generate(batch(QUICK, [{}], prompt="12"))
    budgets = [(r["sampling_params"].max_tokens, r["sampling_params"].min_tokens) for r in client.requests]  # type: ignore[index]
    assert budgets == [(4, 3), (2, 2)], "inputs of 2 and 4 tokens; one of 6 leaves no room"
    assert output["stop_reasons"] == ["length"]


async def test_a_conversation_past_max_input_length_ends_with_length_on_a_sampled_token() -> None:
    extras = {"observations": [{"role": "user", "content": "!!!"}]}
    output = await play(lambda text, seed: "a.", batch(QUICK, [extras]), max_turns=9, max_input_length=8)
    ((sample,),) = (sample.sequences for sample in to_samples(output, 1))
    assert TOKENIZER.decode(sample.response_ids) == "a<eos>!!!a<eos>"
    assert sample.stop_reason == "length"
    assert output["rollout_metrics"] is not None and output["rollout_metrics"]["generate/unfinished_episodes"] == 1.0


async def test_observations_that_no_tokenizer_fits_into_the_context_are_not_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def extend(*_: Any) -> list[int]:
        raise AssertionError("encoded")

    monkeypatch.setattr(ChatRenderer, "extend", extend)
    extras = {"observations": [{"role": "user", "content": "!" * (128 * 8)}], "for_the_rest": 2.0}
    output = await play(lambda text, seed: "a.", batch(QUICK, [extras]), max_turns=9, max_input_length=8)
    assert output["stop_reasons"] == ["length"] and to_samples(output, 1)[0].reward == 2.5


async def test_episodes_that_the_turn_limit_ends_are_counted() -> None:
    extras = [{"observations": [{"role": "user", "content": "!"}]}, {"done": True}]
    output = await play(lambda text, seed: "a.", batch(QUICK, extras), max_turns=1)
    assert output["stop_reasons"] == ["stop", "stop"], "the last response itself was not cut off"
    assert output["rollout_metrics"] is not None and output["rollout_metrics"]["generate/unfinished_episodes"] == 0.5


@pytest.mark.parametrize(
    ("config", "done", "reward"),
    [
        ({"max_turns": 9, "max_input_length": 8}, False, 2.5),
        ({"max_turns": 2}, False, 2.5),
        ({"max_turns": 2}, True, 0.5),
    ],
    ids=["the context is full", "the last turn", "done"],
)
async def test_an_episode_that_ends_before_it_is_done_has_a_last_reward(
    config: dict[str, Any], done: bool, reward: float
) -> None:
    extras = {"observations": [{"role": "user", "content": "!!!"}], "for_the_rest": 2.0, "done": done}
    output = await play(lambda text, seed: "a.", batch(LEDGER, [extras]), **config)
    ((sample,),) = (sample.sequences for sample in to_samples(output, 1))
    assert sample.rewards[-1] == reward and sample.loss_mask[-1] == 1
    assert sum(sample.rewards) == (reward if done else 0.5 + reward)


@pytest.mark.parametrize("reward", [float("nan"), "high"])
async def test_a_last_reward_that_is_no_finite_number_fails_the_rollout(reward: Any) -> None:
    with pytest.raises(RolloutError, match=r"failed on prompt 'p': ValueError"):
        await play(lambda text, seed: "a.", batch(QUICK, [{"for_the_rest": reward}]))


async def test_a_prompt_that_does_not_fit_is_refused() -> None:
    with pytest.raises(RolloutError, match=r"'p' has 9 tokens, more than generator\.max_input_length=8"):
        await play(lambda text, seed: "a.", batch(QUICK, [{}], prompt="123456789"), max_input_length=8)
    assert QuickLedger.open == 0


async def test_a_rewritten_action_is_counted_and_the_sampled_tokens_kept() -> None:
    extras = [{"postprocessed_action": "b"}, {"postprocessed_action": "a"}, {}]
    output = await play(lambda text, seed: "a.", batch(QUICK, extras))
    assert output["rollout_metrics"] is not None
    assert output["rollout_metrics"]["generate/postprocessed_actions"] == pytest.approx(1 / 3)
    assert output["response_ids"] == [[*encode("a"), EOS]] * 3


async def test_environment_metrics_are_averaged_over_those_that_report_them() -> None:
    extras = [{"metrics": {"steps": 2, "note": "x", "solved": np.bool_(True)}}, {"metrics": {"solved": False}}]
    output = await play(lambda text, seed: "a.", batch(QUICK, extras))
    assert output["rollout_metrics"] is not None
    metrics = {k: v for k, v in output["rollout_metrics"].items() if k.startswith("environment/")}
    assert metrics == {"environment/steps": 2.0, "environment/solved": 0.5}


async def test_later_calls_use_the_threads_of_environments_that_have_ended() -> None:
    threads: set[threading.Thread] = set()
    of_ledger = generator(ScriptedClient(lambda text, seed: "a."), LEDGER)
    for _ in range(3):
        await of_ledger.generate(batch(LEDGER, [{"threads": threads}] * 4))
    assert len(threads) == 4
    await of_ledger.aclose()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()


@pytest.mark.parametrize("env_class", [LEDGER, QUICK])
async def test_one_failing_environment_fails_the_call_and_every_environment_is_closed(env_class: str) -> None:
    with pytest.raises(RolloutError, match="failed on prompt 'p': OSError: sandbox gone") as info:
        await play(lambda text, seed: "a.", batch(env_class, [{}, {"fails": True}, {}]), max_turns=50)
    assert isinstance(info.value.__cause__, OSError)
    cls = Ledger if env_class == LEDGER else QuickLedger
    while cls.open:
        await settle()  # threads of cancelled episodes close on their own


async def test_observations_that_cannot_be_rendered_name_their_environment() -> None:
    extras = {"observations": [{"role": "user", "content": "half of a pair: \ud83d"}]}
    with pytest.raises(RolloutError, match=r"environment '.*QuickLedger' on prompt 'p' .*half of a surrogate pair"):
        await play(lambda text, seed: "a.", batch(QUICK, [extras]), max_turns=2)


async def test_a_failing_client_is_not_the_environments_fault() -> None:
    def script(text: str, seed: int | None) -> str:
        raise EngineError("out of memory")

    with pytest.raises(EngineError, match="out of memory"):
        await play(script, batch(QUICK, [{}, {}]))
    assert QuickLedger.open == 0


async def test_cancelling_the_call_closes_its_environments() -> None:
    begun = asyncio.Event()

    class Stuck(ScriptedClient):
        async def generate(self, engine_input: InferenceEngineInput) -> InferenceEngineOutput:
            begun.set()
            return await asyncio.get_running_loop().create_future()

    call = asyncio.create_task(generator(Stuck(lambda text, seed: "a."), QUICK).generate(batch(QUICK, [{}, {}])))
    await begun.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert QuickLedger.open == 0


async def test_a_row_may_name_another_environment_than_the_run() -> None:
    client = ScriptedClient(lambda text, seed: "123.")
    request = batch("copy_digits", [{"answer": "123"}])
    output = await generator(client, "run_length").generate(request)
    assert to_samples(output, 1)[0].reward == 1.0


async def test_skyrl_gyms_own_environments_play_several_turns() -> None:
    pytest.importorskip("skyrl_gym")
    extras = {"reward_spec": {"ground_truth": "72"}, "extra_info": {"max_turns": 3}}
    output = await play(lambda text, seed: "7.", batch("skyrl_gym:gsm8k_multi_turn", [extras]), max_turns=3)
    assert output["rollout_metrics"] is not None
    assert output["rollout_metrics"]["environment/steps"] == 3
    assert math.isclose(to_samples(output, 1)[0].reward, 0.0)


async def test_a_row_names_the_runs_environment_of_skyrl_gym_by_its_plain_id_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skyrl_gym = pytest.importorskip("skyrl_gym")
    from skyrl_gym.envs.base_text_env import BaseTextEnv
    from skyrl_gym.envs.registration import EnvSpec

    class Scaled(BaseTextEnv):
        def __init__(self, env_config: Any, extras: Mapping[str, Any]) -> None:
            super().__init__()
            self.scale = env_config.scale

        def step(self, action: str) -> Any:
            return {"observations": [], "reward": self.scale, "done": True, "metadata": {}}

    monkeypatch.setitem(skyrl_gym.registry, "scaled", EnvSpec("scaled", Scaled))
    environment = EnvironmentConfig(env_class="skyrl_gym:scaled", kwargs={"scale": 2.5})
    client, config = (
        ScriptedClient(lambda text, seed: "a."),
        GeneratorConfig(sampling_params=SamplingConfig(max_tokens=32)),
    )
    made = GymGenerator(client, TOKENIZER, config, environment, model_path="")
    output = await made.generate(batch("scaled", [{}]))
    assert to_samples(output, 1)[0].reward == 2.5


def test_an_unknown_environment_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="Did you mean run_length"):
        generator(ScriptedClient(lambda text, seed: "a."), "runlength")


async def test_an_environment_of_skyrl_knows_how_many_turns_there_are() -> None:
    client = ScriptedClient(lambda text, seed: "1.")
    name = f"{__name__}:AsInSkyRL"
    extras = {"max_turns": 9}
    output = await generator(client, name, max_turns=3).generate(batch(name, [extras]))
    assert [reward for reward in output["rewards"][0] if reward] == [2, 1] and len(client.requests) == 3
    assert extras == {"max_turns": 9}
