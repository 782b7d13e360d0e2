#!/usr/bin/env python3
"""Which test files took longest: .ci/slowest.py FOLDER, with the JUnit files of all pytest runs in it."""

import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

SHOWN = 60


def main() -> None:
    seconds: Counter[tuple[str, str]] = Counter()
    tests: Counter[tuple[str, str]] = Counter()
    totals: Counter[str] = Counter()
    for path in sorted(Path(sys.argv[1]).glob("*.xml")):
        for case in ET.parse(path).iter("testcase"):
            key = path.stem, case.get("classname", "").removeprefix("tests.")
            seconds[key] += float(case.get("time", "0"))
            tests[key] += 1
    for (stage, _), took in seconds.items():
        totals[stage] += took
    for stage, took in totals.most_common():
        print(f"{took:8.0f} s  {stage}")
    for (stage, name), took in seconds.most_common(SHOWN):
        print(f"{took:8.1f} s  {tests[stage, name]:5} tests  {name} ({stage})")


if __name__ == "__main__":
    main()
