"""The pictures of the concept pages, as SVG, from real runs of the library: python docs/tools/pictures.py

The run is the quickstart's: two sources of data, one of them rare. Takes about half a minute on one core.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import pages

import aftershock as ak
from aftershock import theory

matplotlib.use("svg")
FOLDER = pages.DOCS / "pictures"
GREY = "#808080"  # readable on a white and on a black page
COLOURS = {"exact": "#1f77b4", "semilinear": "#2ca02c", "tangent": "#d62728", "theta": "#9467bd", "m": "#ff7f0e"}
COLOURS |= {"v": "#17becf"}
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "aftershock", "font.size": 9, "axes.spines.top": False,
    "axes.spines.right": False, "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
    "text.color": GREY, "axes.labelcolor": GREY, "axes.edgecolor": GREY, "axes.titlecolor": GREY,
    "xtick.color": GREY, "ytick.color": GREY, "legend.frameon": False, "axes.titlesize": 9,
}  # fmt: skip
HORIZONS = 16


def quickstart() -> SimpleNamespace:
    """The live run of the quickstart, trained for 200 steps."""
    names: dict[str, object] = {"__name__": "quickstart"}
    code = next(block.code for block in pages.Page(pages.DOCS / "quickstart.md").blocks() if block.runs)
    exec(code, names)
    return SimpleNamespace(**{name: names[name] for name in ("model", "optimizer", "loss_fn", "draw")})


def wrong_batch(run: SimpleNamespace, horizons: int = HORIZONS) -> tuple[ak.Change, object]:
    """A wrong batch of the rare source in the place of an ordinary one, and a sound rare batch to watch."""
    held_out = run.draw(source=1)
    point = ak.capture(run.model, run.optimizer, run.loss_fn)
    path = point.follow([run.draw(source=0) for _ in range(horizons)])
    return path.replace([run.draw(source=1, wrong=True)], at=0), held_out


def figure(count: int, *titles: str) -> tuple[plt.Figure, list[Axes]]:
    made, axes = plt.subplots(1, count, figsize=(3.4 * count, 2.5), layout="constrained", squeeze=False)
    for ax, title in zip(axes[0], titles):
        ax.set_title(title, loc="left")
        ax.axhline(0, color=GREY, lw=0.5)
    return made, list(axes[0])


def memory(change: ak.Change, probe: object) -> plt.Figure:
    """What a write leaves in θ, m and v, and which of them moves the loss."""
    made, (left, right) = figure(2, "size of the difference, relative to its largest", "change of the loss, each alone")
    path = change.path
    dx = change.difference()[0]
    sizes = {name: [] for name in ("theta", "m", "v")}
    for stop in range(1, HORIZONS + 1):
        moved = path.propagate(1, stop).mv(dx)
        for name, values in sizes.items():
            values.append(float(getattr(moved, name).norm()))
    found = theory.channel_responses(change, probe, answers=["exact"])["response"].isel(answer=0, change=0)
    horizons = range(1, HORIZONS + 1)
    for name, label in (("theta", "θ"), ("m", "m"), ("v", "v")):
        largest = max(sizes[name])
        left.plot(horizons, [size / largest for size in sizes[name]], color=COLOURS[name], label=label)
        right.plot(horizons, found.sel(channel=name), color=COLOURS[name], label=f"{label} alone")
    right.plot(horizons, found.sel(channel="theta+m+v"), color=COLOURS["exact"], ls="--", label="all three")
    return _finished(made, left, right)


def rows(change: ak.Change, probe: object) -> plt.Figure:
    """The three answers beside each other, at a tenth of the change and at all of it."""
    made, axes = figure(2, "a tenth of the change", "the whole change")
    response = change.response(probe, scales=(0.1, 1.0))
    for ax, scale in zip(axes, (0.1, 1.0)):
        for answer in ("exact", "semilinear", "tangent"):
            values = response.data["response"].sel(answer=answer, scale=scale).isel(change=0)
            style = {"lw": 3, "alpha": 0.4} if answer == "exact" else {"lw": 1.4}
            ax.plot(values["horizon"], values, color=COLOURS[answer], label=answer, **style)
    axes[0].set_ylabel("change of the loss")
    return _finished(made, *axes)


def kicks() -> plt.Figure:
    """Predicted against measured responses of a pool, where rare tokens have a tiny v."""
    torch.manual_seed(0)
    often = 1 / torch.arange(1, 301).double()
    follows = torch.randperm(300)

    def draw(count: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
        first, other = (torch.multinomial(often, count, replacement=True) for _ in range(2))
        return first, torch.where(torch.rand(count) < 0.8, follows[first], other)

    def loss_fn(model: nn.Module, batch: tuple) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    model = nn.Sequential(nn.Embedding(300, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 300))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss_fn(model, draw()).backward()
        optimizer.step()
    path = ak.capture(model, optimizer, loss_fn).follow([draw() for _ in range(8)])
    pool, names, probe = [draw() for _ in range(24)], [str(i) for i in range(24)], draw(256)
    response = path.replace(pool, at=0).response(probe, answers=["exact", "tangent"]).data["response"]
    exact, tangent = (response.isel(scale=0, horizon=-1).sel(answer=name).values for name in ("exact", "tangent"))
    ranked = path.rank(pool, probe, by="response", verify=5, labels=names).data.isel(horizon=-1).sel(change=names)
    made, axes = figure(3, "all linear (tangent)", "adjoint with kicks", "and calibrated by 5 reruns (rank)")
    for ax, predicted, colour in zip(axes, (tangent, ranked["predicted"], ranked["response"]), ("tangent", "m", "v")):
        ax.axline((0, 0), slope=1, color=GREY, lw=0.5)
        ax.scatter(exact, predicted, s=14, color=COLOURS[colour])
        ax.set_xlabel("measured change of the loss after 8 steps")
        both = torch.stack([torch.tensor(exact), torch.tensor(list(map(float, predicted)))])
        print("correlation with what was measured:", round(float(both.corrcoef()[0, 1]), 3))
    axes[0].set_ylabel("predicted")
    return made


def horizons(change: ak.Change, probe: object) -> plt.Figure:
    """Two runs, and their difference with its summaries."""
    made, (left, right) = figure(2, "the probe's loss in two runs", "their difference: the response")
    response = change.response(probe, answers=["exact"])
    control, curve = response.data["control"], response.exact.isel(change=0, scale=0)
    left.plot(control["horizon"], control, color=GREY, label="control")
    left.plot(control["horizon"], control + curve, color=COLOURS["exact"], label="with the change")
    right.plot(curve["horizon"], curve, color=COLOURS["exact"])
    right.fill_between(curve["horizon"], curve, color=COLOURS["exact"], alpha=0.15)
    top = response.summary.isel(answer=0, change=0, scale=0)
    h, peak = int(top["peak_horizon"]), float(top["peak"]) * int(top["peak_sign"])
    right.annotate(f"peak {peak:+.2g} at h = {h}", (h, peak), (1, peak), color=GREY, va="center")
    right.plot([h], [peak], "o", color=COLOURS["exact"])
    return _finished(made, left)


def gates() -> plt.Figure:
    """The parts of the tangent's error of a ReLU network."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rule = torch.randn(8, 3).double()

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(32, 8).double()
        return x, (x @ rule).argmax(1)

    def loss_fn(model: nn.Module, batch: tuple) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    for _ in range(60):
        optimizer.zero_grad()
        loss_fn(model, draw()).backward()
        optimizer.step()
    path = ak.capture(model, optimizer, loss_fn).follow([draw() for _ in range(12)])
    x, y = draw()
    change = path.replace([(x, (y + 1) % 3)], at=0)
    made, (left, right) = figure(2, "parts of the tangent's error (norm)", "gates that chose otherwise, percent")
    found = theory.decompose(change, horizon=12).data
    for name, label, colour in (
        ("write_in", "AdamW's own curvature", "m"), ("smooth", "curvature of the network", "theta"),
        ("switching", "switched gates", "v"),
    ):  # fmt: skip
        part = (found[f"state_from_{name}"] ** 2).sum("channel") ** 0.5
        left.plot(part["horizon"], part, color=COLOURS[colour], label=label)
    share = theory.switch_fraction(change).isel(change=0, scale=0)
    right.plot(share["horizon"], 100 * share, color=COLOURS["v"])
    return _finished(made, left, right)


def certificates(change: ak.Change, probe: object) -> plt.Figure:
    """The error of a prediction by scale, with the certificate's bars."""
    made, (ax,) = figure(1, "error of a prediction (NRMSE) by scale")
    scales = [1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0]
    errors = change.response(probe, scales=scales).certificate.errors["nrmse"].isel(change=0)
    for answer in ("semilinear", "tangent"):
        ax.plot(scales, errors.sel(answer=answer), "o-", ms=3, color=COLOURS[answer], label=answer)
    for bar, word in ((0.2, "ok below"), (0.5, "care below")):
        ax.axhline(bar, color=GREY, lw=0.7, ls=":")
        ax.text(scales[0], bar, f" {word} {bar}", va="bottom")
    ax.set_xscale("log", base=2)
    ax.set_xlabel("scale of the change")
    ax.legend(loc="center right")
    return made


def _finished(made: plt.Figure, *axes: Axes) -> plt.Figure:
    for ax in axes:
        if ax.get_legend_handles_labels()[0]:
            ax.legend()
    for ax in made.axes:
        ax.set_xlabel("horizon (states after the change)")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return made


def main() -> None:
    run = quickstart()
    change, probe = wrong_batch(run)
    made: dict[str, Callable[[], plt.Figure]] = {
        "memory": lambda: memory(change, probe),
        "rows": lambda: rows(change, probe),
        "kicks": kicks,
        "horizons": lambda: horizons(change, probe),
        "gates": gates,
        "certificates": lambda: certificates(change, probe),
    }
    FOLDER.mkdir(exist_ok=True)
    with plt.rc_context(STYLE):
        for name, draw in made.items():
            picture = draw()
            picture.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
            plt.close(picture)
            print(f"{name}.svg", (FOLDER / f"{name}.svg").stat().st_size)


if __name__ == "__main__":
    main()
