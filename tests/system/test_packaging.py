"""What is published says what it is: its version, Pythons and machine; the checklist refuses what is not decided."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from module_at import module_at

import lightck

ROOT = Path(__file__).resolve().parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()


release, check = module_at(ROOT / ".ci" / "release.py"), module_at(ROOT / "website" / "check.py")


def test_the_version_stands_in_one_place():
    assert release.version_of(ROOT) == lightck.__version__
    assert 'dynamic = ["version"]' in PROJECT
    assert not re.search(r'^version = "', PROJECT, re.M)
    assert 'input = "lightck/__init__.py"' in PROJECT


def test_the_oldest_python_is_the_one_that_is_asked_for():
    stated = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    assert stated == sorted(stated, key=lambda one: int(one.split(".")[1]))
    assert f'requires-python = ">={stated[0]}"' in PROJECT
    assert f'target-version = "py{stated[0].replace(".", "")}"' in PROJECT
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert re.findall(r'"(3\.\d+)"', workflow) == stated, "CI runs each Python that the metadata states"


def test_it_is_said_that_types_are_there_and_which_system_is_needed():
    for fact in ("Typing :: Typed", "Operating System :: POSIX :: Linux"):
        assert f'"{fact}"' in PROJECT
    assert (ROOT / "lightck" / "py.typed").exists()
    assert 'wheel.py-api = "py3"' in PROJECT


def test_workflows_only_call_the_script_that_everybody_calls():
    """What CI does stands in .ci/run, where it can be run by hand."""
    steps = re.findall(r"^ +(?:- )?run: (.*)$", (ROOT / ".github" / "workflows" / "ci.yml").read_text(), re.M)
    assert steps == [".ci/run"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("# Changelog\n\n## 1.2.0 (2026-01-31)\n\n## 1.1.0 (2025-01-31)\n", None),
        ("# Changelog\n\n## 1.2.0 (unreleased)\n", "needs a date"),
        ("# Changelog\n\n## 1.2.0\n", "undated"),
        ("# Changelog\n\n## 1.1.0 (2025-01-31)\n\n## 1.2.0 (2026-01-31)\n", "begins with 1.1.0, and this is 1.2.0"),
        ("# Changelog\n", "begins with nothing"),
    ],
)
def test_version_and_changelog_have_to_agree(text, problem):
    found = release.changelog("1.2.0", text)
    assert [problem in line for line in found] == ([True] if problem else [])


def test_addresses_are_asked_for_until_they_are_there():
    lines = "".join(f'{name} = "https://host.example/{name}"\n' for name in release.ADDRESSES)
    assert release.addresses(f"[project.urls]\n{lines}\n[tool.x]\n") == []
    assert "Repository" in release.addresses("[project]\n")[0]
    assert "Issues" in release.addresses("[project.urls]\n" + lines.replace("https://host.example/Issues", "soon"))[0]


def test_a_release_is_refused_where_something_is_not_decided(tmp_path, monkeypatch):
    monkeypatch.setattr(release, "tree", lambda: ["the tree is not clean"])
    monkeypatch.setattr(release, "build", lambda *_: pytest.fail("it was built"))
    monkeypatch.setattr(sys, "argv", ["release", "--out", str(tmp_path)])
    assert release.main() == 1


@pytest.mark.parametrize(
    "name", ["lightck-9-py3-none-linux_x86_64.whl", "lightck-9-cp311-cp311-manylinux_2_34_x86_64.whl"]
)
def test_a_wheel_that_says_too_little_or_too_much_is_refused(name, tmp_path):
    with pytest.raises(SystemExit, match="neither"):
        release.metadata(tmp_path / name, "9")


# -- the site --------------------------------------------------------------------------------------------------------

WHOLE = '<h1 id="top">x</h1><p>text</p><a href="b.html#there">b</a>'


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        (WHOLE, None),
        (WHOLE + '<a href="c.html">c</a>', "c.html: no such file"),
        (WHOLE + '<a href="b.html#here">b</a>', "b.html#here: no such anchor"),
        (WHOLE + '<a href="#nowhere">x</a>', "#nowhere: no such anchor"),
        (WHOLE + '<script src="https://host.example/x.js"></script>', "from elsewhere"),
        (WHOLE + '<img src="lost.svg">', "lost.svg: no such file"),
        (WHOLE + "<p>A list:\n- one\n- two</p>", "left as text"),
        (WHOLE + "<p>| a | b |\n| --- | --- |</p>", "left as text"),
        (WHOLE + "<p>see :func:<code>x</code></p>", "left as text"),
        (WHOLE + "<p>see <code>\n- x[a][b]</code> - so</p>", None),
    ],
)
def test_what_is_broken_in_a_site_is_found(page, problem, tmp_path):
    (tmp_path / "index.html").write_text(page)
    (tmp_path / "b.html").write_text('<p id="there">b</p>')
    found = list(check.problems(tmp_path))
    assert [problem in line for line in found] == ([True] if problem else [])


def test_a_folder_without_a_site_is_no_site(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "website" / "check.py", tmp_path], capture_output=True, text=True)
    assert done.returncode == 1
    assert "no site lies here" in done.stderr
