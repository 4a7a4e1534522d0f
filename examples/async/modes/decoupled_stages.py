"""The quickstart's task in decoupled stages.

As soon as a group is generated, the reward function below scores it in a separate process, and a frozen copy of the first
policy in another process adds the log-probs for a KL term.

./uvw run examples/async/modes/decoupled_stages.py [key=value ...]
"""

import sys

import skyrl_train
from skyrl_train.rollout.stages.reward import GroupToReward


def reward(group: GroupToReward) -> list[float]:
    """Return for each sample the share of correct positions, halved if the answer did not end by itself."""
    target = group.env_extras["answer"]
    rewards = []
    for sample in group.samples:
        right = sum(a == b for a, b in zip(sample.text, target, strict=False)) / max(len(sample.text), len(target))
        rewards.append(right / 2 if sample.stop_reason == "length" else right)
    return rewards


STAGES = [
    "rollout.stages.reward.executor=process",
    "rollout.stages.reward.max_parallel=1",
    "trainer.algorithm.kl_loss_coef=0.01",
    "rollout.stages.reference.executor=process",
    "trainer.run_name=decoupled-stages",
]

if __name__ == "__main__":  # the reward's process imports this file, and must not train
    skyrl_train.train("quickstart", reward_fn=reward, overrides=[*STAGES, *sys.argv[1:]])
