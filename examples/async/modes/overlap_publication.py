"""The quickstart's task with publications beside training: the next step begins when the weights are copied, not when they
are served.

./uvw run examples/async/modes/overlap_publication.py [key=value ...]
"""

import sys

from skyrl_train.entrypoints.train import main

MODE = ["trainer.fully_async.overlap_publication=true", "trainer.run_name=overlap"]
sys.exit(main(["--config-name=quickstart", *MODE, *sys.argv[1:]]))
