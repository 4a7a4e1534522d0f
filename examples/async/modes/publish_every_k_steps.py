"""The quickstart's task with a publication after every fourth step: several minibatches per policy version, as verl's
``trigger_parameter_sync_step`` has it.

./uvw run examples/async/modes/publish_every_k_steps.py [key=value ...]
"""

import sys

from skyrl_train.entrypoints.train import main

MODE = [
    "trainer.fully_async.sync_every_steps=4",
    "trainer.fully_async.max_staleness_steps=6",
    "trainer.run_name=publish-every-k",
]
sys.exit(main(["--config-name=quickstart", *MODE, *sys.argv[1:]]))
