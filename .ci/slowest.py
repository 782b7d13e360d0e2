#!/usr/bin/env python3
"""Which test files took longest: .ci/slowest.py FOLDER, with the JUnit files of all pytest runs in it."""

import sys
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from pathlib import Path
from typing import TypeVar

SHOWN = 60
Key = TypeVar("Key")


def main() -> None:
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    tests: Counter[tuple[str, str]] = Counter()
    totals: defaultdict[str, float] = defaultdict(float)
    for path in sorted(Path(sys.argv[1]).glob("*.xml")):
        for case in ET.parse(path).iter("testcase"):
            key = path.stem, case.get("classname", "").removeprefix("tests.")
            seconds[key] += float(case.get("time", "0"))
            tests[key] += 1
    for (stage, _), took in seconds.items():
        totals[stage] += took
    for stage, took in _most(totals):
        print(f"{took:8.0f} s  {stage}")
    for (stage, name), took in _most(seconds)[:SHOWN]:
        print(f"{took:8.1f} s  {tests[stage, name]:5} tests  {name} ({stage})")


def _most(found: dict[Key, float]) -> list[tuple[Key, float]]:
    return sorted(found.items(), key=lambda one: -one[1])


if __name__ == "__main__":
    main()
