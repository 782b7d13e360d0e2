"""Which kinds of pool this installation can make and read: the backends, as ``lightck doctor`` shows them."""

from __future__ import annotations

from collections.abc import Iterator

from lightck.cli.checks import OK, Line


def check() -> Iterator[Line]:
    from lightck.pool.backends import BACKENDS

    for name in BACKENDS:
        yield Line(f"backend {name}", OK, "plain files on tmpfs or a disk")
