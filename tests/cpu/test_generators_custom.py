"""A generator of your own: 20 lines against the client, with nothing of the gym. The documentation shows this one."""

from __future__ import annotations

from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.generators.validation import to_samples
from skyrl_train.inference.client import RequestClient
from skyrl_train.inference.interface import InferenceEngineInput, InferenceEngineOutput
from skyrl_train.types import BatchMetadata, GeneratorInput, GeneratorOutput, TrajectoryID


class ShortAnswers(GeneratorInterface):
    """Asks once and rewards brevity."""

    def __init__(self, client: RequestClient) -> None:
        self.client = client

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        prompts = [[int(digit) for digit in prompt[0]["content"]] for prompt in input_batch["prompts"]]
        sampled = await self.client.generate(
            {"prompt_token_ids": prompts, "sampling_params": input_batch["sampling_params"]}
        )
        responses = sampled["response_ids"]
        return {
            "prompt_token_ids": prompts,
            "response_ids": responses,
            "rewards": [1.0 / len(response) for response in responses],
            "loss_masks": [[1] * len(response) for response in responses],
            "stop_reasons": sampled["stop_reasons"],
            "rollout_metrics": None,
            "rollout_logprobs": sampled["response_logprobs"],
            "rollout_versions": sampled["response_versions"],
            "trajectory_ids": input_batch["trajectory_ids"],
            "is_last_step": None,
        }


class EchoClient:
    async def generate(self, engine_input: InferenceEngineInput) -> InferenceEngineOutput:
        ids = [list(prompt) for prompt in engine_input["prompt_token_ids"] or []]
        return {
            "responses": ["" for _ in ids],
            "response_ids": ids,
            "stop_reasons": ["stop" for _ in ids],
            "response_logprobs": [[-1.0] * len(row) for row in ids],
            "response_versions": [[3] * len(row) for row in ids],
        }


async def test_a_single_turn_generator_needs_nothing_but_the_client() -> None:
    output = await ShortAnswers(EchoClient()).generate(
        {
            "prompts": [[{"role": "user", "content": text}] for text in ("12", "1234")],
            "env_classes": ["", ""],
            "env_extras": [{}, {}],
            "sampling_params": {"max_tokens": 8},
            "trajectory_ids": [TrajectoryID("a", 0), TrajectoryID("b", 0)],
            "batch_metadata": BatchMetadata(global_step=1, training_phase="train"),
        }
    )
    assert [sample.rewards for sample in to_samples(output, expected=2)] == [[0.0, 0.5], [0.0, 0.0, 0.0, 0.25]]
