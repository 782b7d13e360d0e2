#!/usr/bin/env python3
"""The release checklist, as far as a machine can go: .ci/release.py [--rehearse] [--out FOLDER].

In order: the tree is clean, version and CHANGELOG agree, the metadata is complete; an sdist is built, and the wheel
from it; both are checked by twine; the wheel gets the widest manylinux tag that its symbols allow (auditwheel); it is
installed in a fresh environment where no compiler is found, and the demo runs there. Nothing is uploaded: the last
lines say what is left to do by hand. Needs pip install -c constraints.txt '.[release]', which also lends it torch.

--rehearse: what is to be decided by people (a clean tree, a date in the CHANGELOG, addresses) is told and not refused.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[1]
ADDRESSES = ("Repository", "Documentation", "Changelog", "Issues")
OLDEST_OF_TORCH = (2, 28)
"""glibc that torch's own wheels ask for: where ours asks for more, it is said."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="tell what is to be decided, and go on")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="FOLDER", help="for sdist and wheel [dist]")
    said = parser.parse_args()
    version = version_of(ROOT)
    say(f"lightck {version}")
    undecided = [*tree(), *changelog(version), *addresses()]
    for line in undecided:
        say(f"NOT YET: {line}")
    if undecided and not said.rehearse:
        return 1
    said.out.mkdir(parents=True, exist_ok=True)
    if found := sorted(said.out.iterdir()):
        say(f"{said.out} holds {found[0].name} already: a release is built into an empty folder")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        sdist, wheel = build(said.out, Path(folder))
        metadata(wheel, version)
        smoke(wheel, Path(folder) / "fresh")
    say("")
    say(f"{sdist.name}, {wheel.name}: built and checked. What is left, by hand:")
    for line in [*undecided, f"git tag v{version} && git push --tags", f"twine upload {said.out}/*"]:
        say(f"  - {line}")
    return 0


# -- what people decide ----------------------------------------------------------------------------------------------


def version_of(root: Path) -> str:
    found = re.search(r'^__version__ = "([^"]+)"$', (root / "lightck" / "__init__.py").read_text(), re.M)
    if found is None:
        raise SystemExit("lightck/__init__.py says no version")
    return found[1]


def tree() -> list[str]:
    done = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        return [f"git does not answer: {done.stderr.strip()}"]
    changed = done.stdout.splitlines()
    return [f"the tree is not clean: {len(changed)} files, {changed[0].strip()} among them"] if changed else []


def changelog(version: str, text: str | None = None) -> list[str]:
    """Its newest section is of this version, and has a date."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8") if text is None else text
    head = re.search(r"^## (\S+)(?: \((.*)\))?$", text, re.M)
    if head is None or head[1] != version:
        return [f"CHANGELOG.md begins with {head[1] if head else 'nothing'}, and this is {version}"]
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", head[2] or ""):
        return [
            f"CHANGELOG.md calls {version} {head[2] or 'undated'!r}: it needs a date, as in '## {version} (2026-01-31)'"
        ]
    return []


def addresses(text: str | None = None) -> list[str]:
    """Of the project's pages: the package index shows them, and the site links files of the repository by them."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8") if text is None else text
    part = re.search(r"^\[project\.urls\]\n(.*?)(?:^\[|\Z)", text, re.M | re.S)
    known = dict(re.findall(r'^(\w+) = "(https://[^"]+)"$', part[1], re.M)) if part else {}
    lacking = [name for name in ADDRESSES if name not in known]
    return [f"pyproject.toml names no address for {', '.join(lacking)} in [project.urls]"] if lacking else []


# -- what is built ---------------------------------------------------------------------------------------------------


def build(out: Path, scratch: Path) -> tuple[Path, Path]:
    """The sdist, and a wheel made from it and not from this folder."""
    run(sys.executable, "-m", "build", "--sdist", "--outdir", out, ROOT)
    (sdist,) = out.glob("*.tar.gz")
    plain, unpacked = scratch / "plain", scratch / "unpacked"
    unpacked.mkdir()
    run("tar", "-xf", sdist.resolve(), "-C", unpacked)
    (sources,) = unpacked.iterdir()
    run(sys.executable, "-m", "build", "--wheel", "--outdir", plain, sources)
    (wheel,) = plain.glob("*.whl")
    run(sys.executable, "-m", "auditwheel", "repair", "--only-plat", "--wheel-dir", out, wheel)
    (wheel,) = out.glob("*.whl")
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
    return sdist, wheel


def metadata(wheel: Path, version: str) -> None:
    """The wheel is of this version, for every Python, for one kind of machine, and has the built files."""
    tag = re.fullmatch(rf"lightck-{re.escape(version)}-py3-none-manylinux_(\d+)_(\d+)_(\w+)\.whl", wheel.name)
    if tag is None:
        raise SystemExit(f"{wheel.name}: neither lightck {version} nor py3-none-manylinux_x_y_machine")
    with ZipFile(wheel) as files:
        names = set(files.namelist())
        head = message_from_bytes(files.read(f"lightck-{version}.dist-info/METADATA"))
    needed = ("liblck.so", "_lck_ffi.py", "py.typed", "demo/train_gpt.py", "docs/loops.md")
    lacking = {f"lightck/{name}" for name in needed} - names
    foreign = {name.split("/")[0] for name in names} - {"lightck", f"lightck-{version}.dist-info"}
    if lacking or foreign or head["Version"] != version:
        raise SystemExit(f"{wheel.name}: lacks {sorted(lacking)}, has {sorted(foreign)}, says {head['Version']}")
    needs = (int(tag[1]), int(tag[2]))
    say(f"the wheel needs glibc {needs[0]}.{needs[1]} on {tag[3]}")
    if needs > OLDEST_OF_TORCH:
        say(
            "  (torch's own need {}.{}: systems between build from the sdist. A wheel for them".format(*OLDEST_OF_TORCH)
        )
        say("  has to be built where glibc is as old, as in an image of manylinux_2_28)")


def smoke(wheel: Path, fresh: Path) -> None:
    """Installed where no compiler is found, beside the torch of this environment: it trains, dies and goes on."""
    run(sys.executable, "-m", "venv", fresh)
    python, program = fresh / "bin" / "python", fresh / "bin" / "lightck"
    site = Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    lent = [*dict.fromkeys(path for path in (sysconfig.get_path("purelib"), *sys.path) if path.endswith("-packages"))]
    (site / "lent.pth").write_text("".join(f"{path}\n" for path in lent))  # later in the path than the wheel
    bare = {
        **os.environ,
        "PATH": str(fresh / "bin"),
        "CC": "/nonexistent",
        "CXX": "/nonexistent",
        "PYTHONNOUSERSITE": "1",
    }
    bare.pop("PYTHONPATH", None)
    run(
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--ignore-installed",
        wheel.resolve(),
        env=bare,
        cwd=fresh,
    )
    where = subprocess.check_output(
        [python, "-c", "import lightck; print(lightck.__file__)"], env=bare, cwd=fresh, text=True
    )
    if not Path(where.strip()).is_relative_to(fresh.resolve()):
        raise SystemExit(f"what was imported is not the wheel: {where}")
    run(program, "--version", env=bare, cwd=fresh)
    run(program, "demo", "--help", env=bare, cwd=fresh)
    run(program, "demo", "--size", "tiny", "--kills", "2", "--steps", "24", env=bare, cwd=fresh)


# -- by the way ------------------------------------------------------------------------------------------------------


def run(*command: object, env: dict[str, str] | None = None, cwd: Path = ROOT) -> None:
    words = [str(word) for word in command]
    say("$ " + " ".join(words))
    done = subprocess.run(
        words, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        say(done.stdout)
        raise SystemExit(f"{words[0]} failed with status {done.returncode}")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
