"""Draw the README's picture of what a checkpoint at every step adds to a step, from the kept results.

    python -m bench.tables.cost docs/cost.svg

The picture has a background of its own, so that it reads the same on a light page and on a dark one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

from bench.tables import LIGHTCK, TORCH_SAVE
from bench.tables.results import Results, reading

RESULTS = Path(__file__).parents[1] / "results"
TITLES = {
    "resnet18": "ResNet-18",
    "vgg16": "VGG-16",
    "inception_v3": "Inception-V3",
    "alexnet": "AlexNet",
    "gpt2": "GPT-2 124M",
    "bert_large": "BERT-large",
}
"""The workloads of the picture and of the README's table, in their order."""

_COLORS = {LIGHTCK: "#0a66c2", TORCH_SAVE: "#9aa4af"}
_INK, _PALE = "#1f2328", "#59636e"
_WIDTH, _LEFT, _TOP, _GROUP, _BAR = 820, 170, 84, 52, 17
_FULL = 60.0
"""Percent at the right end of the axis."""
_SCALE = (_WIDTH - _LEFT - 90) / _FULL


def shares(results: Results) -> dict[str, dict[str, float]]:
    """The percent that each saver adds to a step of each workload."""
    rows = results.rows("steps")
    return {
        name: {saver: 100 * rows[f"{name} {saver}"]["result"]["difference"]["share"] for saver in _COLORS}
        for name in TITLES
    }


def svg(results: Results) -> str:
    """The picture: for each workload one bar per saver."""
    with reading("overhead"):
        height = _TOP + _GROUP * len(TITLES) + 56
        body = "\n".join([*_frame(height), *_bars(shares(results))])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="14">\n'
        f"<title>What a checkpoint at every step adds to a step</title>\n{body}\n</svg>\n"
    )


def _frame(height: int) -> Iterator[str]:
    yield f'<rect x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="8" fill="#ffffff" stroke="#d1d9e0"/>'
    yield _text(20, 32, "Time that a checkpoint at every step adds to a step", size=17, weight="600")
    for at, saver in ((20, LIGHTCK), (120, TORCH_SAVE)):
        yield f'<rect x="{at}" y="47" width="12" height="12" rx="2" fill="{_COLORS[saver]}"/>'
        yield _text(at + 18, 58, saver)
    bottom = height - 56
    for percent in range(0, int(_FULL) + 1, 10):
        x = _LEFT + percent * _SCALE
        yield f'<path d="M{x:.1f} {_TOP - 8}V{bottom}" stroke="{"#59636e" if percent == 0 else "#e4e8ec"}"/>'
        yield _text(x, bottom + 18, f"{percent} %", fill=_PALE, anchor="middle", size=12)
    caption = "CPU training on two cores, pool on tmpfs. Differences below two or three percent are within the noise."
    yield _text(20, height - 14, caption, fill=_PALE, size=12)


def _bars(values: dict[str, dict[str, float]]) -> Iterator[str]:
    for number, (name, savers) in enumerate(values.items()):
        top = _TOP + number * _GROUP
        yield _text(_LEFT - 40, top + 23, TITLES[name], anchor="end")
        for row, (saver, value) in enumerate(savers.items()):
            y = top + row * (_BAR + 2)
            width = max(abs(value) * _SCALE, 1)
            x = _LEFT - width if value < 0 else _LEFT
            end = max(x + width, _LEFT)
            yield f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="2" fill="{_COLORS[saver]}"/>'
            yield _text(
                end + 7,
                y + 13,
                f"{value:.1f} %".replace("-0.0", "0.0"),
                size=12,
                weight="600" if saver == LIGHTCK else "400",
            )


def _text(
    x: float, y: float, words: str, *, fill: str = _INK, anchor: str = "start", size: int = 14, weight: str = "400"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" text-anchor="{anchor}" font-size="{size}" '
        f'font-weight="{weight}">{escape(words)}</text>'
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(svg(Results(RESULTS)))
