"""The quickstart's task with streaming minibatches: a step trains on its first groups while the last ones are generated.

It still makes one optimizer step, with the same gradient.

./uvw run examples/async/modes/streaming_minibatches.py [key=value ...]
"""

import sys

import skyrl_train

MODE = ["trainer.fully_async.streaming_min_groups=4", "trainer.run_name=streaming"]
skyrl_train.train("quickstart", overrides=[*MODE, *sys.argv[1:]])
