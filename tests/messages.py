"""Every message that a user can read: errors, warnings, log lines and lines of the commands, in one list.

    python tests/messages.py [room ...]

A message is a string that is raised, logged, warned of or written to a terminal. Parts that are filled in are shown as
``{}``. The list is for reading as a whole; ``test_words.py`` holds it to the glossary.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LIBRARY = Path(__file__).parent.parent / "lightck"
_LOGGED = {"debug", "info", "warning", "error", "critical", "exception", "log", "warn"}
_SAID = {"say", "echo", "secho", "complain", "tell", "trouble", "fail", "option", "argument", "command", "print"}
_TOO_SHORT = 12
"""Characters. Shorter strings are keys and units."""


class Message(NamedTuple):
    file: str
    line: int
    kind: str
    text: str


def messages(root: Path = LIBRARY) -> Iterator[Message]:
    """All messages of the library, by file and line."""
    for path in sorted(root.rglob("*.py")):
        if path.name == "_lck_ffi.py":
            continue
        yield from _of_file(path, path.relative_to(root).as_posix())


def _of_file(path: Path, name: str) -> Iterator[Message]:
    tree = ast.parse(path.read_text())
    found: dict[int, Message] = {}
    for node in ast.walk(tree):
        kind = _kind(node)
        if kind is None:
            continue
        for text in _texts(node):
            found.setdefault(text.lineno, Message(name, text.lineno, kind, _words(text)))
    docstrings = _docstring_lines(tree)
    for node in ast.walk(tree):  # what is put together first and raised later
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and node.lineno not in found.keys() | docstrings:
            words = _words(node)
            if " " in words.strip() and len(words) > 2 * _TOO_SHORT:
                found[node.lineno] = Message(name, node.lineno, "text", words)
    yield from (found[line] for line in sorted(found) if len(found[line].text) >= _TOO_SHORT)


def _kind(node: ast.AST) -> str | None:
    """What a statement does with the strings in it; None: nothing that a user reads."""
    if isinstance(node, ast.Raise):
        return "raised"
    if not isinstance(node, ast.Call):
        return None
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in _LOGGED:
        return "logged"
    if name in _SAID:
        return "said"
    return "raised" if name.endswith("Error") else None


def _texts(node: ast.AST) -> Iterator[ast.Constant | ast.JoinedStr]:
    """The outermost strings below a node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.JoinedStr) or (isinstance(child, ast.Constant) and isinstance(child.value, str)):
            yield child  # type: ignore[misc]
        else:
            yield from _texts(child)


def _words(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_words(part) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return ""


def _docstring_lines(tree: ast.AST) -> set[int]:
    return {
        node.value.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def main() -> None:
    rooms = sys.argv[1:]
    for message in messages():
        if not rooms or message.file.startswith(tuple(rooms)):
            print(f"{message.file}:{message.line} [{message.kind}] {message.text}")


if __name__ == "__main__":
    main()
