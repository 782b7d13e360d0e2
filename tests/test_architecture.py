"""The shape of the code: imports go one way, the core knows bytes only, one place writes to the mapping, sizes stay.

``ROOMS`` is the picture of ARCHITECTURE.md as a table: what each room may import of lightck, and nothing else.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightck

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lightck"
NATIVE = ROOT / "native"
OUTSIDE = {"bench": ROOT / "bench", "crash": ROOT / "tests" / "crash"}
"""Rooms outside the package, under the same rules."""

BASE = {"errors", "events", "interrupts", "failure_recording", "stats", "sessions", "_native"}
LOW = BASE | {"layout", "pool", "state"}
ROOMS = {
    # room, or file beside the rooms: what of lightck it may import, beside itself
    "errors": set(),
    "events": set(),
    "interrupts": set(),
    "failure_recording": set(),
    "sessions": {"errors", "events"},
    "stats": {"interrupts"},
    "_lck_ffi": set(),  # made by the build
    "_native": {"_lck_ffi"},
    "ranks": {"errors", "pool"},  # a group of ranks: what it decides (rule, agreement), and how it learns of others
    "pool": BASE,
    "layout": {"errors", "pool.format"},
    "state": BASE | {"layout", "pool.format"},
    "dataloader": BASE | {"state"},
    "hooks": BASE | {"state"},
    "following": LOW | {"dataloader"},
    "restore": LOW | {"dataloader", "following", "ranks"},
    "export": LOW | {"restore"},
    "tiers": LOW | {"export", "ranks.agreed_step", "ranks.directory", "restore"},
    "profiler": LOW | {"export", "hooks"},
    "pipeline": LOW,
    "strategy": {"state", "pipeline.plan", "pipeline.write_table"},  # the words in which it says what is written
    "session": LOW
    | {"dataloader", "following", "hooks", "pipeline", "profiler", "ranks", "restore", "strategy", "tiers"},
    "": BASE | {"export", "hooks", "pipeline", "pool", "restore", "session", "strategy", "tiers"},
    "saving": LOW | {"pipeline", "ranks", "restore", "tiers"},
    "integrations": {
        "",
        "errors",
        "layout",
        "saving",
        "session.fetch_before_attach",
    },  # public names only; and two seams: checkpoints without a session, and what attach will resume
    "demo": BASE | {""},
    "cli": LOW | {"", "demo", "export", "profiler", "ranks", "restore", "tiers"},
    "__main__": {"cli"},
    "crash": LOW | {"", "cli", "pipeline", "restore", "session.pool_file", "session.slowdown", "strategy"},
    "bench": LOW
    | {"", "cli", "integrations", "pipeline", "ranks", "restore", "session.cross_check", "session.group", "tiers"}
    | {"session.steps"},
}

WITHOUT_TORCH = ("pool", "ranks", "errors", "events", "layout", "stats", "_native")
"""Byte-level and plain parts: they never import torch."""

LINES_MAX, FUNCTION_LINES_MAX = 600, 60
"""A limit is there to make you think; one that makes dust of files is too low."""


def files() -> Iterator[Path]:
    """Python files of the package and of the rooms outside it."""
    for folder in (PACKAGE, *OUTSIDE.values()):
        for path in sorted(folder.rglob("*.py")):
            if path.name != "_lck_ffi.py" and "suite" not in path.parts:  # crash/suite: tests like all others
                yield path


def modules() -> Iterator[tuple[str, ast.Module]]:
    """(name without ``lightck.``, syntax tree) of each of them."""
    for path in files():
        root = next((room.parent for room in OUTSIDE.values() if path.is_relative_to(room)), PACKAGE)
        parts = path.relative_to(root).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), ast.parse(path.read_text())


def is_module(name: str) -> bool:
    room = OUTSIDE.get(part_of(name))
    path = (room.parent if room else PACKAGE).joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


def imports(tree: ast.AST) -> Iterator[str]:
    """Absolute names of everything imported, modules where a name is one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                joined = f"{node.module}.{alias.name}"
                inside = joined.removeprefix("lightck.") if joined.split(".")[0] in ("lightck", *OUTSIDE) else ""
                yield joined if inside and is_module(inside) else str(node.module)


def own(tree: ast.AST) -> set[str]:
    """Modules of lightck that are imported, without ``lightck.``, and of the rooms outside it; "" is the package."""
    found = {name for name in imports(tree) if name.split(".")[0] in ("lightck", *OUTSIDE)}
    return {name.removeprefix("lightck").removeprefix(".") for name in found}


def part_of(module: str) -> str:
    return module.split(".")[0]


def is_allowed(module: str, imported: str) -> bool:
    allowed = ROOMS[part_of(module)] | {part_of(module)}
    return any(imported == name or (name and imported.startswith(name + ".")) for name in allowed)


def without_type_checking(tree: ast.Module) -> ast.Module:
    kept = [n for n in tree.body if not (isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test))]
    return ast.Module(kept, [])


@pytest.mark.parametrize(("module", "tree"), list(modules()), ids=[name or "lightck" for name, _ in modules()])
def test_imports_go_one_way(module, tree):
    assert part_of(module) in ROOMS, "a new room: say in ROOMS what it may import"
    wrong = [name for name in own(tree) if not is_allowed(module, name)]
    assert not wrong, f"lightck.{module} must not import {wrong}"


def test_layers_have_no_cycle():
    done: set[str] = set()
    left = dict(ROOMS)
    while left:
        free = [part for part, needs in left.items() if {part_of(n) for n in needs} - {part} <= done]
        assert free, f"these need each other: {sorted(left)}"
        for part in free:
            done.add(part)
            del left[part]


def test_modules_have_no_cycle():
    needs = {name: {n for n in own(without_type_checking(tree)) if n != name} for name, tree in modules()}
    # A submodule does not need its (empty) package.
    needs = {name: {n for n in found if n in needs and not name.startswith(n + ".")} for name, found in needs.items()}
    done: set[str] = set()
    while needs:
        free = [name for name, found in needs.items() if found <= done]
        assert free, f"these import each other: {sorted(needs)}"
        done.update(free)
        for name in free:
            del needs[name]


def test_byte_level_knows_nothing_of_torch():
    for name, tree in modules():
        if part_of(name) in WITHOUT_TORCH:
            foreign = {found.split(".")[0] for found in imports(without_type_checking(tree))}
            assert "torch" not in foreign, name
            assert not own(tree) & {"state", "session", "pipeline"}, name


def test_public_surface_is_sealed():
    assert lightck.__all__ == [
        "Auto",
        "Checkpoint",
        "Device",
        "Direct",
        "Drift",
        "Durability",
        "Exported",
        "FullState",
        "Gradients",
        "Host",
        "Keep",
        "LightckError",
        "Pin",
        "Replica",
        "Replicas",
        "Session",
        "Stats",
        "StoredPiece",
        "Tier",
        "TopK",
        "attach",
        "export_checkpoint",
        "layerwise",
        "preemption",
        "recover",
    ]
    for name in lightck.__all__:
        assert getattr(lightck, name).__doc__, f"{name} has no docstring"


def test_demo_uses_only_what_a_user_has():
    for name, tree in modules():
        if part_of(name) == "demo":
            assert {n for n in own(tree) if part_of(n) != "demo"} <= {"", "errors"}, name


def test_library_prints_nothing():
    """It logs to "lightck". Only the command line writes to a terminal."""
    for name, tree in modules():
        if part_of(name) in ("demo", "cli", "__main__", *OUTSIDE):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", f"{name}:{node.lineno}"
            if isinstance(node, ast.Attribute):
                assert ast.unparse(node) not in ("sys.stdout", "sys.stderr"), f"{name}:{node.lineno}"


def test_every_module_says_what_it_is():
    for name, tree in modules():
        assert ast.get_docstring(tree), f"{name} has no docstring"


def test_what_is_installed_is_the_package_alone():
    """No workload, no rival and no kept result of the bench; ``lightck bench`` knows a checkout by these facts."""
    facts = (ROOT / "pyproject.toml").read_text()
    assert 'wheel.packages = ["lightck"]\n' in facts
    assert '\n[project]\nname = "lightck"\n' in facts
    assert f'\n__version__ = "{lightck.__version__}"\n' in (PACKAGE / "__init__.py").read_text()
    assert not [name for name in OUTSIDE if (PACKAGE / name).exists()]
    assert not list(PACKAGE.rglob("*.json"))


def test_functions_are_short():
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or 0) - node.lineno + 1
                assert lines <= FUNCTION_LINES_MAX, f"{name}.{node.name} has {lines} lines"


def test_files_are_short():
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files()}
    for name, count in lines.items():
        assert count <= LINES_MAX, f"{name} has {count} lines"


# -- the core in C ---------------------------------------------------------------------------------------------------


def sources() -> list[Path]:
    return [*(NATIVE / "src").glob("*.[ch]"), *(NATIVE / "include").glob("*.h")]


def code_of(path: Path) -> str:
    """Without comments and strings."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(), flags=re.S)
    return re.sub(r'"(?:\\.|[^"\\])*"', '""', text)


def test_core_knows_nothing_of_python_torch_or_cuda():
    assert len(sources()) > 10
    for path in sources():
        for included in re.findall(r'#\s*include\s*[<"]([^>"]+)', path.read_text()):
            assert not re.search(r"python|torch|aten|c10|cuda|hip/", included, re.I), f"{path.name}: {included}"
        assert not re.search(r"\b(Py_|PyObject|at::|cuda[A-Z])", code_of(path)), path.name


def test_one_place_writes_to_the_mapping():
    """Only medium.c knows the mapping's address; populate.c touches its pages without changing a byte. What goes past
    the mapping is written by direct.c, for medium.c alone."""
    of_no_pool_yet = {("prewrite.c", "pwrite"), ("huge.c", "fallocate")}  # a new file's space
    for_medium = {("direct.c", "pwrite")}
    for path in sources():
        code = code_of(path)
        uses = [line.strip() for line in code.splitlines() if re.search(r"(->|\.)\s*base\b", line)]
        if path.name == "populate.c":
            assert all(re.search(r"madvise\(|touch\(", line) for line in uses), uses
        elif path.name != "medium.c":
            assert not uses, f"{path.name}: {uses}"
        mapped = re.findall(r"\bmmap\s*\([^;]*;", code)
        if path.name == "pmdk.c":
            assert all("PROT_NONE" in call for call in mapped), "pmdk.c only keeps an address free"
        elif path.name == "read.c":
            assert all("PROT_READ," in call and "PROT_WRITE" not in call for call in mapped), "read.c only reads"
        elif path.name == "huge.c":
            assert mapped
            assert not any("PROT_WRITE" in call for call in mapped), "huge.c stores nothing"
        elif path.name != "medium.c":
            assert not mapped, f"{path.name} maps by itself"
        for call in ("pwrite", "pwritev", "write", "ftruncate", "fallocate"):
            if (path.name, call) in of_no_pool_yet | for_medium:
                continue
            assert not re.search(rf"\b{call}\s*\(", code), f"{path.name} calls {call}"
        assert path.name in ("direct.c", "medium.c", "internal.h") or "direct_write(" not in code, path.name


def test_python_writes_into_a_pool_only_through_the_core():
    """``partial_copies`` writes copies of other hosts' pools, in a folder where nobody searches for a pool, and
    ``memory`` gives a size to anonymous memory."""
    forbidden = {"os.write", "os.pwrite", "os.pwritev", "os.writev", "os.truncate", "os.ftruncate", "mmap.mmap"}
    for name, tree in modules():
        if part_of(name) in ("pool", "state", "dataloader", "hooks", "pipeline", "session", "restore"):
            assert "mmap" not in set(imports(tree)), name
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and name not in ("session.partial_copies", "pool.storage.memory"):
                    assert ast.unparse(node) not in forbidden, f"{name}:{node.lineno}"
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "open" and len(node.args) > 1:
                    assert ast.literal_eval(node.args[1]) in ("r", "rb"), f"{name}:{node.lineno}"
