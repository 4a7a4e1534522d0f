"""The quickstart's task, one step off-policy: the next batch is generated while the policy trains on the last one.

./uvw run examples/async/modes/one_step_off.py [key=value ...]
"""

import sys

import skyrl_train

MODE = ["trainer.mode=one_step_off", "trainer.run_name=one-step-off"]
skyrl_train.train("quickstart", overrides=[*MODE, *sys.argv[1:]])
