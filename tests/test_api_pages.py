"""The API pages have every public name, and each says what it is.

The pages are written by ``website/api.py`` (which needs no mkdocs to be asked) and filled from docstrings, so a name is
on them when a page names it and it has a docstring. What comes out is looked at by ``website/check.py``, in CI.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import lightck
from lightck import errors

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def api() -> ModuleType:
    """``website/api.py``, with nothing in the place of mkdocs where that is not installed."""
    for name in ("mkdocs.config.defaults", "mkdocs.structure.files", "mkdocs.structure.pages"):
        try:
            importlib.import_module(name)
        except ImportError:
            for part in ("mkdocs", name.rpartition(".")[0], name):
                sys.modules.setdefault(part, ModuleType(part))
            for stands_for in ("MkDocsConfig", "File", "Files", "Page"):
                setattr(sys.modules[name], stands_for, object)
    spec = importlib.util.spec_from_file_location("website_api", ROOT / "website" / "api.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["website_api"] = module
    spec.loader.exec_module(module)
    return module


def named(text: str) -> list[str]:
    return re.findall(r"^::: (\S+)", text, re.M)


def found_at(path: str) -> object:
    """The object of this dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def error_classes() -> set[str]:
    found = {name for name, it in vars(errors).items() if isinstance(it, type) and issubclass(it, errors.LightckError)}
    return {name for name in found if not name.startswith("_")}


def members(owner: type) -> Iterator[tuple[str, object]]:
    """Public methods and properties of lightck's own, inherited ones too; fields and their values are none."""
    for base in owner.__mro__:
        if base.__module__.split(".")[0] == "lightck":
            for name, it in vars(base).items():
                is_called = inspect.isfunction(it) or isinstance(it, (property, classmethod, staticmethod))
                if is_called and not name.startswith("_"):
                    yield name, it


def test_every_public_name_has_a_page(api):
    on_pages = [path for text in api.pages().values() for path in named(text)]
    assert {f"lightck.{name}" for name in lightck.__all__ if name != "LightckError"} <= set(on_pages)
    assert len(on_pages) == len(set(on_pages)), "a name stands on two pages"
    assert set(api.public_names()) == set(lightck.__all__)
    assert {name for group in (*api.GROUPS.values(), api.ERRORS) for name in group.names} == set(lightck.__all__)


def test_every_error_has_its_place(api):
    assert {path.rpartition(".")[2] for path in named(api.pages()["api/errors.md"])} - {"errors"} == error_classes()


def test_what_pages_name_exists_and_says_what_it_is(api):
    for text in api.pages().values():
        for path in named(text):
            it = importlib.import_module(path) if path == "lightck.errors" else found_at(path)
            assert "__doc__" not in vars(it) or it.__doc__, f"{path} has no docstring"
            assert it.__doc__, f"{path} has no docstring"
            assert not it.__doc__.startswith(f"{getattr(it, '__name__', '')}("), (
                f"{path}: its docstring is dataclass's own"
            )


def test_every_public_method_says_what_it_does():
    seen = 0
    """Of what has a public name. Pages leave out what has no docstring of classes that calls return."""
    public = {name: getattr(lightck, name) for name in lightck.__all__} | {
        n: getattr(errors, n) for n in error_classes()
    }
    for path, it in public.items():
        for name, member in members(it) if isinstance(it, type) else ():
            seen += 1
            assert inspect.getdoc(member), f"{path}.{name} has no docstring"
    assert seen >= 25


def test_the_overview_names_all_of_it(api):
    overview = api.pages()["api/index.md"]
    paths = {path for key, text in api.pages().items() if key != "api/index.md" for path in named(text)}
    for path in paths - {"lightck.errors"}:
        assert f"][{path}]" in overview, path
