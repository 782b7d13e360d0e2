"""What can be told of a loader that a session wraps: what makes it the same one, and whether it can be replayed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, SupportsInt

from torch.utils.data import DataLoader, IterableDataset

from lightck.dataloader.position import Identity, Position
from lightck.dataloader.wrapped_loader import inner_dataloader, is_accelerated
from lightck.errors import DriftError, SessionError

if TYPE_CHECKING:
    from lightck.dataloader.loader import SessionLoader

Drift = dict[str, tuple[object, object]]
"""What about a loader was otherwise when it was saved: (then, now)."""


def name_of(loader: object, name: str | None, known: Sequence[SessionLoader]) -> str:
    """The name of its position: as the user says, else its number. Raises ``TypeError``, and ``SessionError`` where it
    would not be the same one after a resume, as where a loop calls ``session.loader`` anew for each epoch."""
    if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise TypeError(f"session.loader() was given {loader!r}, which cannot be iterated. Pass the DataLoader.")
    if any(other is loader for other in known):
        raise SessionError("This is a session loader already. Wrap each loader once.")
    if name is None:
        for other in known:
            if other.loader is loader and other.is_begun:
                raise SessionError(
                    f"This loader is followed as {other.name!r} already, and was iterated. A position is found again "
                    "by its number, so one more would not go on after a resume. Call session.loader() once, before the "
                    "loop over epochs, or give each its own name=."
                )
        for other in known:
            if other.has_trained:
                raise SessionError(
                    f"A loader is wrapped without a name=, after the training went over loader {other.name!r}. It "
                    "would be found again by its number, and in a resumed run that may be another one's. Call "
                    "session.loader() once for each loader, before the loop over epochs, or give this one a name=."
                )
        name = f"loader.{len(known)}"
    if any(other.name == name for other in known):
        raise SessionError(f"A loader named {name!r} is already followed. Names tell them apart. Use another.")
    return name


def is_numbered_name(name: str) -> bool:
    """Whether it was given by the order of the calls."""
    return re.fullmatch(r"loader\.\d+", name) is not None


def _length(loader: object) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _plain(count: SupportsInt | None) -> int | None:
    """A count as it was given to a DataLoader, which takes numpy's numbers too."""
    return None if count is None else int(count)


def identity_of(loader: object, stateful: bool) -> Identity:
    """What must not change between a version and its resume in the middle of a pass."""
    if isinstance(loader, DataLoader):
        return {"length": _length(loader), **_built(loader)}
    dataloader = inner_dataloader(loader)
    outside: Identity = {"class": _class_name(loader), "length": None if stateful else _length(loader)}
    return outside if dataloader is None or stateful else {**_built(dataloader), **outside}


def _built(loader: DataLoader[object]) -> Identity:
    sampler = _class_name(loader.sampler)
    if loader.batch_sampler is not None:
        sampler = f"{_class_name(loader.batch_sampler)}({sampler})"
    return {
        "batch_size": _plain(loader.batch_size),
        "workers": _plain(loader.num_workers),
        "sampler": sampler,
        "persistent_workers": int(loader.persistent_workers),
        "prefetch_factor": _plain(loader.prefetch_factor),
        "in_order": int(getattr(loader, "in_order", True)),
    }


TAKEN_BEFORE = "batches taken before the pass"
"""Part of the identity of what has one pass, and was left and iterated again: a new process begins it anew."""


def has_one_pass(loader: object) -> bool:
    """A generator, a ``map``, ``iter()`` of a list or of a DataLoader. A class of somebody else's may begin again."""
    made_by = type(loader).__module__
    return isinstance(loader, Iterator) and made_by in ("builtins", "itertools", "torch.utils.data.dataloader")


def drift_error(name: str, drift: Drift, position: Position) -> DriftError:
    text = ", ".join(f"{key} was {was!r} and is {now!r}" for key, (was, now) in drift.items())
    fact = f"loader {name!r} differs from the one that was saved: {text}."
    given = position.state.given
    if given == position.identity.get("length"):
        return DriftError(
            f"{fact} All {given} batches of its pass were given when the checkpoint of it was closed, and the "
            "loop goes on behind them, at the epoch's end. If that was the end of the training, close it with "
            "session.close(done=True), and do not enter the loop where session.done. Else build the loader as it was; "
            "session.loader(..., anew=True) would train this pass once more.",
            drift,
        )
    return DriftError(
        f"{fact} The version lies in the middle of a pass, and another loader would give other batches. Build the "
        "loader as it was, or begin its pass anew: session.loader(..., anew=True).",
        drift,
    )


def refuse_drift(name: str, position: Position, kind: str, generators: int, identity: Identity) -> None:
    """Raises ``DriftError`` where a loader is not built as it was. ``generators``: how many it has. Lengths are
    compared later."""
    then = position.identity
    keys = then if position.version < 2 else {**then, **identity}
    drift: Drift = {key: (then.get(key), identity.get(key)) for key in keys if key != "length"}
    drift |= {"kind": (position.kind, kind), "generators": (len(position.generators), generators)}
    drift = {key: (before, after) for key, (before, after) in drift.items() if before != after}
    if drift:
        raise drift_error(name, drift, position)


def replay_error(name: str, fact: str, is_wrapper: bool = False) -> DriftError:
    """``is_wrapper``: it is a loader of somebody else's, which may hold a DataLoader where nobody sees it."""
    wrapper = (
        " Or it is a wrapper that fetches more than one batch ahead, or in which a DataLoader with "
        "persistent_workers=True lies hidden, whose workers go on from pass to pass: wrap the DataLoader itself."
    )
    return DriftError(
        f"loader {name!r} cannot go on in mid-pass: {fact}. The dataset changed (one that is built after attach from "
        "random numbers, as by random_split, is another one in each run: build it before), or it draws from a random "
        "generator of its own, which no version holds. Bring the old data back and draw from python's, numpy's or "
        "torch's global generators, or begin its pass anew: session.loader(..., anew=True). Or its sampler draws from "
        "a global one at each next(), between the loop's draws: give it a generator of its own, as its attribute "
        "generator." + (wrapper if is_wrapper else "")
    )


def refuse_own(loader: object, name: str) -> None:
    """Raises ``AttributeError`` for what a session loader does not pass on: private attributes, and the state of a
    loader that has one. Loading that beside the position would move the loader twice."""
    if name in ("state_dict", "load_state_dict"):
        raise AttributeError(
            f"A session loader has no {name}(): its position is part of every checkpoint already. The state of the "
            "wrapped loader is to be had from .loader."
        )
    if name.startswith("_") or name == "loader":  # the latter of one that is not built yet
        raise AttributeError(f"{type(loader).__name__!r} object has no attribute {name!r}")


def is_stateful(loader: object) -> bool:
    if is_accelerated(loader):
        return False  # its loaders have the methods, but their state does not bring a pass back: see under.py
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


DRAWS_IN_ITEMS = (
    "an iterable dataset without workers that draws from the global random generators at each item, or goes on in a "
    "pass where the one before it ended, cannot be replayed exactly: use num_workers >= 1, a generator of its own, "
    "or torchdata's StatefulDataLoader"
)
"""Whether it does cannot be known before: a resume compares the batches."""


def replay_risk(loader: object) -> str | None:
    """Why a replay of this loader may not be exact; None where it is."""
    dataloader = inner_dataloader(loader)
    if dataloader is None or is_stateful(loader):
        return None
    if dataloader.num_workers > 1 and not getattr(dataloader, "in_order", True):
        return "with in_order=False batches come in the order in which workers finish: pass in_order=True"
    if not isinstance(loader, DataLoader):
        return None
    if loader.num_workers == 0 and isinstance(loader.dataset, IterableDataset):
        return DRAWS_IN_ITEMS
    return None
