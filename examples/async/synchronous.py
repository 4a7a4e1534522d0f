"""The quickstart's task with the synchronous trainer: one word of the configuration is another.

./uvw run examples/async/synchronous.py [key=value ...]
"""

import sys

from skyrl_train.entrypoints.train import main

sys.exit(main(["--config-name=quickstart", "trainer.mode=sync", "trainer.run_name=synchronous", *sys.argv[1:]]))
