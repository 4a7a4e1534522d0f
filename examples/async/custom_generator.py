"""A generator of your own: it asks the client for tokens and says what they are worth. Nothing of the gym is used.

    ./uvw run examples/async/custom_generator.py [key=value ...]

The task: write different letters; each one that has not been there before counts, each repeated one does not.
"""

import asyncio
import sys
from pathlib import Path

from skyrl_train.entrypoints.train import main
from skyrl_train.generators.base import GenerationClient, GeneratorInput, GeneratorInterface, GeneratorOutput


class DistinctLetters(GeneratorInterface):
    """Rewards the share of distinct letters in an answer of at most six."""

    def __init__(
        self, client: GenerationClient
    ) -> None:  # name what you need: client, tokenizer, generator_config, ...
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
    name = f"generator.name={Path(__file__).resolve()}:DistinctLetters"
    sys.exit(
        main(
            [
                "--config-name=quickstart",
                name,
                "trainer.run_name=custom_generator",
                "trainer.max_steps=100",
                *sys.argv[1:],
            ]
        )
    )
