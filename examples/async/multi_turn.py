"""Learns to guess a number from "higher" and "lower" over several turns, fully asynchronously.

./uvw run examples/async/multi_turn.py [key=value ...]
"""

import sys

import skyrl_train

skyrl_train.train("guess_number", overrides=sys.argv[1:])
