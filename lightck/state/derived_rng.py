"""Random states that are not drawn and not saved, but follow from a key: the same key gives the same states.

A rank whose pool was lost takes the checkpoint of another rank. It must not draw the random numbers of that rank. If it
is killed and does so again, it must draw the same ones as the first time.
"""

from __future__ import annotations

import random
from hashlib import blake2b

import numpy as np
import torch

from lightck.state.rng import RngState


def derived(like: RngState, key: bytes) -> RngState:
    """Return the states that follow from ``key``, of the generators that ``like`` has. A device that this machine lacks
    is left out, as when a state is restored."""
    kind = getattr(np.random, like.numpy["bit_generator"])
    return RngState(
        random.Random(_seed(key, "python")).getstate(),
        np.random.RandomState(kind(_seed(key, "numpy"))).get_state(legacy=False),
        torch.Generator().manual_seed(_seed(key, "torch")).get_state(),
        tuple((index, _of_device(key, index)) for index, _ in like.cuda if index < torch.cuda.device_count()),
    )


def _of_device(key: bytes, index: int) -> torch.Tensor:
    return torch.Generator(f"cuda:{index}").manual_seed(_seed(key, f"cuda:{index}")).get_state()


def _seed(key: bytes, generator: str) -> int:
    """Return a seed of 63 bits for one generator."""
    digest = blake2b(key, digest_size=8, person=generator.encode()).digest()
    return int.from_bytes(digest, "little") >> 1
