"""Learns run-length expansion ("07c=" -> "ccccccc") from random weights, fully asynchronously.

./uvw run examples/async/quickstart.py [key=value ...]
"""

import sys

from skyrl_train.entrypoints.train import main

sys.exit(main(["--config-name=quickstart", *sys.argv[1:]]))
