"""The quickstart's task with the synchronous trainer: only ``trainer.mode`` differs.

./uvw run examples/async/synchronous.py [key=value ...]
"""

import sys

import skyrl_train

MODE = ["trainer.mode=sync", "trainer.run_name=synchronous"]
skyrl_train.train("quickstart", overrides=[*MODE, *sys.argv[1:]])
