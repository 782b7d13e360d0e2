"""The position of a loader: what a checkpoint says about it, and how it is read back from untrusted values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightck.dataloader.sharing import Sharing
from lightck.errors import CorruptPoolError
from lightck.state import values
from lightck.state.rng import RngState

GENERATORS_MAX = 64
"""The largest number of random generators of one loader."""
VERSION = 2
"""Format of a position. Since format 2 a position includes the properties and the generators of a DataLoader inside a
wrapper."""

Identity = dict[str, "str | int | None"]
"""Name of a property of a loader -> its value."""


class RngSnapshot:
    """The states of the global generators and of the loader's own generators at one moment. The storable form is
    computed at the first ``to_value``, and kept."""

    __slots__ = ("_value", "generators", "rng")

    def __init__(self, state: RngState, generators: tuple[torch.Tensor, ...]) -> None:
        self.rng = state
        self.generators = generators
        self._value: values.ConstantDict | None = None

    def to_value(self) -> dict[str, object]:
        if self._value is None:
            self._value = values.ConstantDict(rng=self.rng.to_value(), generators=_to_bytes(self.generators))
        return self._value

    @classmethod
    def from_value(cls, value: object) -> RngSnapshot | None:
        if value is None:
            return None
        if not isinstance(value, dict) or set(value) != {"rng", "generators"}:
            raise corrupt("one of its random states has the wrong parts")
        try:
            rng = RngState.from_value(value["rng"])
        except CorruptPoolError as error:
            raise corrupt(str(error)) from error
        return cls(rng, _from_bytes(value["generators"]))


def _to_bytes(states: Iterable[torch.Tensor]) -> list[bytes]:
    return [state.numpy().tobytes() for state in states]


def _from_bytes(value: object) -> tuple[torch.Tensor, ...]:
    if type(value) is not list or len(value) > GENERATORS_MAX:
        raise corrupt("its generators are no list of states")
    if not all(type(item) is bytes and item for item in value):
        raise corrupt("the state of a generator is not bytes")
    return tuple(torch.frombuffer(bytearray(item), dtype=torch.uint8).clone() for item in value)


def corrupt(reason: str) -> CorruptPoolError:
    """Return the error for a damaged position. ``reason``: a clause for the message."""
    return CorruptPoolError(
        f"The saved position of a loader is damaged: {reason}. Continue from an older step, if the pool holds one: "
        "lightck.recover(path, model, optimizer, step=N), and then attach (several ranks: to another directory)."
    )


@dataclass(slots=True)
class PassState:
    """How far a pass has come, and what a replay to this place needs. The first four fields are random states."""

    at_iter: RngSnapshot | None = None
    """From which ``iter()`` drew the pass's order and the workers' seeds."""
    at_first: RngSnapshot | None = None
    """From which the first batch was fetched. (A loop may draw between ``iter()`` and this fetch.)"""
    last: RngSnapshot | None = None
    """Before the ``next()`` that gave the last batch; None if a worker fetched it."""
    before_last: RngSnapshot | None = None
    """Before the ``next()`` that gave the last batch but one; only for a loader that is one batch ahead."""
    given: int = 0
    """Number of batches given."""
    checksum: int | None = None
    """Checksum of the last batch given. (Saved as "content". Older pools have another checksum as "checksum", which is
    not compared.)"""
    inner: object = None
    """The own state of a stateful loader; for a loader of Accelerate, its state before the pass."""
    pass_number: int | None = None
    """What ``pass_number_of`` returned when the pass began."""
    objects: dict[str, bytes | None] = field(default_factory=dict)
    """Packed states, before the pass, of objects in ``state=`` that are part of the loader."""
    raised: dict[int, int] = field(default_factory=dict)
    """n -> how often ``next()`` raised an error when n batches were given."""
    samples_before: int = 0
    """Number of samples of the pass that another number of ranks has given (see ``sharing.py``). Batches are counted
    from there."""


@dataclass(frozen=True, slots=True)
class Position:
    """What a checkpoint says about one loader.

    ``kind``: "plain" or "stateful". ``epoch``: number of finished passes. ``in_pass``: a pass is under way.
    ``trained``: updates were made in the pass under way. ``worker_rng``: the random state from which persistent
    workers were started (the ``at_iter`` or ``at_first`` of their first pass). ``version``: the `VERSION` of the
    lightck that saved the position; 1 if it saved none, or if the position was moved. ``previews``: number of passes
    without an update that the process left before its first update; ``previews_in_loop``: whether it left such passes
    after that update as well. ``used_again``: whether updates were made on batches of the last pass after it ended.
    ``sharing``: how several ranks share the samples; None if they do not, or if this is unknown. ``samples_given``: how
    many samples of the pass all ranks together had got. None unless `own_position` has set it, because
    another world of as many ranks (with other parts of the tensors, for example) has loaded the checkpoint.
    """

    kind: str
    epoch: int
    in_pass: bool
    trained: bool
    identity: Identity
    generators: tuple[torch.Tensor, ...]
    worker_rng: RngSnapshot | None
    state: PassState
    version: int = VERSION
    previews: int = 0
    previews_in_loop: bool = False
    used_again: bool = False
    sharing: Sharing | None = None
    samples_given: int | None = None

    def to_value(self) -> dict[str, object]:
        # These keys are left out where they say nothing, so that the bytes of most checkpoints stay as they were.
        shared: dict[str, object] = {} if self.sharing is None else {"sharing": self.sharing.to_value()}
        if self.state.samples_before:
            shared["samples_before"] = self.state.samples_before
        if self.samples_given is not None:
            shared["samples_given"] = self.samples_given
        return shared | {
            "kind": self.kind,
            "epoch": self.epoch,
            "given": self.state.given,
            "live": self.in_pass,
            "trained": self.trained,
            "identity": self.identity,
            "generators": _to_bytes(self.generators),
            "r_iter": self.state.at_iter and self.state.at_iter.to_value(),
            "r_first": self.state.at_first and self.state.at_first.to_value(),
            "r_base": self.worker_rng and self.worker_rng.to_value(),
            "r_last": self.state.last and self.state.last.to_value(),
            "checksum": None,
            "content": self.state.checksum,
            "inner": self.state.inner,
            "version": self.version,
            "objects": self.state.objects,
            "raised": [[place, count] for place, count in self.state.raised.items()],
            "r_before_last": self.state.before_last and self.state.before_last.to_value(),
            "passes": self.state.pass_number,
            "previews": self.previews,
            "previews_in_loop": self.previews_in_loop,
            "used_again": self.used_again,
        }

    @classmethod
    def from_value(cls, value: object) -> Position:
        if type(value) is not dict or not _KEYS <= set(value) <= _KEYS | set(_LATER):
            raise corrupt("it has the wrong parts")
        value = {**_LATER, **value}
        for key, (kinds, noun) in _TYPES.items():
            if type(value[key]) not in kinds or (type(value[key]) is int and not 0 <= value[key] < 1 << 63):
                raise corrupt(f"{key} is no {noun}")
        state = PassState(
            at_iter=RngSnapshot.from_value(value["r_iter"]),
            at_first=RngSnapshot.from_value(value["r_first"]),
            last=RngSnapshot.from_value(value["r_last"]),
            before_last=RngSnapshot.from_value(value["r_before_last"]),
            given=value["given"],
            checksum=value["content"],
            inner=value["inner"],
            pass_number=value["passes"],
            objects=_read_map(value["objects"], (bytes, type(None)), "the states of its objects are not bytes"),
            raised=_read_raised(value["raised"], value["given"]),
            samples_before=value["samples_before"],
        )
        position = cls(
            kind=value["kind"],
            epoch=value["epoch"],
            in_pass=value["live"],
            trained=value["trained"],
            identity=_read_map(
                value["identity"], (str, int, type(None)), "its identity is no dict of names and numbers"
            ),
            generators=_from_bytes(value["generators"]),
            worker_rng=RngSnapshot.from_value(value["r_base"]),
            state=state,
            version=value["version"],
            previews=value["previews"],
            previews_in_loop=value["previews_in_loop"],
            used_again=value["used_again"],
            sharing=Sharing.from_value(value["sharing"]),
            samples_given=value["samples_given"],
        )
        position._check()
        return position

    def _check(self) -> None:
        if self.kind not in ("plain", "stateful"):
            raise corrupt(f"lightck does not know its kind of loader, {self.kind!r}")
        if self.in_pass and self.state.at_iter is None:
            raise corrupt("its pass has begun and a random state is missing")
        if self.in_pass and self.kind == "stateful" and self.state.inner is None:
            raise corrupt("its pass has begun and its own state is missing")
        if self.kind == "plain" and self.state.given and self.state.at_first is None:
            raise corrupt("batches were given and a random state is missing")
        if (self.state.given or self.state.samples_before) and not self.in_pass:
            raise corrupt("batches were given and no pass has begun")
        if self.state.samples_before and self.sharing is None:
            raise corrupt(
                "its pass was begun by another number of ranks, and how these shared the samples is not saved"
            )
        if any(len(snapshot.generators) != len(self.generators) for snapshot in self.snapshots()):
            raise corrupt("its random states differ in the number of generators")

    @property
    def has_given_all(self) -> bool:
        """Whether a pass is under way and has no batch left."""
        return self.in_pass and self.state.given > 0 and self.state.given == self.identity.get("length")

    def snapshots(self) -> list[RngSnapshot]:
        """Return all random states of this position."""
        snapshots = (self.state.at_iter, self.state.at_first, self.worker_rng, self.state.before_last, self.state.last)
        return [snapshot for snapshot in snapshots if snapshot is not None]

    def rng_before(self, index: int) -> RngSnapshot | None:
        """Return the random state before the ``next()`` that gave batch ``index`` (from 0) of the pass; None if it is
        unknown."""
        if index == self.state.given - 1 and self.state.last is not None:
            return self.state.last
        if index == self.state.given - 2 and self.state.before_last is not None:
            return self.state.before_last
        return self.state.at_first if index == 0 else None

    def before_its_pass(self) -> Position:
        """Return the position at the beginning of the saved pass, so that this pass is not counted as finished."""
        if not self.in_pass:
            return self
        # As ``between_passes``, but with the number of finished passes that was saved.
        state = replace(self.between_passes().state, inner=None if self.kind == "stateful" else self.state.inner)
        return replace(self.between_passes(), epoch=self.epoch, state=state)

    def with_last_only(self) -> Position:
        """Return a position whose pass has given only the last batch, because the sampler has skipped the batches
        before it."""
        given, raised = self.state.given, self.state.raised
        after_last = {1: raised[given]} if given in raised else {}
        return replace(
            self, state=replace(self.state, given=1, at_first=None, last=None, before_last=None, raised=after_last)
        )

    def between_passes(self) -> Position:
        """Return the position after the saved pass, which is counted as finished."""
        kept = PassState(checksum=self.state.checksum, inner=self.state.inner, pass_number=self.state.pass_number)
        return replace(self, epoch=self.epoch + 1, in_pass=False, trained=False, state=kept)


_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "kind": ((str,), "str"),
    "epoch": ((int,), "count"),
    "given": ((int,), "count"),
    "live": ((bool,), "bool"),
    "trained": ((bool,), "bool"),
    "checksum": ((int, type(None)), "checksum"),
    "content": ((int, type(None)), "checksum"),
    "passes": ((int, type(None)), "count"),
    "version": ((int,), "number"),
    "previews": ((int,), "count"),
    "previews_in_loop": ((bool,), "bool"),
    "used_again": ((bool,), "bool"),
    "samples_before": ((int,), "count"),
    "samples_given": ((int, type(None)), "count"),
}
"""Key -> types that its value may have, and a noun for the message."""
_LATER: dict[str, object] = {
    "objects": {},
    "raised": [],
    "content": None,
    "version": 1,
    "r_before_last": None,
    "passes": None,
    "previews": 0,
    "previews_in_loop": False,
    "used_again": False,
    "samples_before": 0,
    "sharing": None,
    "samples_given": None,
}
"""Keys that older pools do not have, and the values that are used for these pools."""
_KEYS = {*_TYPES, "identity", "generators", "r_iter", "r_first", "r_base", "r_last", "inner"} - set(_LATER)


def _read_map(value: object, kinds: tuple[type, ...], why: str) -> dict[str, Any]:
    if type(value) is not dict or not all(type(k) is str and type(item) in kinds for k, item in value.items()):
        raise corrupt(why)
    return value


def _read_raised(value: object, given: int) -> dict[int, int]:
    if type(value) is not list or not all(type(pair) is list and len(pair) == 2 for pair in value):
        raise corrupt("its failed fetches are no list of pairs (place, count)")
    if not all(type(number) is int for pair in value for number in pair):
        raise corrupt("the place or the count of a failed fetch is no number")
    if not all(0 <= place <= given and 0 < count < 1 << 31 for place, count in value):
        raise corrupt("a failed fetch has an impossible place or count")
    return dict(value)


def same_rng(left: RngSnapshot | None, right: RngSnapshot | None) -> bool:
    """Whether both are None, or hold the same states."""
    return values.pack(left and left.to_value(), path="r") == values.pack(right and right.to_value(), path="r")
