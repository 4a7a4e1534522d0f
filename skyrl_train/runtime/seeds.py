"""Seeds as pure functions, so that a sample does not depend on when or where it runs.

``derive_seed`` uses the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
SEED_BITS = 62  # seeds fit a signed 64-bit integer, with room to add a token count


def derive_seed(*parts: int) -> int:
    """Hash integers to a seed in ``[0, 2**62)``. Order matters; seeds of neighbouring integers are unrelated."""
    state = 0
    for part in parts:
        x = ((state ^ (part & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        state = x ^ (x >> 31)
    return state >> (64 - SEED_BITS)


def segment_seed(request_seed: int, sampled_tokens: int) -> int:
    """Return the seed of the segment that continues a request after ``sampled_tokens`` tokens.

    An engine that draws token ``i`` of a segment from ``segment seed + i`` alone, as the embedded engine does, samples the same
    tokens whether or not the request was interrupted.
    """
    return request_seed + sampled_tokens
