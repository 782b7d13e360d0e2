"""``lightck copy``: sends checkpoints of a pool to a tier, or makes a pool from a checkpoint of a tier."""

from __future__ import annotations

import json
import signal
import threading
from typing import TYPE_CHECKING

import click

from lightck.cli.base import (
    DURATION,
    FAILED,
    OK,
    POOL,
    Command,
    compress_option,
    ended_by_signals,
    json_option,
    print_error,
    print_progress,
    rate_option,
    signals_handled,
    step_option,
    store_option,
)
from lightck.cli.output import progress_bar
from lightck.cli.text import Facts, print_json, print_line, size
from lightck.errors import NoCheckpointError, PoolError, PoolNotFoundError, TierClaimedError, TierError

if TYPE_CHECKING:
    from lightck.tiers.pool_sender import Copied, PoolSender


@click.command("copy", cls=Command, short_help="Send checkpoints to a tier, or fetch one from it.")
@click.argument("source", type=POOL)
@click.argument("dest", type=click.Path())
@step_option
@click.option(
    "--every",
    type=DURATION,
    help="Send the newest checkpoint again and again: 30s, 5min, 1h. At SIGTERM or Ctrl-C the newest one is sent, and "
    "the command ends.",
)
@click.option(
    "--keep-last",
    type=click.IntRange(min=2),
    help="With --every: remove all but the newest N checkpoints of this run from the tier, each an hour after a newer "
    "one has replaced it. [default: all stay]",
)
@rate_option
@compress_option
@store_option
@json_option
def command(
    source: str,
    dest: str,
    step: int | None,
    every: float | None,
    keep_last: int | None,
    bytes_per_second: float | None,
    compress: str | None,
    store_options: dict[str, str],
    as_json: bool,
) -> int:
    """Send the newest checkpoint of the pool SOURCE (or the checkpoint of --step N) to the tier DEST: a folder that is
    a tier, is empty or does not exist, or a URL of an object store (s3://BUCKET/PREFIX). SOURCE is only read, and may
    be in use.

    If SOURCE is a tier, make the pool DEST, which must not exist, from its newest complete checkpoint (or that of
    --step N); if the tier is that of a group of ranks, DEST is a directory with their pools. What is made is verified
    by the checksums that the training computed, and attach(..., resume=True) goes on in it.
    """
    import lightck
    from lightck.tiers.copying import copy_from_tier, copy_to_tier, pool_sender
    from lightck.tiers.decisions import Retention
    from lightck.tiers.open_store import is_tier

    if every is not None and step is not None:
        raise click.UsageError("--every sends the newest checkpoint, and --step N a certain one. Pass one of them.")
    if every is None and keep_last is not None:
        raise click.UsageError("--keep-last N goes with --every: a single copy removes nothing.")
    from_options, to_options = _options_of(source, store_options), _options_of(dest, store_options)
    from_tier = is_tier(source, from_options)
    if from_tier and bytes_per_second is not None:
        raise click.UsageError("--rate limits what is sent to a tier, and SOURCE is a tier.")
    if from_tier and compress is not None:
        raise click.UsageError("--compress is for what is sent to a tier, and a pool is never compressed.")
    if every is not None:
        if from_tier:
            raise click.UsageError("--every sends from a pool, and SOURCE is a tier.")
        retention, by = Retention(keep_last=keep_last), lightck.__version__
        sender = pool_sender(
            source, dest, by, retention, options=to_options, codec=compress, bytes_per_second=bytes_per_second
        )
        return _repeat(sender, source, every, as_json)
    with ended_by_signals():
        if from_tier:
            done = copy_from_tier(source, dest, step=step, progress=progress_bar, options=from_options)
        else:
            done = copy_to_tier(
                source,
                dest,
                step=step,
                written_by=lightck.__version__,
                progress=progress_bar,
                options=to_options,
                bytes_per_second=bytes_per_second,
                codec=compress,
            )
    _print(done, as_json)
    return OK


def _options_of(place: str, options: dict[str, str]) -> dict[str, str]:
    from lightck.tiers.open_store import is_url

    return options if is_url(place) else {}


def _print(done: Copied, as_json: bool, *, in_one_line: bool = False) -> None:
    if as_json:
        facts: Facts = {"step": done.step, "path": done.path, "nbytes": done.nbytes, "sent_nbytes": done.sent_nbytes}
        facts |= {"rejected": list(done.rejected), "notes": list(done.notes)}
        if in_one_line:
            print_line(json.dumps(facts))
        else:
            print_json(facts)
        return
    for each in done.rejected:
        print_line(f"skipped: {each}")
    written = "" if done.sent_nbytes >= done.nbytes else f" ({size(done.sent_nbytes)} were written)"
    print_line(f"step {done.step}: {size(done.nbytes)} in {done.path}{written}")
    for note in done.notes:
        print_line(note)


def _repeat(sender: PoolSender, source: str, every: float, as_json: bool) -> int:
    """Send the newest checkpoint every ``every`` seconds, until a signal comes. A failure is printed once, and the next
    round tries again. If another process has claimed the tier, the command ends."""
    last_message, has_sent, stop = "", False, threading.Event()

    def ends(*_: object) -> None:
        stop.set()
        sender.lift_rate()

    with signals_handled(ends, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        while True:
            is_last = stop.is_set()
            try:
                done = sender.send()
                if done is not None:
                    has_sent = True
                    _print(done, as_json, in_one_line=True)
                sender.retain()
                last_message = ""
            except TierClaimedError as err:
                print_error(str(err))
                return FAILED
            except (PoolError, TierError) as err:
                is_empty = isinstance(err, (PoolNotFoundError, NoCheckpointError))
                is_early = is_empty and not has_sent and not is_last
                text = f"waiting for the first checkpoint in {source}" if is_early else str(err)
                if text != last_message:
                    (print_progress if is_early else print_error)(text)
                last_message = text
                if is_last:
                    return FAILED
            if is_last:
                return OK
            stop.wait(every)
