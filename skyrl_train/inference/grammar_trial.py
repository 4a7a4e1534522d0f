"""Compiles the grammar on its standard input and prints what is wrong with it. Run as a separate program.

No limit of the library ends every grammar that explodes: the intersection of twenty patterns takes hours. The kernel ends this
process instead, after ``CPU_S`` seconds of work or at ``MEMORY_BYTES``.
"""

import resource
import sys

from llguidance import LLMatcher

CPU_S = 1
MEMORY_BYTES = 2**31

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    sys.stdout.buffer.write(LLMatcher.validate_grammar(sys.stdin.buffer.read().decode()).encode())
