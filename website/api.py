"""The pages of the API, made from docstrings: a hook of mkdocs that writes what mkdocstrings then fills.

Every name of ``lightck.__all__`` has to stand in ``GROUPS``; errors are those of ``lightck.errors``. Nothing is
imported: the sources are read, so that neither torch nor the native library has to be there.
"""

from __future__ import annotations

import ast
import logging
import re
from pathlib import Path
from typing import NamedTuple

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks.api")
PACKAGE = Path(__file__).resolve().parents[1] / "lightck"


class Group(NamedTuple):
    """A page: its title, what it says, its public names, and classes that no name stands for but calls return."""

    title: str
    about: str
    names: tuple[str, ...]
    returned: tuple[str, ...] = ()


GROUPS = {
    "attach": Group(
        "Save a training",
        "`attach` makes a session, in which a training is saved and from which it goes on.",
        ("attach", "Session", "Pin", "Stats", "Durability", "preemption"),
        (
            "lightck.session.preemption.Preemption",
            "lightck.dataloader.loader.SessionLoader",
            "lightck.profiler.recording.Recording",
            "lightck.restore.resume.Recovered",
        ),
    ),
    "options": Group(
        "Say how",
        "What `attach` takes for `interval=`, `keep=`, `layout=`, `replicas=`, `staging=`, `strategy=`, `tiers=`.",
        (
            "Auto",
            "Keep",
            "Tier",
            "Replicas",
            "Host",
            "Direct",
            "Device",
            "FullState",
            "Gradients",
            "Replica",
            "TopK",
            "layerwise",
        ),
        (
            "lightck.hooks.layerwise.Layerwise",
            *(
                f"lightck.layout.{name}"
                for name in ("Layout", "Shard", "Fused", "Padded", "Flat", "Replicated", "Average", "rename")
            ),
        ),
    ),
    "recover": Group(
        "Read a pool",
        "What a crash left, to look at or to use elsewhere.",
        ("recover", "Checkpoint", "StoredPiece", "Drift", "export_checkpoint", "Exported"),
        ("lightck.state.rng.RngState",),
    ),
}
ERRORS = Group(
    "Errors", "One tree, in which each class is also the builtin that other code would catch.", ("LightckError",)
)


def public_names() -> list[str]:
    """``lightck.__all__``, read."""
    for node in ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    raise LookupError("lightck/__init__.py has no __all__")


def error_names() -> list[str]:
    """The classes of lightck/errors.py that have a public name, in its order."""
    tree = ast.parse((PACKAGE / "errors.py").read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def pages() -> dict[str, str]:
    """Each page's Markdown by its name."""
    made = {f"api/{key}.md": _page(group) for key, group in GROUPS.items()}
    made["api/errors.md"] = _errors()
    made["api/index.md"] = _index()
    return made


def on_files(files: Files, config: MkDocsConfig) -> Files:
    known = {name for group in (*GROUPS.values(), ERRORS) for name in group.names}
    for name in set(public_names()) ^ known:
        log.warning("lightck.%s: __all__ and GROUPS of website/api.py do not both name it", name)
    for uri, text in pages().items():
        files.append(File.generated(config, uri, content=text))
    return files


def _page(group: Group) -> str:
    blocks = [f"::: lightck.{name}" for name in group.names] + [f"::: {path}" for path in group.returned]
    return "\n\n".join([f"# {group.title}", group.about, *blocks, ""])


def _errors() -> str:
    """The module, whose docstring draws the tree, and each class."""
    module = "::: lightck.errors\n    options:\n      members: false\n      show_root_heading: true"
    return "\n\n".join(["# Errors", module, *(f"::: lightck.errors.{name}" for name in error_names()), ""])


def _index() -> str:
    lines = [
        "# API",
        "",
        "Everything that has a public name. What is not here may change from one version to the next.",
        "",
    ]
    for key, group in {**GROUPS, "errors": ERRORS}.items():
        lines += [f"## [{group.title}]({key}.md)", "", group.about, ""]
        paths = [f"lightck.errors.{n}" for n in error_names()] if key == "errors" else []
        paths = paths or [*(f"lightck.{name}" for name in group.names), *group.returned]
        lines += [f"- [`{path.rpartition('.')[2]}`][{path}]" for path in paths]
        lines.append("")
    return "\n".join(lines)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Errors that are named in code lead to what is said of them."""
    if not page.file.src_uri.startswith("api/") or page.file.src_uri == "api/errors.md":
        return html
    named = re.compile(rf"(?<![\w.])({'|'.join(error_names())})(?!\w)")
    parts, inside = re.split(r"(<[^>]*>)", html), list[str]()
    for i, part in enumerate(parts):
        if tag := re.match(r"<(/?)(code|a|autoref|pre)\b", part):
            inside = inside[:-1] if tag[1] else [*inside, tag[2]]
        elif inside == ["code"]:
            parts[i] = named.sub(r'<a href="errors.html#lightck.errors.\1">\1</a>', part)
    return "".join(parts)
