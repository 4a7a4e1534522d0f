"""The head's Triton kernels, which Triton interprets on a CPU, give what the plain operations give."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
def test_kernels_give_the_sums_and_gradients_of_plain_operations() -> None:
    # Triton reads the variable when it is imported first, and then interprets the kernels of the whole process.
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    script = Path(__file__).with_name("interpreted_head_kernels.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3", "cases"]
