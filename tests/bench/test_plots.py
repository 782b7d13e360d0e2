"""Plots of the kept results; without matplotlib, an error that says what to install."""

from __future__ import annotations

import json
from importlib.util import find_spec

from calls_bench import call
from test_bars import filled


def test_results_are_drawn_or_the_missing_package_is_named(tmp_path):
    results, pictures = tmp_path / "results", tmp_path / "pictures"
    kept = filled(results)
    pictures.mkdir()
    for key, row in list(kept.rows("steps").items()):
        row["options"]["saver"] = key.partition(" ")[2]
        kept.keep("steps", key, row)
    kept.rows("flat").clear()
    parts = {"anonymous_bytes": [5 << 20] * 20}
    kept.keep("flat", "alexnet lightck", {"options": {}, "machine": {}, "result": {"steps": 40, "parts": parts}})
    done = call("bench", "--plots", pictures, "--results", results, "--json")
    if find_spec("matplotlib") is None:
        assert done.exit_code == 2
        assert "pip install 'lightck[bench]'" in done.stderr
    else:
        assert done.exit_code == 0, done.stderr
        assert sorted(json.loads(done.stdout)["plots"]) == sorted(map(str, pictures.iterdir()))
        assert sorted(path.name for path in pictures.iterdir()) == [
            "flat.svg",
            "interval.svg",
            "overhead.svg",
            "stall.svg",
        ]
