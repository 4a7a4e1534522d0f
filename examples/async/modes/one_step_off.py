"""The quickstart's task, one step off: a batch is generated while the policy trains on the one before; weights change in between.

./uvw run examples/async/modes/one_step_off.py [key=value ...]
"""

import sys

from skyrl_train.entrypoints.train import main

MODE = ["trainer.mode=one_step_off", "trainer.run_name=one-step-off"]
sys.exit(main(["--config-name=quickstart", *MODE, *sys.argv[1:]]))
