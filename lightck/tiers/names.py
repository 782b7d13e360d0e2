"""The names of what lies in a tier.

A tier is a folder, or a prefix of an object store. Below its root lie:

    CLAIM/claim.json                   what a training wrote when it claimed the tier
    CLAIM/RANK/steps/STEP-NONCE.json   the manifest of one checkpoint of one rank; it is written last
    CLAIM/RANK/data/HASH-NONCE         an object: bytes of tensors, named by their SHA-256

``CLAIM`` is ``000007-9f3a61c2``, ``RANK`` is ``rank-00000-of-00002``, ``STEP`` has twelve digits, and ``NONCE`` has
eight random hexadecimal digits, which one attempt to send one checkpoint uses. So no name is ever written twice with
different bytes, not even by a request that a store carries out after its sender was killed. Names that do not have
these forms are ignored, so that no name in a tier ever becomes a path of something else.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_CLAIM = r"(\d{6,18})-([0-9a-f]{8})"
_RANK = r"rank-(\d{5,9})-of-(\d{5,9})"
_CLAIM_FILE = re.compile(rf"{_CLAIM}/claim\.json")
_MANIFEST = re.compile(rf"{_CLAIM}/{_RANK}/steps/(\d{{12,19}})-([0-9a-f]{{8}})\.json")
_OBJECT = re.compile(rf"{_CLAIM}/{_RANK}/data/([0-9a-f]{{64}})-([0-9a-f]{{8}})")


class Claim(NamedTuple):
    """One training's right to write to a tier, and to delete there, as long as no higher claim exists."""

    number: int
    tag: str
    """Eight random hexadecimal digits. They make the name unique if two trainings claim the same number at once."""

    def __str__(self) -> str:
        return f"{self.number:06d}-{self.tag}"


class TierCheckpoint(NamedTuple):
    """A checkpoint of all ranks in a tier. Of two checkpoints, the larger one is newer."""

    claim: Claim
    step: int


class Writer(NamedTuple):
    """One rank under one claim. Only the drain of this rank writes below the prefix of a writer."""

    claim: Claim
    rank: int
    world_size: int

    def __str__(self) -> str:
        return f"{self.claim}/rank-{self.rank:05d}-of-{self.world_size:05d}"


class ManifestName(NamedTuple):
    writer: Writer
    step: int
    nonce: str

    @property
    def checkpoint(self) -> TierCheckpoint:
        return TierCheckpoint(self.writer.claim, self.step)

    def __str__(self) -> str:
        return f"{self.writer}/steps/{self.step:012d}-{self.nonce}.json"


class ObjectName(NamedTuple):
    writer: Writer
    content: str
    """SHA-256 of the bytes, 64 hexadecimal digits."""
    nonce: str

    def __str__(self) -> str:
        return f"{self.writer}/data/{self.content}-{self.nonce}"


def claim_name(claim: Claim) -> str:
    """Return the name of the file of a claim."""
    return f"{claim}/claim.json"


def parse(name: str) -> Claim | ManifestName | ObjectName | None:
    """Return what a name below the root of a tier says; None for a name that lightck does not write."""
    if match := _MANIFEST.fullmatch(name):
        writer = _writer(match)
        found: Claim | ManifestName | ObjectName | None = writer and ManifestName(writer, int(match[5]), match[6])
    elif match := _OBJECT.fullmatch(name):
        writer = _writer(match)
        found = writer and ObjectName(writer, match[5], match[6])
    elif match := _CLAIM_FILE.fullmatch(name):
        found = Claim(int(match[1]), match[2])
    else:
        return None
    # One value has one name: digits that lightck would write otherwise (more zeros) are not its own.
    written = claim_name(found) if isinstance(found, Claim) else str(found)
    return found if written == name else None


def _writer(match: re.Match[str]) -> Writer | None:
    rank, world_size = int(match[3]), int(match[4])
    return Writer(Claim(int(match[1]), match[2]), rank, world_size) if rank < world_size else None
