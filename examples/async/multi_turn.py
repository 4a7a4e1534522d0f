"""Learns to guess a number from "higher" and "lower" over several turns, fully asynchronously.

./uvw run examples/async/multi_turn.py [key=value ...]
"""

import sys

from skyrl_train.entrypoints.train import main

sys.exit(main(["--config-name=guess_number", *sys.argv[1:]]))
