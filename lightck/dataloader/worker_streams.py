"""The random streams of a loader's workers: warnings at a resume that does not continue them.

A worker seeds its generators when it starts, and draws from them for random augmentation. A replay fetches the earlier
batches of the pass again, which brings new workers to the same place in their streams. It does not do so for two kinds
of loaders: one whose persistent workers drew in earlier passes, which are not replayed, and a stateful one, which skips
the earlier batches by its own state. The state of torchdata's loader holds no random states of workers.
"""

from __future__ import annotations

import logging

from torch.utils.data import DataLoader

from lightck.dataloader.position import Position

log = logging.getLogger("lightck")


def warn_that_persistent_workers_begin_anew(name: str) -> None:
    """Warn that the restored pass is a later one of persistent workers, whose earlier passes are not replayed."""
    log.warning(
        "lightck: loader %r has persistent workers, and the training goes on in a later pass than the first "
        "one of these workers. The workers of the interrupted run are gone, and new ones are started. The "
        "order of the samples is exact, but random augmentation and other state in the workers is not. "
        "persistent_workers=False makes these exact too",
        name,
    )


def warn_if_stateful_workers_begin_anew(name: str, dataloader: DataLoader[object] | None, position: Position) -> None:
    """Warn if a stateful loader with workers goes on in mid-pass, with batches left. Whether its dataset draws random
    numbers is unknown. ``dataloader``: the DataLoader that fetches."""
    has_workers = dataloader is not None and dataloader.num_workers > 0
    if has_workers and position.state.given and not position.has_given_all:
        log.warning(
            "lightck: loader %r has workers, and goes on in the middle of a pass by its own state_dict(). Such a state "
            "holds no random states of workers. The workers of the interrupted run are gone, and new ones are started. "
            "The order of the samples is exact, but random augmentation in the workers is not (unless the dataset has "
            "a state_dict() that holds its generator). A plain torch.utils.data.DataLoader makes it exact too",
            name,
        )
