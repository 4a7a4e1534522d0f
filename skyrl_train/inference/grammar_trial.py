"""Compiles the grammar on its standard input, computes its first mask and prints what is wrong. Run as a separate program.

No limit of the library ends every grammar that explodes: the intersection of twenty patterns takes hours, and the first mask of
a million letters seconds, for which all requests of an engine would wait. The kernel ends this process instead, after ``CPU_S``
seconds of work or at ``MEMORY_BYTES``.
"""

import re
import resource
import sys
import time

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

CPU_S = 1
MASK_S = 0.2  # of work for the first mask. With the vocabulary of a model it takes two to three times as long.
MEMORY_BYTES = 2**31
# Limits of one grammar, so that it cannot stall the other requests: by the library's figures about 20 ms to begin, and 20 ms for
# one token.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
_MARK = "<[256]>"  # a token of the bytes' vocabulary that is no text


def problem_of(text: str) -> str:
    """Return what is wrong with a grammar; empty if it can be compiled."""
    if problem := LLMatcher.validate_grammar(text):
        return problem
    # The vocabulary of bytes is enough, and read in milliseconds. It has no tokens of a model.
    matcher = LLMatcher(LLTokenizer("byte"), re.sub(r"<\[\d+\]>", _MARK, text), log_level=0, limits=LIMITS)
    begun = time.process_time()
    if not matcher.is_error():
        matcher.compute_bitmask()
    if not matcher.is_error() and time.process_time() - begun > MASK_S:
        return f"its first mask takes more than {MASK_S} s. Make the grammar simpler."
    return str(matcher.get_error())


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    sys.stdout.buffer.write(problem_of(sys.stdin.buffer.read().decode()).encode())
