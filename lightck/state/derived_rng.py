"""Random states that are not drawn and not saved, but follow from a key: the same key gives the same states.

A rank whose pool was lost takes the checkpoint of another rank. It must not draw the random numbers of that rank. If it
is killed and takes the checkpoint again, it must draw the same numbers as the first time.

If a checkpoint is loaded into another number of ranks, their states follow from the key and from the states that the
script has set. So ranks that the script seeds equally (those of one tensor parallel group, which must drop the same
elements) stay equal, and ranks that it seeds differently stay different.
"""

from __future__ import annotations

import random
from hashlib import blake2b

import numpy as np
import torch

from lightck.state.rng import RngState


def derive_states(like: RngState, key: bytes, script: RngState | None = None) -> RngState:
    """Return the states that follow from ``key``, of the generators that ``like`` has. A device that this machine lacks
    is left out, as when a state is restored. ``script``: the states that the script has set; None: they do not
    count."""
    kind = getattr(np.random, like.numpy["bit_generator"])
    seeds = _Seeds(key, script)
    return RngState(
        random.Random(seeds.seed_for("python")).getstate(),
        np.random.RandomState(kind(seeds.seed_for("numpy"))).get_state(legacy=False),
        torch.Generator().manual_seed(seeds.seed_for("torch")).get_state(),
        tuple((index, _of_device(seeds, index)) for index, _ in like.cuda if index < torch.cuda.device_count()),
    )


def _of_device(seeds: _Seeds, index: int) -> torch.Tensor:
    return torch.Generator(f"cuda:{index}").manual_seed(seeds.seed_for(f"cuda:{index}")).get_state()


class _Seeds:
    """Derives a seed for each generator."""

    def __init__(self, key: bytes, script: RngState | None) -> None:
        self._key = key
        self._of_script: dict[str, bytes] = {}
        """Name of a generator -> its state in the script."""
        if script is not None:
            numpy = script.numpy
            self._of_script = {
                "python": repr(script.python).encode(),
                "numpy": repr([numpy["bit_generator"], _plain(numpy["state"]), numpy["gauss"]]).encode(),
                "torch": script.torch.numpy().tobytes(),
                **{f"cuda:{index}": state.numpy().tobytes() for index, state in script.cuda},
            }

    def seed_for(self, generator: str) -> int:
        """Return a seed of 63 bits for one generator."""
        digest = blake2b(self._key, digest_size=8, person=generator.encode())
        digest.update(self._of_script.get(generator, b""))
        return int.from_bytes(digest.digest(), "little") >> 1


def _plain(state: object) -> object:
    """Return the state of a bit generator of numpy with all its numbers. (``repr`` of an array leaves some out.)"""
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in sorted(state.items())}
    return state.tolist() if isinstance(state, np.ndarray) else state
