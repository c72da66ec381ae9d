"""The README's picture, drawn from the demo's own run: a spike, and the batch behind it.

python docs/tools/spike.py        writes docs/pictures/spike.png; it takes as long as the demo
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from matplotlib.figure import Figure

from aftershock.commands.demo import FULL, Flown, run

PICTURE = Path(__file__).resolve().parent.parent / "pictures" / "spike.png"
STEPS = slice(8, FULL.bump)  # what the learning rate does later is another story


def drawn(flown: Flown) -> Figure:
    """The losses of the recorded steps, the culprit and the spike, and the loss of the run that skipped it."""
    first = FULL.steps
    steps = list(range(first, first + len(flown.losses)))
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    axis = figure.subplots()
    axis.plot(steps[STEPS], flown.losses[STEPS], color="#44546a", lw=1.5)
    bad, back = first + FULL.bad, first + FULL.back
    (culprit,) = flown.main.blamed
    assert culprit == bad, "the picture tells another story than the run"
    points = {bad: flown.losses[FULL.bad], back: flown.losses[FULL.back]}
    axis.scatter([*points], [*points.values()], color=["#c0392b", "#e67e22"], zorder=3)
    axis.annotate(
        f"step {bad}: a batch decoded\nwith the wrong table, the culprit",
        (bad, points[bad]),
        (10, -8),
        textcoords="offset points",
        color="#c0392b",
        fontsize=9,
        va="center",
    )
    axis.annotate(
        f"step {back}: a spike, its own batch is sound",
        (back, points[back]),
        (0, 10),
        textcoords="offset points",
        color="#b9570b",
        fontsize=9,
        ha="center",
    )
    spared = flown.before.losses[-1]
    axis.scatter([back], [spared], facecolors="none", edgecolors="#2e7d32", zorder=3)
    axis.annotate(
        f"the same step in a run without step {bad}",
        (back, spared),
        (-8, 0),
        textcoords="offset points",
        color="#2e7d32",
        fontsize=9,
        ha="right",
        va="center",
    )
    axis.set(xlabel="step", ylabel="loss")
    axis.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        drawn(run(Path(folder))).savefig(PICTURE, dpi=120)
    print(f"wrote {PICTURE}")
