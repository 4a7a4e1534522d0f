"""The quickstart's task for a trainer and engines that share their devices: twice the groups are begun, the unfinished ones
are interrupted while the policy trains, and go on under the new weights.

./uvw run examples/async/modes/partial_rollout.py [key=value ...]
"""

import sys

from skyrl_train.entrypoints.train import main

MODE = ["trainer.mode=partial_rollout", "trainer.run_name=partial-rollout"]
sys.exit(main(["--config-name=quickstart", *MODE, *sys.argv[1:]]))
