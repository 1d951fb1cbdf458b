"""Random numbers by counter: the number of (seed, stream, epoch, sample) is a pure function of those four.

No generator holds state, so the order in which images are prepared, the number of workers and the point where a trial
is resumed cannot change a draw, and one call draws for a whole batch. The mixing step is splitmix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), chained over the counters.
"""

from collections.abc import Iterable
from enum import IntEnum
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Counter = int | NDArray[np.integer]

_MASK = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Stream(IntEnum):
    """The purpose of a draw. The numbers are part of every result: never reuse or renumber one."""

    ORDER = 1
    CROP_SIZE = 2
    CROP_SHAPE = 3
    CROP_TOP = 4
    CROP_LEFT = 5
    FLIP = 6
    RANDAUGMENT_OP = 7
    RANDAUGMENT_SIGN = 8
    ERASE = 9
    ERASE_SIZE = 10
    ERASE_SHAPE = 11
    ERASE_TOP = 12
    ERASE_LEFT = 13
    ERASE_NOISE = 14
    MIX_KIND = 15
    MIX_LAMBDA = 16
    MIX_TOP = 17
    MIX_LEFT = 18
    RANDAUGMENT_FIRES = 19
    RANDAUGMENT_NOISE = 20
    CUTOUT_TOP = 21
    CUTOUT_LEFT = 22
    MASK_SIZE = 40
    PHOTOMETRIC = 41
    VIEW = 42
    VIEW_COLOR = 43
    CAPTION = 48
    PATCH_MASK = 50
    CORRUPTION = 64  # what is not training starts here


def bits(seed: int, stream: Stream, *counters: Counter) -> NDArray[np.uint64]:
    """64 random bits for each element of the broadcast counters (for instance epoch, sample indices (B,))."""
    state: int | NDArray[np.uint64] = _mix_int(seed & _MASK)
    for counter in (int(stream), *counters):
        if isinstance(state, int) and isinstance(counter, int):
            state = _mix_int(state + counter & _MASK)
        else:
            unsigned = np.asarray(counter & _MASK if isinstance(counter, int) else counter).astype(np.uint64)
            state = _mix(np.asarray(state, dtype=np.uint64) + unsigned)
    return np.asarray(state, dtype=np.uint64)


def uniform(seed: int, stream: Stream, *counters: Counter) -> NDArray[np.float64]:
    """A number in [0, 1), a multiple of 2**-53, for each element of the broadcast counters."""
    return (bits(seed, stream, *counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(seed: int, epoch: int, n: int) -> NDArray[np.int64]:
    """The order (n,) in which epoch `epoch` visits n samples."""
    return np.argsort(bits(seed, Stream.ORDER, epoch, np.arange(n)), kind="stable")


def text_bits(seed: int, purpose: str, texts: Iterable[str]) -> NDArray[np.uint64]:
    """Return 64 random bits (n,) for each name, such as a file's; surrogates from undecodable names are allowed."""
    start = f"{seed}\0{purpose}\0".encode()
    messages = (start + text.encode("utf-8", "surrogateescape") for text in texts)
    return np.frombuffer(b"".join(blake2b(message, digest_size=8).digest() for message in messages), "<u8")


def text_order(seed: int, purpose: str, texts: Iterable[str]) -> NDArray[np.int64]:
    """Return the order (n,) that the bits of the names draw; equal names keep theirs."""
    return np.argsort(text_bits(seed, purpose, texts), kind="stable")


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = state + np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    return z ^ (z >> np.uint64(31))


def _mix_int(state: int) -> int:
    """_mix for one number: counters that a whole batch shares are mixed without the cost of an array."""
    z = state + _GOLDEN & _MASK
    z = (z ^ (z >> 30)) * _FIRST & _MASK
    z = (z ^ (z >> 27)) * _SECOND & _MASK
    return z ^ (z >> 31)
