"""A custom generator: it asks the client for tokens and rewards them. It does not use the gym.

    ./uvw run examples/async/custom_generator.py [key=value ...]

The task is to write different letters: each new letter counts, each repeated one does not.
"""

import asyncio
import sys

import skyrl_train
from skyrl_train import GeneratorInput, GeneratorInterface, GeneratorOutput, InferenceEngineClient


class DistinctLetters(GeneratorInterface):
    """Rewards the share of distinct letters in an answer of at most six."""

    # The trainer passes the arguments that are named here: client, tokenizer, generator_config, ...
    def __init__(self, client: InferenceEngineClient) -> None:
        self.client = client

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        prompt = [3]  # any tokens; a conversation goes into "prompts" instead
        params = [{"max_tokens": 6, "seed": seed} for seed in input_batch["batch_metadata"].seeds]
        sampled = await asyncio.gather(
            *(self.client.generate({"prompt_token_ids": [prompt], "sampling_params": p}) for p in params)
        )
        answers = [output["response_ids"][0] for output in sampled]
        return {
            "prompt_token_ids": [prompt] * len(answers),
            "response_ids": answers,
            "rewards": [len(set(answer)) / 6 for answer in answers],
            "loss_masks": [[1] * len(answer) for answer in answers],
            "stop_reasons": [output["stop_reasons"][0] for output in sampled],
            "rollout_metrics": None,
            "rollout_logprobs": [output["response_logprobs"][0] for output in sampled],
            "rollout_versions": [output["response_versions"][0] for output in sampled],
            "trajectory_ids": input_batch["trajectory_ids"],
            "is_last_step": None,
        }


if __name__ == "__main__":
    settings = ["trainer.run_name=custom_generator", "trainer.max_steps=100", *sys.argv[1:]]
    skyrl_train.train("quickstart", generator=DistinctLetters, overrides=settings)
