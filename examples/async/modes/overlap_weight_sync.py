"""The quickstart's task with overlapped weight syncs: the next step begins once the weights are copied, before the engines
serve them. The quickstart does this by default, because it sets ``generate_ahead_steps``; with ``=false`` it waits.

./uvw run examples/async/modes/overlap_weight_sync.py [key=value ...]
"""

import sys

import skyrl_train

MODE = ["trainer.fully_async.overlap_weight_sync=true", "trainer.run_name=overlap"]
skyrl_train.train("quickstart", overrides=[*MODE, *sys.argv[1:]])
