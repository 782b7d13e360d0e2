"""Properties of a loader that a session wraps: what makes it the same loader after a resume, and whether a replay is
exact."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, SupportsInt

from torch.utils.data import DataLoader, IterableDataset

from lightck.dataloader.position import Identity, Position
from lightck.dataloader.wrapped_loader import inner_dataloader, is_accelerated
from lightck.errors import DriftError, SessionError

if TYPE_CHECKING:
    from lightck.dataloader.loader import SessionLoader

log = logging.getLogger("lightck")

LoaderDrift = dict[str, tuple[object, object]]
"""Differences between the saved loader and the current one: property -> (saved value, current value)."""


def name_of(loader: object, name: str | None, known: Sequence[SessionLoader]) -> str:
    """Return the name of the loader's position: the user's ``name``, or its number. Raises ``TypeError``, and
    ``SessionError`` if the number could be another loader's after a resume, for example when a loop calls
    ``session.loader`` again for each epoch."""
    if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise TypeError(f"session.loader() was given {loader!r}, which cannot be iterated. Pass the DataLoader.")
    if any(other is loader for other in known):
        raise SessionError(
            "This loader was returned by session.loader() already. A loader has only one position. Iterate over this "
            "loader as it is."
        )
    if name is None:
        for other in known:
            if other.loader is loader and other.is_begun:
                raise SessionError(
                    f"This loader was passed to session.loader() before, without a name= (as {other.name!r}), and was "
                    "iterated. Loaders without a name= are numbered in the order of the calls, so a resumed run could "
                    "take one for another. Call session.loader() once, before the loop over epochs, or give each "
                    "loader a name= of its own."
                )
        for other in known:
            if other.has_trained_here:
                raise SessionError(
                    f"session.loader() was called without a name= after the training used loader {other.name!r}. "
                    "Loaders without a name= are numbered in the order of the calls, so a resumed run could take one "
                    "for another. Call session.loader() once for each loader, before the loop over epochs, or give "
                    "this loader a name=."
                )
        name = f"loader.{len(known)}"
    if any(other.name == name for other in known):
        raise SessionError(
            f"A loader named {name!r} is already followed. Each loader needs a name of its own. Pass another name=."
        )
    return name


def is_numbered_name(name: str) -> bool:
    """Whether the name is one that ``name_of`` made from the order of the calls."""
    return re.fullmatch(r"loader\.\d+", name) is not None


def _length(loader: object) -> int | None:
    """Return ``len(loader)``; None if the loader has no length."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _plain(count: SupportsInt | None) -> int | None:
    """Convert an option of a DataLoader to an int, because it may be a numpy number."""
    return None if count is None else int(count)


def identity_of(loader: object, stateful: bool) -> Identity:
    """Return the properties of a loader that must not change between a checkpoint in mid-pass and its resume.
    ``stateful``: see ``is_stateful``."""
    if isinstance(loader, DataLoader):
        return {"length": _length(loader), **_options_of(loader)}
    dataloader = inner_dataloader(loader)
    own: Identity = {"class": _class_name(loader), "length": None if stateful else _length(loader)}
    return own if dataloader is None or stateful else {**_options_of(dataloader), **own}


def _options_of(loader: DataLoader[object]) -> Identity:
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


TAKEN_BEFORE = "the number of batches taken before this pass"
"""A property of the identity, set if the loop iterates once more over an iterator that has only one pass. Its value is
the number of batches that the iterator gave before the present pass. A new process cannot continue such a pass, because
in the new process the iterator begins at its first batch."""


def has_one_pass(loader: object) -> bool:
    """Whether the object can be iterated only once: a generator, a ``map``, ``iter()`` of a list or of a DataLoader. An
    iterator of any other class returns False, because its ``iter()`` may begin at the first batch again."""
    made_by = type(loader).__module__
    return isinstance(loader, Iterator) and made_by in ("builtins", "itertools", "torch.utils.data.dataloader")


def drift_of(position: Position, kind: str, n_generators: int, identity: Identity) -> LoaderDrift:
    """Return the properties in which a loader differs from the saved one. The length is left out: it is compared when
    the pass is continued. ``kind``: "plain" or "stateful" (see ``is_stateful``). ``n_generators``: number of random
    generators that the loader owns. ``identity``: the result of ``identity_of`` for this loader."""
    then = position.identity
    # In version 1, fewer properties of a wrapper were saved, so only those are compared.
    keys = then if position.version < 2 else {**then, **identity}
    drift: LoaderDrift = {key: (then.get(key), identity.get(key)) for key in keys if key != "length"}
    drift |= {
        "the kind of loader": (position.kind, kind),
        "the number of its random generators": (len(position.generators), n_generators),
    }
    return {key: (before, after) for key, (before, after) in drift.items() if before != after}


def report_drift(name: str, drift: LoaderDrift, position: Position) -> None:
    """Warn that a loader differs from the saved one. Raises ``DriftError`` if batches of the restored pass are left,
    because another loader would give other batches."""
    text = ", ".join(f"{key} was {was!r} and is {now!r}" for key, (was, now) in drift.items())
    fact = f"loader {name!r} differs from the one that was saved: {text}."
    if position.in_pass and not position.has_given_all:
        raise DriftError(
            f"{fact} The checkpoint lies in the middle of a pass, and another loader would give other batches. Build "
            "the loader as it was, or begin its pass anew: session.loader(..., anew=True).",
            drift,
        )
    where = "after the last batch of a pass" if position.in_pass else "between two passes"
    log.warning(
        "lightck: %s The checkpoint was saved %s, so the next pass uses the loader as it is now. If that is not what "
        "you want, build it as it was",
        fact,
        where,
    )


def replay_error(name: str, fact: str, is_wrapper: bool = False) -> DriftError:
    """Return the error for a replay that gave other batches. ``is_wrapper``: the loader is not torch's own, and may
    contain a DataLoader that lightck cannot see."""
    reason = (
        "; the loader is a wrapper that fetches more than one batch ahead, or that hides a DataLoader with "
        "persistent_workers=True, which keeps its workers from pass to pass (pass the DataLoader itself to "
        "session.loader())"
    )
    return DriftError(
        f"loader {name!r} cannot go on in mid-pass: {fact}. Possible reasons: the dataset changed (restore the old "
        "data); the dataset was built after attach from random numbers, as by random_split (build it before attach); "
        "the sampler is at another epoch (call sampler.set_epoch(epoch) before each pass), or has other weights; the "
        "dataset, a worker or the order of the samples depends on the clock or on the order of a set; the dataset has "
        "a random generator or a counter of its own, which no checkpoint holds (give the dataset state_dict() and "
        "load_state_dict(), and pass the same object in state=); the sampler and the loop draw from the same global "
        "generator by turns (give the sampler a generator of its own in its attribute `generator`); the sampler has "
        "made a random generator since session.loader() (make it before, and keep it in an attribute of the sampler)"
        f"{reason if is_wrapper else ''}. If none of these can be mended, begin the pass anew: "
        "session.loader(..., anew=True)."
    )


def refuse_unforwarded(loader: object, name: str) -> None:
    """Raise ``AttributeError`` for attributes that a session loader does not forward: private ones, and ``state_dict``
    and ``load_state_dict``. To load a loader's own state in addition to its position would advance the loader twice."""
    if name in ("state_dict", "load_state_dict"):
        raise AttributeError(
            f"A session loader has no {name}(): its position is part of every checkpoint already. For the state of the "
            "wrapped loader, call .loader.state_dict()."
        )
    if name.startswith("_") or name == "loader":  # "loader" is missing while the object is being built
        raise AttributeError(f"{type(loader).__name__!r} object has no attribute {name!r}")


def is_stateful(loader: object) -> bool:
    """Whether the loader is *stateful*: its own ``state_dict`` and ``load_state_dict`` restore its pass. Any other
    loader is *plain*."""
    if is_accelerated(loader):
        return False  # its methods do not restore a pass: see wrapped_loader.py
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


ITERABLE_IN_PROCESS_RISK = (
    "the loader has an iterable dataset and no workers. If the dataset draws from the global random generators at each "
    "item, or begins a pass where the last one ended, the batches of a pass cannot be fetched again exactly. Then use "
    "num_workers >= 1, give the dataset a generator of its own, or use torchdata's StatefulDataLoader"
)
"""Why a replay of a loader with an iterable dataset and no workers may not be exact. Before the first pass it is
unknown whether the dataset draws in this way. So the risk is only logged, and a resume compares the batches."""

POSSIBLE_REASONS = (
    "Possible reasons are random augmentation in persistent workers, and a dataset that keeps a state from pass to "
    "pass. Pass persistent_workers=False, or let the dataset keep no such state"
)
"""Why a replay may give another last batch although ``replay_risk`` knows no reason."""


def replay_risk(loader: object) -> str | None:
    """Return why a replay of this loader may not be exact, or None if no reason is known before its first pass."""
    dataloader = inner_dataloader(loader)
    if dataloader is None or is_stateful(loader):
        return None
    if dataloader.num_workers > 1 and not getattr(dataloader, "in_order", True):
        return "with in_order=False batches come in the order in which workers finish: pass in_order=True"
    if not isinstance(loader, DataLoader):
        return None
    if loader.num_workers == 0 and isinstance(loader.dataset, IterableDataset):
        return ITERABLE_IN_PROCESS_RISK
    return None
