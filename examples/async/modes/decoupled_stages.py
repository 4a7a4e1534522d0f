"""The quickstart's task in decoupled stages: as soon as a group is generated, the reward function below scores it in a
process of its own, and a frozen copy of the first policy, in another process, adds the log-probs for a KL term.

./uvw run examples/async/modes/decoupled_stages.py [key=value ...]
"""

import sys
from pathlib import Path

from skyrl_train.rollout.reward_function import GroupToReward


def reward(group: GroupToReward) -> list[float]:
    """For each sample the share of positions that are right, and half of that where the answer did not end by itself."""
    target = group.env_extras["answer"]
    rewards = []
    for sample in group.samples:
        right = sum(a == b for a, b in zip(sample.text, target, strict=False)) / max(len(sample.text), len(target))
        rewards.append(right / 2 if sample.stop_reason == "length" else right)
    return rewards


STAGES = [
    f"rollout.stages.reward.function={Path(__file__).resolve()}:reward",
    "rollout.stages.reward.placement=process",
    "rollout.stages.reward.max_parallel=1",
    "trainer.algorithm.kl_loss_coef=0.01",
    "rollout.stages.reference.placement=process",
    "trainer.run_name=decoupled-stages",
]

# The reward's process imports this file too, and is not to train.
if __name__ == "__main__":
    from skyrl_train.entrypoints.train import main

    sys.exit(main(["--config-name=quickstart", *STAGES, *sys.argv[1:]]))
