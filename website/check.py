"""Whether the built site holds together: python website/check.py build/site. Exit status 1 where it does not.

Each link and each anchor of each page leads somewhere within the site; nothing that a page loads lies on another
server; and no list or table was left as plain text, which is how Markdown fails: quietly.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("object", "data"), ("source", "src")}
LEFT_AS_TEXT = re.compile(r"^\s*([-*] |\d+\. |\|.*\|\s*$)|\]\[[\w.]+\]|:(func|class|mod|meth|attr):", re.M)
FAR = re.compile(r"(https?:)?//", re.I)


class Facts(HTMLParser):
    """What a page has: anchors, links, what it loads, and paragraphs whose text looks like Markdown."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.paragraphs: list[str] = []
        self._inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            if (tag, name) == ("a", "href") and value:
                self.links.append(value)
            if (tag, name) in LOADS and value and ("rel", "canonical") not in attrs:
                self.loads.append(value)
        if tag == "p":
            self.paragraphs.append("")
        self._inside = [*self._inside, tag] if tag in ("p", "code", "pre") else self._inside

    def handle_endtag(self, tag: str) -> None:
        if tag in self._inside:
            del self._inside[len(self._inside) - 1 - self._inside[::-1].index(tag) :]

    def handle_data(self, data: str) -> None:
        if "p" in self._inside and not {"code", "pre"} & set(self._inside):
            self.paragraphs[-1] += data


def problems(site: Path) -> Iterator[str]:
    pages = {path.resolve(): Facts(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    if len(pages) < 2:
        yield f"{site}: no site lies here"
    for path, facts in pages.items():
        name = path.relative_to(site.resolve())
        if name.name == "404.html":
            continue  # its links are from the root of a server
        for address in facts.loads:
            if FAR.match(address):
                yield f"{name}: loads {address} from elsewhere"
        for address in [*facts.links, *facts.loads]:
            if problem := _leads_nowhere(address, path, pages):
                yield f"{name}: {address}: {problem}"
        for text in facts.paragraphs:
            if LEFT_AS_TEXT.search(text):
                yield f"{name}: Markdown is left as text in a paragraph: {text.strip()[:120]!r}"


def _leads_nowhere(address: str, page: Path, pages: dict[Path, Facts]) -> str | None:
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return None
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if target.is_dir():
        target /= "index.html"
    if not target.exists():
        return "no such file"
    anchor = unquote(parts.fragment)
    if anchor and target in pages and anchor not in pages[target].anchors:
        return "no such anchor"
    return None


def main() -> int:
    found = list(problems(Path(sys.argv[1])))
    for line in found:
        sys.stderr.write(line + "\n")
    sys.stdout.write(
        f"{sys.argv[1]}: {len(found)} problems\n" if found else f"{sys.argv[1]}: every link leads somewhere\n"
    )
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
