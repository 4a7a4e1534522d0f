"""The training command beside a thread that draws from the generators which all threads of a process share."""

from __future__ import annotations

import random
import sys
import threading

import numpy as np
import torch

from skyrl_train.entrypoints.command_line import main


def draw_until(ended: threading.Event) -> None:
    while not ended.wait(1e-4):  # often, and without taking half of the processor
        random.random()
        np.random.random()
        torch.rand(1)


if __name__ == "__main__":
    sys.setswitchinterval(1e-5)  # so that it draws in the middle of whatever else runs
    ended = threading.Event()
    drawing = threading.Thread(target=draw_until, args=(ended,))
    drawing.start()
    try:
        code = main(["train", *sys.argv[1:]])
    finally:
        ended.set()
        drawing.join()
    sys.exit(code)
