"""Hostile manifests in a tier: ``cd tests; python -m tiers.fuzz_manifests --rounds 100000 --seed 1``.

Each round changes a manifest that a training has sent: its bytes, a value of its JSON, or what the superblock and the
commit record say (packed anew, with a checksum that is right). It is parsed; if that succeeds, and in some other rounds
too, it lies in the tier and ``recover`` reads it. What must come is the checkpoint that was sent, bit by bit, or an
error of lightck. The memory that the process may take is limited, so what a manifest names is not allocated unchecked.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from toys import adam, net, same, train

import lightck
from lightck.errors import LightckError
from lightck.pool.format.structures import COMMIT_RECORD_NBYTES, CommitRecord, DamagedError, Superblock
from lightck.tiers.folder import FolderStore
from lightck.tiers.names import ManifestName
from lightck.tiers.tier_manifest import parse

MEMORY_NBYTES = 4 << 30
"""How much more address space than at its beginning the process may take."""
NUMBERS = (0, 1, -1, 7, 4095, 4096, 1 << 20, 1 << 31, 1 << 32, 1 << 40, 1 << 62, 1 << 63, 1 << 64, 10**30, 0.5, 1e308)
VALUES = (
    *NUMBERS,
    None,
    True,
    "",
    "0" * 64,
    "../../etc/passwd",
    "\0",
    "x" * 5000,
    [],
    [[]],
    {},
    {"a": [1]},
    "zstd",
    "lz4",
)
Sent = tuple[Path, ManifestName, bytes]


def tier_with(folder: Path, **options: Any) -> Path:
    """Return a tier with one checkpoint of a small training."""
    model = net(64)
    optimizer = adam(model)
    tiers = [lightck.Tier(folder / "tier", every="1h", **options)]
    with lightck.attach(model, folder / "run.pool", optimizer=optimizer, tiers=tiers):
        train(model, optimizer, 3)
    (folder / "run.pool").unlink()
    return folder / "tier"


def sent_in(tier: Path) -> Sent:
    name = max(FolderStore(str(tier)).listing().manifests, key=lambda each: each.step)
    for other in FolderStore(str(tier)).listing().manifests:
        if other != name:
            (tier / str(other)).unlink()
    return tier, name, (tier / str(name)).read_bytes()


def changed_bytes(data: bytes, chance: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(found) + 1)
        way = chance.randrange(4)
        if way == 0 and at < len(found):
            found[at] ^= 1 << chance.randrange(8)
        elif way == 1:
            found[at:at] = chance.randbytes(chance.randint(1, 20))
        elif way == 2:
            del found[at : at + chance.randint(1, 50)]
        else:
            begin = chance.randrange(len(found) + 1)
            found[at:at] = found[begin : begin + chance.randint(1, 200)]
    return bytes(found)


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of each value in a tree."""
    found: list[tuple[Any, Any]] = []
    keys: Sequence[Any] = (
        list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        found += [(value, key), *places_in(value[key])]
    return found


def changed_json(data: bytes, chance: random.Random) -> bytes:
    body = json.loads(data)
    for _ in range(chance.randint(1, 3)):
        container, key = chance.choice(places_in(body))
        old, way = container[key], chance.randrange(4)
        if way == 0:
            del container[key]
        elif way == 1 and type(old) is int:
            container[key] = old + chance.choice([-4096, -1, 1, 4096, old, 1 << 30])
        elif way == 2 and isinstance(container, list):
            container.insert(chance.randint(0, len(container)), copy.deepcopy(old))
        else:
            container[key] = copy.deepcopy(chance.choice(VALUES))
    return json.dumps(body).encode()


def changed_number(value: Any, chance: random.Random) -> Any:
    if isinstance(value, bool) or not isinstance(value, int):
        if isinstance(value, tuple) and value:
            at = chance.randrange(len(value))
            return (*value[:at], changed_number(value[at], chance), *value[at + 1 :])
        return chance.randbytes(len(value)) if isinstance(value, bytes) else value
    numbers = [each for each in NUMBERS if isinstance(each, int) and each >= 0]
    return max(0, value + chance.choice([-4096, -1, 1, 4096])) if chance.random() < 0.5 else chance.choice(numbers)


def changed_structures(data: bytes, chance: random.Random) -> bytes:
    """Change a field of the superblock or of the commit record, whose checksums are computed anew."""
    body = json.loads(data)
    superblock = Superblock.unpack(bytes.fromhex(body["superblock"]))
    record = CommitRecord.unpack(bytes.fromhex(body["record"])[:COMMIT_RECORD_NBYTES], superblock.uuid)
    assert record is not None
    try:
        if chance.random() < 0.5:
            name = chance.choice([each.name for each in fields(Superblock)])
            superblock = replace(superblock, **{name: changed_number(getattr(superblock, name), chance)})
        else:
            name = chance.choice(record._fields)
            record = record._replace(**{name: changed_number(getattr(record, name), chance)})
        body["superblock"], body["record"] = superblock.pack().hex(), record.pack(superblock.uuid).hex()
    except Exception:  # a number does not fit into its field
        return changed_json(data, chance)
    return json.dumps(body).encode()


WAYS = (changed_bytes, changed_json, changed_json, changed_structures)


def run(rounds: int, seed: int, folder: Path) -> Counter[str]:
    """Run a campaign. Raises ``AssertionError`` with seed and round."""
    tiers = []
    for number, options in enumerate(({}, {"compress": "zstd"})):
        (folder / str(number)).mkdir()
        tiers.append(sent_in(tier_with(folder / str(number), **options)))
    expected = [lightck.recover(tier) for tier, _, _ in tiers]
    counts: Counter[str] = Counter()
    limit_memory()
    for number in range(rounds):
        chance = random.Random(seed * 1_000_003 + number)
        which = chance.randrange(len(tiers))
        tier, name, data = tiers[which]
        hostile = chance.choice(WAYS)(data, chance)
        where = f"seed {seed}, round {number}"
        try:
            parse(hostile, name.writer, name.step)
            is_parsed = True
        except DamagedError:
            is_parsed = False
        except Exception as err:
            raise AssertionError(f"{where}: {type(err).__name__}: {err}") from err
        counts["parsed" if is_parsed else "refused when it was parsed"] += 1
        if is_parsed or chance.random() < 0.03:
            counts[recovered(tier, name, hostile, expected[which], where)] += 1
    return counts


def recovered(tier: Path, name: ManifestName, hostile: bytes, expected: lightck.Checkpoint, where: str) -> str:
    (tier / str(name)).write_bytes(hostile)
    try:
        found = lightck.recover(tier)
    except LightckError:
        return "refused by recover"
    except Exception as err:
        raise AssertionError(f"{where}: {type(err).__name__}: {err}") from err
    assert same((dict(found.model), found.optimizer), (dict(expected.model), expected.optimizer)), where
    return "recovered as it was sent"


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_NBYTES, resource.RLIM_INFINITY))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    began, folder = time.monotonic(), Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        counts = run(args.rounds, args.seed, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"seed {args.seed}: {args.rounds} manifests, {dict(counts)} ({time.monotonic() - began:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
