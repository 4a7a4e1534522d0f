"""``python -m skyrl_train``: the command ``skyrl-train``."""

import sys

from skyrl_train.entrypoints.command_line import main

if __name__ == "__main__":
    sys.exit(main())
