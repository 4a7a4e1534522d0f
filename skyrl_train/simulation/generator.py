"""A modelled generator: one turn of a drawn length per sample, through the real client."""

from __future__ import annotations

from skyrl_train.concurrency import gather_or_cancel
from skyrl_train.generators.base import (
    GenerationClient,
    GeneratorInput,
    GeneratorInterface,
    GeneratorOutput,
    TrajectoryID,
)
from skyrl_train.inference.interface import InferenceEngineInput, InferenceEngineOutput
from skyrl_train.inference.randomness import mix
from skyrl_train.simulation.lengths import Lengths

_PROMPT = [5]


class ModelledGenerator(GeneratorInterface):
    """Sample ``i`` of the group with ordinal ``o`` has ``lengths[o * n + i]`` tokens. Rewards are noise: nothing learns."""

    def __init__(self, client: GenerationClient, lengths: Lengths) -> None:
        self._client = client
        self._lengths = lengths

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        trajectories = input_batch["trajectory_ids"]
        outputs = await gather_or_cancel(self._sample(each, len(trajectories)) for each in trajectories)
        ids = [output["response_ids"][0] for output in outputs]
        return GeneratorOutput(
            prompt_token_ids=[_PROMPT] * len(ids),
            response_ids=ids,
            rewards=[float(mix(seed) % 2) for seed in input_batch["batch_metadata"].seeds],
            loss_masks=[[1] * len(response) for response in ids],
            stop_reasons=[output["stop_reasons"][0] for output in outputs],
            rollout_metrics=None,
            rollout_logprobs=[output["response_logprobs"][0] for output in outputs],
            rollout_versions=[output["response_versions"][0] for output in outputs],
            trajectory_ids=trajectories,
            is_last_step=None,
        )

    async def _sample(self, trajectory: TrajectoryID, samples: int) -> InferenceEngineOutput:
        length = self._lengths[ordinal_of(trajectory) * samples + trajectory.repetition_id]
        return await self._client.generate(
            InferenceEngineInput(
                prompt_token_ids=[_PROMPT],
                sampling_params={"max_tokens": length, "ignore_eos": True},
                session_ids=[trajectory.to_string()],
                detokenize=False,  # modelled tokens mean nothing
            )
        )


def ordinal_of(trajectory: TrajectoryID) -> int:
    """The ordinal of a trajectory's group, which the runner writes behind the prompt's uid."""
    return int(trajectory.instance_id.rpartition("@")[2])
