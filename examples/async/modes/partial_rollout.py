"""The quickstart's task for a trainer and engines that share their devices.

Each step begins twice the groups that it trains. The unfinished ones are interrupted while the policy trains, and continue
under the new weights.

./uvw run examples/async/modes/partial_rollout.py [key=value ...]
"""

import sys

import skyrl_train

MODE = ["trainer.mode=partial_rollout", "trainer.run_name=partial-rollout"]
skyrl_train.train("quickstart", overrides=[*MODE, *sys.argv[1:]])
