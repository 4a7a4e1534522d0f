"""Learns run-length expansion ("07c=" -> "ccccccc") from random weights, fully asynchronously.

./uvw run examples/async/quickstart.py [key=value ...]
"""

import sys

import skyrl_train

skyrl_train.train("quickstart", overrides=sys.argv[1:])
