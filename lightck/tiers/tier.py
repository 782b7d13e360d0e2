"""``lightck.Tier``: to which folder or object store, how often, and what stays there."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import SupportsFloat

from lightck.ranks.directory import directory_of_group
from lightck.tiers.codecs import CODECS
from lightck.tiers.keep import Keep
from lightck.tiers.open_store import Options, is_url, refuse_unusable_root, root_of
from lightck.tiers.rates import bytes_per_second_of, seconds_of

_SAFETENSORS = "safetensors"
_NAMES_NBYTES_MAX = 1 << 15
"""How long the names of all metrics of a step may be together."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A folder on other storage, or a place in an object store, to which ``attach(..., tiers=[...])`` sends whole
    checkpoints, in a process of its own: ``lightck.Tier("/ckpt/run7", every="5min", keep_last=3)``, or
    ``lightck.Tier("s3://bucket/run7", every="1h", keep_last=3)`` (with ``pip install 'lightck[stores]'``).

    ``recover(root)`` reads them, and ``attach(..., resume=True, tiers=[...])`` continues from the newest one if the
    pool is lost.

    Args:
        root: the folder, which is made if the folder above it exists; or a URL: ``s3://``, ``gs://`` or ``az://``. It
            holds the checkpoints of one run only.
        every: how often a checkpoint is sent: a time (``"30s"``, ``"5min"``, ``"1h"``: the newest checkpoint then), or
            a number of updates (``every=1000``: the first checkpoint that is committed at step 1000 or later, and so
            on). In any case the newest checkpoint is sent when the session is closed, and when the training was killed.
        keep_last: how many of the newest checkpoints stay, 2 or more; None: all stay. The others are removed, each an
            hour after a newer one has replaced it, so that whoever reads it has time.
        keep_every: checkpoints whose step is a multiple of this number are sent, and stay besides the newest ones. Goes
            with ``keep_last``.
        keep_best: ``("val_loss", 3, "min")``: the checkpoint of each step with ``session.log(val_loss=...)`` is sent,
            and the three with the smallest values stay besides the newest ones; with ``"max"`` those with the largest.
            Checkpoints of earlier sessions of the run count too. Goes with ``keep_last``.
        rate: at most so many bytes are sent in a second: ``"200MB/s"``, or a number; None: as many as the tier takes.
            In a group each rank sends so many. The limit ends where time is short: when a signal announces the end of
            the training (``preemption``), and when the training was killed. ``close()`` keeps to it.
        spare_slot: whether the pool gets one more slot (two with ``keep_every`` or ``keep_best``), each as large as the
            state, so that the training never waits, and never overwrites a checkpoint, while one is sent. All tiers
            share these slots.
        reread: the time in which everything in this tier is read again once, a piece now and then, and compared with
            its checksums; the pool too. What is damaged is written anew from another copy, or is reported in a warning.
            None: nothing is read again.
        format: None: whole checkpoints, from which a training goes on exactly. ``"safetensors"``: files for other
            programs, ``step-00001000.safetensors`` and so on; ``every`` is then a number of updates, and only
            ``keep_last`` and ``what`` count.
        what: with ``format="safetensors"``: ``"model"``, or ``"all"`` (model, optimizer, state and random states).
        compress: ``"zstd"`` or ``"lz4"`` (with ``pip install 'lightck[compression]'``): tensors are compressed without
            loss on their way; None: they are not. zstd makes fp32 state about 1.2 times smaller and bf16 state about
            1.5 times, and takes 2 to 4 s of a processor for a GB; lz4 gains two thirds of that, and takes less. The
            name is stored with each object, so a reader needs the extra and no option.
        options: with a URL: what the store needs beside it, by the names of ``obstore``: ``{"endpoint": "https://...",
            "region": "eu-central-1", "server_side_encryption": "AES256"}``. Credentials come from the environment or
            the machine.
    """

    root: str | os.PathLike[str]
    _: KW_ONLY
    every: int | str
    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: tuple[str, int, str] | None = None
    rate: int | float | str | None = None
    spare_slot: bool = True
    reread: str | None = "24h"
    format: str | None = None
    what: str = "model"
    compress: str | None = None
    options: Options | None = field(default=None, repr=False, hash=False)

    def __post_init__(self) -> None:
        root = os.fspath(self.root)
        if not isinstance(root, str) or not root or "\0" in root:
            raise ValueError(f"Tier({self.root!r}): the first argument is the path of a folder, or a URL.")
        refuse_unusable_root(self.root, self.options)
        if self.options is not None:
            object.__setattr__(self, "options", dict(self.options))  # what the user does to it later changes nothing
        if type(self.every) is int:
            is_valid = self.every >= 1
        else:
            is_valid = isinstance(self.every, str) and seconds_of(self.every) is not None
        if not is_valid:
            raise ValueError(
                f'Tier(every={self.every!r}): `every` is a time ("30s", "5min", "1h"), or a number of updates, an int '
                "of at least 1."
            )
        if self.rate is not None and bytes_per_second_of(self.rate) is None:
            raise ValueError(
                f'Tier(rate={self.rate!r}): `rate` is bytes per second: "200MB/s", "50kB/s", "1.5GiB/s", or a number '
                "above 0."
            )
        if self.reread is not None and (not isinstance(self.reread, str) or seconds_of(self.reread) is None):
            raise ValueError(
                f'Tier(reread={self.reread!r}): `reread` is a time ("30min", "24h"), or None: nothing is read again.'
            )
        if type(self.spare_slot) is not bool:
            raise TypeError(f"Tier(spare_slot={self.spare_slot!r}): pass True or False.")
        if self.compress is not None and self.compress not in CODECS:
            raise ValueError(f'Tier(compress={self.compress!r}): `compress` is None, "zstd" or "lz4".')
        if self.format is None:
            self._check_retention()
        elif self.format == _SAFETENSORS:
            self._check_safetensors()
        else:
            raise ValueError(f'Tier(format={self.format!r}): `format` is None or "safetensors".')

    def _check_retention(self) -> None:
        if self.what != "model":
            raise ValueError('Tier(what=...) goes with format="safetensors". A tier holds whole checkpoints.')
        for name, value, least in (("keep_last", self.keep_last, 2), ("keep_every", self.keep_every, 1)):
            if value is not None and (type(value) is not int or value < least):
                raise ValueError(f"Tier({name}={value!r}): `{name}` is an int of at least {least}, or None.")
        if self.needs_specific_steps and not self.spare_slot:
            raise ValueError(
                "Tier(spare_slot=False) with keep_every= or keep_best=: the checkpoint of exactly one step can be sent "
                "only if it is held in a slot until then. Leave out spare_slot=False."
            )
        if self.keep_best is not None:
            _check_best(self.keep_best)
        if self.needs_specific_steps and self.keep_last is None:
            given = "keep_every=" if self.keep_every is not None else "keep_best="
            raise ValueError(
                f"Tier({given}) without keep_last=: all checkpoints stay then, so {given} would keep no other. Pass "
                "keep_last=2 too, or a larger number."
            )

    def _check_safetensors(self) -> None:
        if is_url(self.root):
            raise ValueError('Tier(format="safetensors") writes files into a folder. Pass the path of one.')
        others = self.keep_every, self.keep_best, self.rate, self.compress
        has_others = any(each is not None for each in others) or self.reread != "24h" or not self.spare_slot
        if has_others or type(self.every) is not int:
            raise ValueError(
                'Tier(format="safetensors") takes every= as a number of updates, keep_last= and what=, and no other '
                "option."
            )
        self.as_keep()

    def drain_command(self, pool: str) -> str:
        """Return the command that sends the newest checkpoint of a pool to this tier."""
        place = directory_of_group(pool) or pool  # the checkpoints of a group are sent together
        compress = f" --compress {self.compress}" if self.compress else ""
        return f"lightck drain {place} {self.path}{compress}{' --store-option KEY=VALUE' if self.options else ''}"

    @property
    def is_export(self) -> bool:
        """Whether files for other programs are written, and no whole checkpoints."""
        return self.format is not None

    def as_keep(self) -> Keep:
        """Return the same as a ``Keep``."""
        assert isinstance(self.every, int), "checked"
        return Keep(every=self.every, to=self.root, last=self.keep_last, what=self.what)

    @property
    def path(self) -> str:
        """The absolute path of the folder, or the URL."""
        return root_of(self.root)

    @property
    def every_seconds(self) -> float | None:
        """The time between two checkpoints; None if ``every`` is a number of updates."""
        return seconds_of(self.every) if isinstance(self.every, str) else None

    @property
    def bytes_per_second(self) -> float | None:
        """The largest rate; None: without a limit."""
        return None if self.rate is None else bytes_per_second_of(self.rate)

    @property
    def reread_seconds(self) -> float | None:
        """The time in which everything is read again; None: never."""
        return None if self.reread is None else seconds_of(self.reread)

    @property
    def every_steps(self) -> int | None:
        """The number of updates between two checkpoints; None if ``every`` is a time."""
        return self.every if isinstance(self.every, int) else None

    @property
    def needs_specific_steps(self) -> bool:
        """Whether the checkpoints of specific steps must be sent, and not only any one when it is due."""
        return self.keep_every is not None or self.keep_best is not None


def _check_best(best: object) -> None:
    if isinstance(best, tuple) and len(best) == 3:
        metric, n, mode = best
        if isinstance(metric, str) and metric and type(n) is int and n >= 1 and mode in ("min", "max"):
            return
    raise ValueError(
        f'Tier(keep_best={best!r}): `keep_best` is a tuple: (name of a metric, how many, "min" or "max"), for example '
        '("val_loss", 3, "min").'
    )


def n_spare_slots(tiers: Sequence[Tier]) -> int:
    """Return how many slots a pool needs more because of its tiers: one that the drain holds, and one for a checkpoint
    that must be sent and waits until the drain is ready."""
    if not any(each.spare_slot for each in tiers):
        return 0
    return 2 if any(each.needs_specific_steps for each in tiers) else 1


def checked_tiers(tiers: object) -> tuple[Tier, ...]:
    """Return the ``tiers=`` of ``attach`` as a tuple. Raises ``TypeError`` or ``ValueError``."""
    if tiers is None:
        return ()
    if isinstance(tiers, Tier) or not isinstance(tiers, Sequence) or not all(isinstance(each, Tier) for each in tiers):
        raise TypeError(f'tiers={tiers!r} is no list of tiers. Pass tiers=[lightck.Tier("/ckpt/run7", every="5min")].')
    found = tuple(tiers)
    paths = [each.path if is_url(each.path) else os.path.realpath(each.path) for each in found]
    if len(set(paths)) < len(paths):
        raise ValueError("Two tiers name the same folder or URL. Give each one of its own.")
    if sum(each.is_export for each in found) > 1:
        raise ValueError('Only one tier can have format="safetensors".')
    return found


def checked_metrics(metrics: Mapping[str, SupportsFloat]) -> dict[str, float]:
    """Return the metrics as floats; a number that no float can hold is infinite. Raises ``TypeError`` for what is no
    number, and ``ValueError`` for too many."""
    found = {}
    for name, value in metrics.items():
        try:
            if isinstance(value, (str, bytes, bool)):
                raise TypeError
            detach = getattr(value, "detach", None)  # torch warns of a tensor that is part of a graph
            found[name] = float(value if detach is None else detach())
        except OverflowError:
            found[name] = math.inf
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"log({name}={value!r}): a metric is a number. Pass float(...) of it.") from None
    if sum(len(name.encode()) + 32 for name in found) > _NAMES_NBYTES_MAX:
        raise ValueError(f"log() got {len(found)} metrics, whose names are too long together. Log fewer of them.")
    return found
