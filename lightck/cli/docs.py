"""``lightck docs``: prints a page of the documentation, which is installed with lightck."""

from __future__ import annotations

from pathlib import Path

import click

from lightck.cli.base import FAILED, OK, Command, print_error, usage_error
from lightck.cli.text import columns, print_line

PACKAGE = Path(__file__).resolve().parents[1]


@click.command("docs", cls=Command, short_help="Print a page of the documentation.")
@click.argument("page", required=False)
def command(page: str | None) -> int:
    """Print the page PAGE of the documentation, or the list of all pages."""
    folder = pages_folder()
    if folder is None:
        print_error("The pages of the documentation are missing in this copy of lightck. Install lightck again.")
        return FAILED
    pages = {path.stem: path for path in sorted(folder.glob("*.md"), key=lambda path: path.stem)}
    if page is None:
        for line in columns([(name, _title(path)) for name, path in pages.items()]):
            print_line(line)
        print_line()
        print_line("lightck docs PAGE prints one of these pages.")
        return OK
    chosen = pages.get(page.removesuffix(".md"))
    if chosen is None:
        usage_error(f"There is no page {page!r}. The pages are: {', '.join(pages)}.")
    for line in chosen.read_text(encoding="utf-8").splitlines():
        print_line(line)
    return OK


def pages_folder() -> Path | None:
    """Return the folder of the pages: ``docs`` inside an installed package, or beside the package in a source tree.
    None if neither exists."""
    for folder in (PACKAGE / "docs", PACKAGE.parent / "docs"):
        if (folder / "loops.md").is_file():
            return folder
    return None


def _title(page: Path) -> str:
    with page.open(encoding="utf-8") as file:
        return file.readline().lstrip("#").strip()
