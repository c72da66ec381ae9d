"""The mechanism in pictures: one shock from its write to its effect, what the error is made of, a frozen memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..studies.cells import minus
from . import study_data
from .drawing import Drawing, Frame, finish, lines, short
from .looks import ANSWER_COLOURS, COLOURS, FAINT, HORIZON_TITLE, INK, RULE, style
from .memory_figure import memory_figure

if TYPE_CHECKING:
    import xarray as xr
    from plotly.graph_objects import Figure

SOURCES = {"write_in": "write into the state", "smooth": "smooth curvature", "switching": "switched gates"}
PANELS = ("through one memory alone", "the whole effect, and its prediction", "the same shock under other futures")
TALL = 660  # three panels
MEMORY_HORIZONS = 40


def overview(results: Mapping[str, xr.Dataset]) -> Iterator[Drawing]:
    """The paper's overview, drawn from a real run."""
    settings = study_data.having(results, *study_data.WHOLE)
    if not settings:
        return
    found = {name: study_data.overview(data) for name, data in settings.items()}
    frames = {name: _overview_frame(one) for name, one in found.items()}
    who = "; ".join(f"{name}: {one.system}, candidate {one.change}" for name, one in found.items())
    caption = (
        f"One minibatch shock of a real run ({who}). It writes into θ, m and v at once. Top: each part let in alone, "
        "then run on exactly; θ acts at once, m and v wait. Middle: the whole effect on the probe's loss, its largest "
        "change marked, and the tangent's prediction. Bottom: the same state and shock under other futures."
    )
    heading = "From the shock to its effect"
    yield Drawing("overview", heading, caption, _overview_figure(frames), ("setting",), frames)


def _overview_frame(one: study_data.Overview) -> Frame:
    at, x = one.peak_horizon, one.horizons
    height = one.exact[x.index(at)]
    branches: list[float | None] = []
    for future in one.futures:
        branches += [*short(future), None]  # a gap between two futures
    return {
        "x": [*([x] * 5), [at], [*x, None] * len(one.futures)],
        "y": [*(short(y) for y in (*one.alone.values(), one.exact, one.tangent, [height])), branches],
        "name": [
            *(f"{name} alone" for name in one.alone),
            "exact",
            "tangent",
            minus(f"largest: {height:+.2g} at h = {at}"),
            "other futures",
        ],
    }


def _overview_figure(frames: Mapping[str, Frame]) -> Figure:
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=3, cols=1, shared_xaxes=True, vertical_spacing=0.07, subplot_titles=PANELS)
    first = next(iter(frames.values()))
    looks: tuple[dict[str, Any], ...] = (
        *({"line": {"color": colour, "width": 2}} for colour in (COLOURS[1], COLOURS[2], COLOURS[4])),
        {"line": {"color": INK, "width": 3}},
        {"line": {"color": ANSWER_COLOURS["tangent"], "width": 2, "dash": "dot"}},
        {"mode": "markers", "marker": {"size": 13, "color": "rgba(0,0,0,0)", "line": {"color": INK, "width": 2}}},
        {"line": {"color": FAINT, "width": 1}, "opacity": 0.5},
    )
    for i, (look, row) in enumerate(zip(looks, (1, 1, 1, 2, 2, 2, 3))):
        options = {"mode": "lines", **look, "name": first["name"][i]}
        figure.add_scatter(x=first["x"][i], y=first["y"][i], row=row, col=1, **options)
    style(figure, "", "", TALL)
    axis = {"gridcolor": RULE, "linecolor": FAINT, "zeroline": True, "zerolinecolor": FAINT, "automargin": True}
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis, exponentformat="power")
    figure.update_xaxes(title={"text": HORIZON_TITLE}, row=3, col=1)
    figure.update_yaxes(title={"text": "change of the probe's loss"}, row=2, col=1)
    figure.update_annotations(font={"size": 13, "color": INK}, x=0, xanchor="left")
    figure.update_layout(margin={"t": 70})
    figure.update_layout(legend={"orientation": "h", "x": 0, "y": 1.06, "xanchor": "left", "yanchor": "bottom"})
    return figure


def sources(results: Mapping[str, xr.Dataset]) -> Iterator[Drawing]:
    """What the tangent's error is made of, by horizon."""
    settings = study_data.having(results, "output_from_switching", "sources_scale")
    frames: dict[str, Frame] = {}
    for setting, data in settings.items():
        found = study_data.source_shares(data)
        x = data["horizon"].values.tolist()
        frames[setting] = {"x": [x] * len(SOURCES), "y": [short(found[part].values) for part in SOURCES]}
    if not frames:
        return
    figure = lines(frames, list(SOURCES.values()), [COLOURS[1], COLOURS[2], COLOURS[3]])
    finish(figure, HORIZON_TITLE, "share of the error")
    figure.update_yaxes(range=[-0.02, 1.02])
    scale = float(next(iter(settings.values()))["sources_scale"].max())
    caption = (
        f"Sizes of the three parts of the tangent's error at α = {scale:g}, medians over all candidates and systems "
        "(their signs may differ). Where switched gates take over, the error exponent falls from 2 towards 1."
    )
    yield Drawing("parts", "What the error is made of", caption, figure, ("setting",), frames)


def frozen(results: Mapping[str, xr.Dataset]) -> Iterator[Drawing]:
    """How a write into m or v comes out where the coefficients stand still."""
    for i, (name, memory) in enumerate(study_data.frozen_memories(results).items()):
        where = "inside" if memory.stable else "not all inside"
        caption = (
            f"{name}, first system: one coordinate of AdamW with its coefficients held at the step after the shock, "
            "the one through which the first candidate moves the probe's loss most. What is written into m or v comes "
            f"out late; the poles lie {where} the unit circle. A picture of the mechanism, not a forecast."
        )
        heading = f"A frozen memory: {name}"
        yield Drawing(f"frozen-{i}", heading, caption, memory_figure(memory, MEMORY_HORIZONS))
