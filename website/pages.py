"""The pages of the site: docs/ as it is, a few files from outside of it, and an order for all of them.

A hook of mkdocs. Links are written for the repository, where pages name files by their place in it; here they are
turned to the page that a file became, or to the repository where it became none. What no section names is an error.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks.pages")
ROOT = Path(__file__).resolve().parents[1]

OUTSIDE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "bench/README.md": "bench/index.md",
    "bench/results/README.md": "bench/results.md",
    "bench/results/trust.md": "bench/trust.md",
}
"""File of the repository -> page of the site."""
ASSETS = {"website/iframe-worker.js": "assets/iframe-worker.js", "website/site.css": "assets/site.css"}

SECTIONS: dict[str, dict[str, str]] = {
    "Begin": {"index": "", "start": "Start", "migrate*": "", "wiring*": "Test your wiring", "platforms*": ""},
    "Train": {
        "resume*": "Resume",
        "loops*": "",
        "own-state*": "",
        "optimizers*": "Optimizers",
        "tensors*": "Tensors",
        "gradients": "Gradients instead of the state",
        "gradients-tuning*": "Choose the strategy, base_every and interval",
        "gradients-ranks*": "Gradients in a group of ranks",
        "topk*": "Compress the gradients",
        "replica*": "A copy that makes the updates too",
        "frameworks*": "Frameworks",
        "transformers*": "Hugging Face Trainer",
        "accelerate*": "Accelerate",
        "lightning*": "Lightning and Fabric",
        "deepspeed*": "DeepSpeed",
        "dcp*": "torch.distributed.checkpoint",
        "torchtitan*": "torchtitan",
        "devices*": "Devices",
        "ranks": "Several ranks",
        "ranks-hosts*": "Hosts and new files",
        "split*": "Shares of the ranks of a host",
        "lost-pool*": "A lost pool",
        "peer-copies*": "Copies on another host",
        "worlds*": "Another number of ranks",
        "launchers*": "Launchers",
        "layout*": "Tensor parallel without DTensors",
        "read-parts*": "Read a part",
    },
    "Keep": {
        "medium*": "Choose a medium",
        "history*": "Keep a history",
        "tiers": "Tiers",
        "tiers-ranks*": "Tiers of a group of ranks",
        "object-stores*": "Object stores",
        "tier-compression*": "Compressed tiers",
        "rereading*": "Damage is found early",
        "tier-commands*": "Tiers from the shell",
        "drain*": "When training and drain are killed together",
        "preemption*": "Preemption",
        "watching*": "Watch a training",
        "backups*": "",
        "tools*": "",
        "json": "",
        "json-tiers*": "JSON of tiers and watch",
        "machine*": "",
        "trace*": "",
    },
    "Trouble": {"trouble*": "", "slow-steps*": "", "unannounced-writes*": ""},
    "Trust": {
        "guarantees*": "",
        "power-cut*": "",
        "bench/*": "Benches",
        "evidence/*": "Evidence",
    },
    "Inside": {"how-it-works*": "", "architecture": "", "format*": "", "contributing": "", "changelog": ""},
    "API": {"api/index": "Overview", "api/attach": "", "api/options": "", "api/recover": "", "api/*": ""},
}
"""Section -> patterns of its pages in their order, each with a short title, or none: what the page is headed by. A
folder with a title is a section within."""

_LINK = re.compile(
    r"(?P<code>(?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)(?!`))|\[(?P<text>[^\[\]]*)\]\((?P<target>[^)\s]+)\)", re.S
)
_FENCE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1 *$", re.M | re.S)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The repository's address stands in pyproject.toml, once there is one."""
    known = re.search(r'^Repository = "([^"]+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    config.repo_url = known[1] if known else None
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, uri in (OUTSIDE | ASSETS).items():
        if (ROOT / source).is_file() and files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, content=(ROOT / source).read_text(encoding="utf-8")))
    evidence = [f.src_uri for f in files if f.src_uri.startswith("evidence/")]
    if evidence and files.get_file_from_path("evidence/index.md") is None:
        files.append(File.generated(config, "evidence/index.md", content=_listing(sorted(evidence))))
    config.nav = _nav(files)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = next((s for s, uri in OUTSIDE.items() if uri == page.file.src_uri), f"docs/{page.file.src_uri}")

    def turned(found: re.Match[str]) -> str:
        if found["code"]:
            return found[0]
        target = link(found["target"], source, page.file.src_uri, files, config.repo_url)
        return f"[{found['text']}]({target})" if target else f"`{found['text'].strip('`')}`"

    return _outside_fences(markdown, lambda text: _LINK.sub(turned, text))


def link(target: str, source: str, page: str, files: Files, repository: str | None) -> str | None:
    """Where a link of ``source`` leads from the page that this file became. None: to a file that only the repository
    has, whose address is not known."""
    path, mark, anchor = target.partition("#")
    if not path or re.match(r"[a-z]+:", path):
        return target
    place = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if not (ROOT / place).exists():
        return target  # mkdocs says that it leads nowhere
    uri = OUTSIDE.get(place, place.removeprefix("docs/") if place.startswith("docs/") else "")
    if uri and (ROOT / place).is_dir():
        uri += "/index.md"
    if uri and files.get_file_from_path(uri) is not None:
        return posixpath.relpath(uri, posixpath.dirname(page)) + mark + anchor
    if repository:
        return f"{repository.rstrip('/')}/blob/main/{place}{mark}{anchor}"
    return None


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return re.sub(r"<table>.*?</table>", r'<div class="wide">\g<0></div>', html, flags=re.S)


def _outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    parts, at = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [change(markdown[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, change(markdown[at:])])


def _listing(evidence: list[str]) -> str:
    rows = [f"- [{uri.removeprefix('evidence/')}]({uri.removeprefix('evidence/')})" for uri in evidence]
    return "\n".join(["# Evidence", "", "What the campaigns of `tests/` found, as they wrote it.", "", *rows, ""])


def _nav(files: Files) -> list[Any]:
    left = {f.src_uri for f in files if f.src_uri.endswith(".md")}
    nav: list[Any] = []
    for section, patterns in SECTIONS.items():
        pages: list[Any] = []
        for pattern, title in patterns.items():
            found = sorted(uri for uri in left if fnmatch(str(PurePosixPath(uri).with_suffix("")), pattern))
            left.difference_update(found)
            if title and pattern.endswith("/*"):
                pages += [{title: found}] if found else []
            else:
                pages += [{title: uri} if title and len(found) == 1 else uri for uri in found]
        if pages:
            nav.append({section: pages})
    for uri in sorted(left):
        log.warning("%s is in no section: name it in SECTIONS of website/pages.py", uri)
    return nav
