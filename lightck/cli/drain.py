"""``lightck drain``: sends to the tiers what a training's own drain did not send; runs once, or beside the training."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from lightck.cli.base import (
    BAD,
    DURATION,
    FAILED,
    OK,
    POOL,
    Command,
    compress_option,
    ended_by_signals,
    json_option,
    message_of,
    print_error,
    print_progress,
    rate_option,
    signals_handled,
    store_option,
    usage_error,
)
from lightck.cli.open_tier import is_tier
from lightck.cli.text import count, print_json, print_json_line, print_line, size
from lightck.errors import LightckError

if TYPE_CHECKING:
    from lightck.tiers.follow import Follower, Report
    from lightck.tiers.late_drain import Delivered

_ENDING = (signal.SIGTERM, signal.SIGHUP)


@click.command("drain", cls=Command, short_help="Send to a tier what a killed training did not send.")
@click.argument("pool", type=POOL)
@click.argument("dests", metavar="DEST...", nargs=-1, required=True)
@click.option(
    "--follow",
    is_flag=True,
    help="Start before the training, and stay beside it: whenever the training and its own drain are gone, send the "
    "newest checkpoint. SIGTERM or Ctrl-C ends this command, after the newest checkpoint is in the tiers; a second "
    "Ctrl-C ends it at once.",
)
@click.option(
    "--wait",
    "wait_seconds",
    type=DURATION,
    default="10min",
    show_default=True,
    help="How long to wait for the training's own drain, if that still runs; and, when --follow ends, for a tier that "
    "fails.",
)
@rate_option
@compress_option
@store_option
@json_option
def command(
    pool: str,
    dests: tuple[str, ...],
    follow: bool,
    wait_seconds: float,
    bytes_per_second: float | None,
    compress: str | None,
    store_options: dict[str, str],
    as_json: bool,
) -> int:
    """Send the newest checkpoint of POOL to each tier DEST that lacks it: what the drain of its training would have
    sent, had it not been killed too.

    POOL is a pool, or the directory of a group of ranks, and DEST a tier that the training was given (attach(...,
    tiers=[...])). This command claims no tier; for a training without tiers, use lightck copy. POOL is only read.
    """
    import lightck
    from lightck.tiers.follow import Follower, Report
    from lightck.tiers.late_drain import LateDrain, Pools
    from lightck.tiers.open_store import is_url, open_store

    if is_tier(pool):
        usage_error(f"{pool!r} is a tier, and the first argument is the pool of a training.")
    try:
        stores = [open_store(each, store_options if is_url(each) else None) for each in dests]
    except (ValueError, TypeError) as err:
        usage_error(str(err))
    pools = Pools(pool)
    drains = [LateDrain(pools, store, lightck.__version__, bytes_per_second, compress) for store in stores]
    if follow:
        return _follow(Follower(pools, drains, _report(as_json), wait_seconds))
    done: list[Delivered] = []
    report = Report(done.append if as_json else _print, print_progress, print_error)
    with ended_by_signals():
        Follower(pools, drains, report, wait_seconds).finish(tries_again=False)
    if as_json:
        print_json({"pool": pools.path, "checkpoints": [asdict(each) for each in done]})
    return OK


def _report(as_json: bool) -> Report:
    from lightck.tiers.follow import Report

    sent = (lambda done: print_json_line(asdict(done))) if as_json else _print
    return Report(sent, print_progress, print_error)


def _print(done: Delivered) -> None:
    parts = f" (the parts of {count(done.ranks, 'rank')})" if done.ranks > 1 else ""
    if not done.sent_nbytes:
        print_line(f"step {done.step} is in {done.tier} already{parts}")
        return
    print_line(f"step {done.step}: {size(done.nbytes)} in {done.tier}, {size(done.sent_nbytes)} were written{parts}")


def _follow(follower: Follower) -> int:
    """Follow until a signal comes, and return the exit status."""
    from lightck.tiers.drain_messages import ANNOUNCING_SIGNALS
    from lightck.tiers.drain_process import NICENESS

    with contextlib.suppress(OSError):
        os.nice(NICENESS)

    def interrupted(number: int, frame: object) -> None:
        if follower.is_stopping:
            raise KeyboardInterrupt
        follower.stop()

    def ignored(*_: object) -> None:
        """A batch system announces the end of a job by such a signal, to all processes: the training acts on it."""

    announcing = [each for each in ANNOUNCING_SIGNALS if each not in (*_ENDING, signal.SIGINT, signal.SIGQUIT)]
    with (
        signals_handled(lambda *_: follower.stop(), *_ENDING),
        signals_handled(interrupted, signal.SIGINT),
        signals_handled(ignored, *announcing),
    ):
        try:
            follower.follow()
        except LightckError as err:
            print_error(message_of(err))
            return BAD if isinstance(err, Command.damage) else FAILED
    return OK
