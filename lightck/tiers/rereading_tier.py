"""Read what lies in a tier again, and mend what is damaged.

    list      manifests of complete checkpoints, and those that this process has written. Each is read; its bytes must
              be those that were written, or that were read before
    read      each object that they name, in random order; the SHA-256 of its bytes must be its name
    suspect   what is damaged or missing is read again after a pause. A manifest that names it must be there still: else
              the checkpoint was removed meanwhile, and that is no damage
    mend      an object below the own claim is written anew, same name and bytes, from another copy of the content
    report    what cannot be mended, once for each checkpoint: objects without another copy, objects below older claims
              (each prefix has one writer, and theirs is another one), and manifests (nothing says which bytes they had)

Invariants: only bytes whose SHA-256 is the name are written. Nothing is written once a higher claim exists. Whether a
manifest is there is known by reading it, so a late listing is no damage.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Generator, Mapping, Sequence

from lightck.errors import TierError
from lightck.pool.format.structures import DamagedError
from lightck.tiers.decisions import Listing, complete, is_superseded
from lightck.tiers.drain_messages import Reread
from lightck.tiers.names import ManifestName, ObjectName, TierCheckpoint, Writer
from lightck.tiers.object_copies import damage_from, damage_of
from lightck.tiers.store import Store
from lightck.tiers.tier_manifest import MANIFEST_NBYTES_MAX, SentObject, TierManifest, parse, read_manifest

FindCopy = Callable[[ObjectName, Mapping[ManifestName, TierManifest]], "bytes | None"]
"""Returns the bytes of an object from elsewhere, given the manifests that name it; None if there is no other copy."""
SUSPECT_SECONDS_MAX = 5.0
"""The longest pause before something that seems damaged is read again."""
_NO_COPY = "no other copy of it was found"


class _SupersededError(Exception):
    """A higher claim exists. Internal."""


class TierRereading:
    """The rounds over one tier."""

    def __init__(
        self,
        store: Store,
        own: Writer,
        period: float,
        reread: Reread,
        report: Callable[[str], None],
        find_copy: FindCopy,
        written: Callable[[], Mapping[ManifestName, bytes]],
    ) -> None:
        """``period``: seconds of a round. ``written``: returns the SHA-256 of the manifests that this process has
        written, and not removed."""
        self._store, self._own, self._period, self._reread = store, own, period, reread
        self._report, self._find_copy, self._written = report, find_copy, written
        self._seen: dict[ManifestName, bytes] = {}
        """SHA-256 of each manifest that was read before."""
        self._contents: dict[ManifestName, frozenset[ObjectName]] = {}
        """What the manifests of this round name, as far as they were not removed since."""
        self._sizes: dict[ObjectName, int] = {}
        """The objects that they name, each with its number of bytes."""
        self._damaged: set[ManifestName | ObjectName] = set()
        self._warned: set[tuple[TierCheckpoint, bool]] = set()
        """The checkpoints of which the training was warned, because something in them was mended (True) or not."""

    def round(self, began: float) -> Generator[float, None, bool]:
        """Read everything once. Yields the time at which the next piece is due. Raises ``TierError``."""
        listing = self._store.listing()
        if is_superseded(listing, self._own.claim):
            return False
        try:
            yield from self._read_manifests(listing)
            yield from self._read_objects(began)
        except _SupersededError:
            return False
        return True

    # -- manifests

    def _read_manifests(self, listing: Listing) -> Generator[float, None, None]:
        whole = complete(listing)
        names = {each for each in listing.manifests if each.checkpoint in whole and self._is_ours(each.writer)}
        names |= {each for each in listing.manifests if each.writer == self._own} | self._written().keys()
        self._contents, self._sizes = {}, {}
        self._seen = {name: each for name, each in self._seen.items() if name in names}
        for name in sorted(names, reverse=True):
            yield 0.0
            reason = self._damage_of_manifest(name)
            if reason is not None:
                yield self._suspected_until()
                reason = self._damage_of_manifest(name)
            if reason is not None:
                self._found_manifest(name, reason)

    def _is_ours(self, writer: Writer) -> bool:
        """Whether this rank reads what a writer has written. Each part below an older claim is read by one rank, also
        if another number of ranks made it."""
        return writer.claim <= self._own.claim and writer.rank % self._own.world_size == self._own.rank

    def _damage_of_manifest(self, name: ManifestName) -> str | None:
        """Read a manifest, and return what is wrong with it. None: nothing is, or it was removed."""
        try:
            data = self._store.get(str(name), MANIFEST_NBYTES_MAX)
            self._reread.nbytes += len(data)
            manifest = parse(data, name.writer, name.step)
        except FileNotFoundError:
            return "it is gone" if name in self._written() else None
        except (DamagedError, TierError) as err:
            return damage_from(err)
        found = hashlib.sha256(data).digest()
        if found != self._written().get(name, self._seen.setdefault(name, found)):
            return "its bytes are not those that were written"
        self._damaged.discard(name)
        # All names share one ``Writer`` in memory, because there may be many names.
        sizes = {each.name._replace(writer=name.writer): each.nbytes for each in manifest.objects}
        self._contents[name] = frozenset(sizes)
        self._sizes.update(sizes)
        return None

    def _found_manifest(self, name: ManifestName, reason: str) -> None:
        self._refuse_superseded()
        self._count(name)
        self._warn(
            [name.checkpoint],
            f"its manifest {name}: {reason}. A recovery skips it. Manifests are not written anew, because "
            "nothing says which bytes they had; the next checkpoints are not affected. Look at the medium",
        )

    # -- objects

    def _read_objects(self, began: float) -> Generator[float, None, None]:
        objects, n_all = list(self._sizes.items()), max(1, sum(self._sizes.values()))
        self._sizes = {}
        random.shuffle(objects)  # a round that is cut short does not begin with the same ones each time
        n_done = 0
        for name, nbytes in objects:
            yield began + self._period * n_done / n_all
            n_done += nbytes
            sent = SentObject(name, nbytes, "")
            reason = self._damage_of(sent)
            if reason is not None and self._manifests_naming(name):
                yield self._suspected_until()
                reason = self._damage_of(sent)
                if reason is not None and (named_by := self._manifests_naming(name)):
                    self._found_object(sent, reason, named_by)
        yield began + self._period

    def _damage_of(self, sent: SentObject) -> str | None:
        reason = damage_of(self._store, sent, reads=True)
        self._reread.nbytes += sent.nbytes
        if reason is None:
            self._damaged.discard(sent.name)
        return reason

    def _manifests_naming(self, name: ObjectName) -> dict[ManifestName, TierManifest]:
        """Return the manifests that name an object, and that are there at this moment."""
        found = {}
        for manifest in [each for each, objects in self._contents.items() if name in objects]:
            try:
                found[manifest] = read_manifest(self._store, manifest)
            except DamagedError:
                del self._contents[manifest]
        return found

    def _found_object(self, sent: SentObject, reason: str, named_by: Mapping[ManifestName, TierManifest]) -> None:
        """Mend an object that is damaged, or report it."""
        self._refuse_superseded()
        self._count(sent.name)
        checkpoints = sorted({each.checkpoint for each in named_by})
        if sent.name.writer != self._own:
            left: str | None = "it belongs to an earlier session, so this one leaves it as it is"
        else:
            left = self._mend(sent, named_by)
        if left is None:
            self._damaged.discard(sent.name)
            self._reread.mended += 1
            self._warn(
                checkpoints,
                f"the object {sent.name}: {reason}. The object was written anew from another copy, and is whole. Look "
                "at the medium",
                is_mended=True,
            )
        else:
            self._warn(
                checkpoints,
                f"the object {sent.name}: {reason}; {left}. A recovery passes the checkpoint over. If another tier or "
                f"pool has the same bytes: lightck repair {self._store} --from OTHER",
            )

    def _mend(self, sent: SentObject, named_by: Mapping[ManifestName, TierManifest]) -> str | None:
        """Write an object anew. Returns why it is damaged still; None if it is whole."""
        data = self._find_copy(sent.name, named_by)
        if data is None:
            return _NO_COPY
        try:
            self._store.put(str(sent.name), data)
        except TierError as err:
            return f"it could not be written anew: {err}"
        again = damage_of(self._store, sent, reads=True)
        return None if again is None else f"it was written anew, and {again}"

    # -- both

    def _refuse_superseded(self) -> None:
        """Raise ``_SupersededError`` if a higher claim exists. Then another training removes what it likes, and what is
        missing is no damage. Raise ``TierError`` if the own claim is gone: the tier is out of reach."""
        listing = self._store.listing()
        if is_superseded(listing, self._own.claim):
            raise _SupersededError
        if self._own.claim not in listing.claims:
            raise TierError(f"The tier {str(self._store)!r} has lost its claim {self._own.claim}.")

    def _suspected_until(self) -> float:
        return time.monotonic() + min(SUSPECT_SECONDS_MAX, self._period / 20)

    def _count(self, name: ManifestName | ObjectName) -> None:
        if name not in self._damaged:
            self._damaged.add(name)
            self._reread.damaged += 1

    def _warn(self, checkpoints: Sequence[TierCheckpoint], what: str, *, is_mended: bool = False) -> None:
        new = [each for each in checkpoints if (each, is_mended) not in self._warned]
        self._warned.update((each, is_mended) for each in new)
        if new:
            steps = ", ".join(str(each.step) for each in new[:10]) + (", ..." if len(new) > 10 else "")
            of_claim = "" if new[0].claim == self._own.claim else f" (claim {new[0].claim})"
            are = ("were" if is_mended else "are") if len(new) > 1 else ("was" if is_mended else "is")
            named = f"step{'s' * (len(new) > 1)} {steps}{of_claim} in the tier {str(self._store)!r}"
            self._report(f"{named} {are} damaged: {what}")
