"""``python -m crash CAMPAIGN``: runs a campaign and prints its counts; exit status 1 if a promise was broken."""

from __future__ import annotations

import secrets
import sys
import tempfile
import time
from pathlib import Path

import click

from crash import campaigns, evidence
from crash.campaign import Campaign, Order


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("name", metavar="[CAMPAIGN]", type=click.Choice(campaigns.NAMES), required=False)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    help="The seed of the trials. [default: random]",
)
@click.option("--count", type=click.IntRange(1), metavar="N", help="The number of trials. [default: that of CI]")
@click.option("--long", "is_long", is_flag=True, help="Run as many trials as for the results in docs/evidence.")
@click.option("--trial", type=click.IntRange(0), metavar="K", help="Run only this trial, to repeat a finding.")
@click.option("--backend", type=click.Choice(["file", "pmdk"]), default="file", show_default=True, help="Kind of pool.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(exists=True, file_okay=False),
    metavar="DIR",
    help="The folder for pools. [default: /dev/shm]",
)
@click.option(
    "--out",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write the result to CAMPAIGN-BACKEND.json in this folder.",
)
def main(
    name: str | None,
    seed: int | None,
    count: int | None,
    is_long: bool,
    trial: int | None,
    backend: str,
    folder: str | None,
    out: Path | None,
) -> None:
    """Inject faults until something breaks. Without CAMPAIGN: list them."""
    if name is None:
        for each in map(campaigns.named, campaigns.NAMES):
            click.echo(f"{each.name:16} {each.summary}")
        return
    campaign = campaigns.named(name)
    if backend not in campaign.backends:
        raise click.UsageError(f"{name} is not for {backend} pools. Pass --backend {' or '.join(campaign.backends)}.")
    count = count or (campaign.long if is_long else campaign.small)
    trials = range(count) if trial is None else range(trial, trial + 1)
    seed = secrets.randbelow(2**31) if seed is None else seed
    sys.exit(_play(campaign, seed, trials, backend, folder or "/dev/shm", out))


def _play(campaign: Campaign, seed: int, trials: range, backend: str, folder: str, out: Path | None) -> int:
    click.echo(f"{campaign.name}: seed {seed}, {len(trials)} trials, {backend} pools")
    with tempfile.TemporaryDirectory(prefix="lightck-", dir=folder) as pools:
        order = Order(seed, trials, backend, pools, lambda line: click.echo(line, err=True))
        begun = time.monotonic()
        tally = campaign.run(order)
    result = evidence.result(campaign.name, order, tally, time.monotonic() - begun)
    for what, number in result.counts.items():
        click.echo(f"  {number:>12,} {what}")
    for finding in result.findings:
        click.echo(f"  FOUND {finding}")
    click.echo(f"{len(result.findings)} findings in {result.seconds} s")
    if out is not None:
        click.echo(f"kept as {evidence.keep(out, result)}")
    return 1 if result.findings else 0


if __name__ == "__main__":
    main(prog_name="python -m crash")
