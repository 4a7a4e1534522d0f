"""The quickstart's task with streaming minibatches: a step trains on its first groups while the last ones are generated, and
makes one optimizer step with the same gradient.

./uvw run examples/async/modes/streaming_minibatches.py [key=value ...]
"""

import sys

from skyrl_train.entrypoints.train import main

MODE = ["trainer.fully_async.streaming_min_groups=4", "trainer.run_name=streaming"]
sys.exit(main(["--config-name=quickstart", *MODE, *sys.argv[1:]]))
