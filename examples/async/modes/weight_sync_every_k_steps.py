"""The quickstart's task with a weight sync after every fourth step: several minibatches per policy version (verl's
``trigger_parameter_sync_step``).

./uvw run examples/async/modes/weight_sync_every_k_steps.py [key=value ...]
"""

import sys

import skyrl_train

MODE = [
    "trainer.fully_async.weight_sync_interval=4",
    "trainer.fully_async.max_staleness_steps=6",
    "trainer.run_name=sync-every-k",
]
skyrl_train.train("quickstart", overrides=[*MODE, *sys.argv[1:]])
