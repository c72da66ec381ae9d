"""Pictures of a response: its curves, its errors, and the loss with and without the change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from ..errors import InvalidInput
from ..results.certificate import TRUST
from ..results.summaries import diverged_at, finite
from .looks import (
    ANSWER_COLOURS,
    COLOURS,
    DASHES,
    FAINT,
    HORIZON_TITLE,
    INK,
    MARKED,
    VEIL,
    WIDE,
    decades,
    gaps,
    key_above,
    scale_axis,
    style,
    whole_horizons,
    zero_line,
)

if TYPE_CHECKING:
    import xarray as xr
    from plotly.graph_objects import Figure

    from ..api.response import Response

SHOWN = 8  # changes in one picture: more curves than these cannot be told apart
OFF_SCALE = TRUST.off_scale  # times the frame: a prediction beyond it has no size that could be drawn
FRAME = 1.6  # approximations may leave the frame at this many times the true peak, so that it stays readable


def response_figure(response: Response, *, changes: Sequence[str] | None = None, scale: float | None = None) -> Figure:
    """Signed response by horizon: a colour per change, a dash per answer, the peak marked.

    changes: labels to show; default: the eight with the largest peaks.
    scale: one of the scales that were run; default: the largest.
    """
    import plotly.graph_objects as go

    scale = _pick_scale(response, scale)
    names = response.order if changes is None else _known(response, changes)
    shown = names if changes is not None else names[:SHOWN]
    data = response.data["response"].sel({"scale": scale, "change": shown})
    frame = _frame(data, response.best_answer)
    absurd = finite(data) & (abs(data) > OFF_SCALE * max(map(abs, frame))) & (data["answer"] != response.best_answer)
    drawn = data.where(~absurd)
    figure = go.Figure()
    for i, name in enumerate(shown):
        _add_change(figure, response, drawn.sel({"change": name}), COLOURS[i % len(COLOURS)], named=i == 0)
    _add_answer_key(figure, response)
    zero_line(figure)
    style(figure, HORIZON_TITLE, "change of the probe's loss")
    whole_horizons(figure, data.sizes["horizon"])
    figure.update_yaxes(range=frame)
    _key_beside(figure)
    notes = []
    if len(names) > len(shown):
        notes.append(f"{len(names) - len(shown)} more changes with smaller peaks are left out")
    notes += _diverged(data.sel({"answer": response.best_answer}))
    notes += [
        f"{answer}: off the scale, not drawn" for answer in data["answer"].values[absurd.any(["change", "horizon"])]
    ]
    if float(drawn.min()) < frame[0] or float(drawn.max()) > frame[1]:
        notes.append("a curve leaves the frame (double-click to see all that is finite)")
    if notes:
        _note(figure, "; ".join(notes))
    return figure


def loss_figure(response: Response) -> Figure:
    """The probe's loss along the path, without the change and with the strongest one."""
    import plotly.graph_objects as go

    name, scale, answer = response.order[0], response.largest_scale, response.best_answer
    control = response.data["control"]
    changed = control + response.data["response"].sel({"answer": answer, "scale": scale, "change": name})
    horizons, whole = control["horizon"].values, bool(finite(changed).all())
    word = "with" if answer == "exact" else f"with ({answer}, not verified)"
    figure = go.Figure()
    figure.add_scatter(
        x=horizons,
        y=control.values,
        name="without the change",
        mode="lines",
        line={"color": FAINT, "width": 2},
    )
    figure.add_scatter(
        x=horizons,
        y=gaps(changed.values),
        name=f"{word} {escape(name)}",
        mode="lines",
        line={"color": COLOURS[0], "width": 2.5, "dash": DASHES[answer]},
        fill="tonexty" if whole else "none",
        fillcolor="rgba(200, 67, 43, 0.08)",
    )
    style(figure, HORIZON_TITLE, "the probe's loss", height=360)
    known = changed.where(finite(changed))
    if float(control.min()) > 0 and float(known.min()) > 0 and float(known.max()) > WIDE * float(control.max()):
        decades(figure)
    whole_horizons(figure, len(horizons))
    key_above(figure)
    return figure


def error_figure(response: Response) -> Figure:
    """Symmetric error |d − d̂| / (|d| + |d̂|) of each approximate answer by horizon, with the bar of trust."""
    import plotly.graph_objects as go

    errors = _errors(response)["symmetric_error"].sel({"scale": response.largest_scale})
    figure = go.Figure()
    _add_spread(figure, errors, "horizon", errors["horizon"].values, response.order[:SHOWN])
    _trust_line(figure, TRUST.symmetric_error, f"{TRUST.symmetric_error:.0%}: trusted below")
    style(figure, HORIZON_TITLE, "symmetric error", height=360)
    whole_horizons(figure, errors.sizes["horizon"])
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%")
    key_above(figure)
    return figure


def scale_figure(response: Response) -> Figure:
    """Error over all horizons (NRMSE) against the size of the change, both logarithmic."""
    import plotly.graph_objects as go

    errors = _errors(response)["nrmse"]
    if errors.sizes["scale"] < 2:
        raise InvalidInput("one scale was run; pass scales=(0.1, 0.3, 1.0) to response() to see how the error grows")
    errors = errors.isel(scale=abs(errors["scale"]).argsort().values)
    figure = go.Figure()
    _add_spread(figure, errors, "scale", abs(errors["scale"]).values, response.order[:SHOWN])
    _trust_line(figure, TRUST.nrmse, f"{TRUST.nrmse:g}: trusted below")
    figure.layout.annotations[-1].y = math.log10(TRUST.nrmse)  # words on a logarithmic axis stand at an exponent
    style(figure, "scale of the change (1 is the whole change)", "error over all horizons (NRMSE)", height=360)
    scale_axis(figure, sorted(set(abs(errors["scale"]).values.tolist())))
    decades(figure)
    key_above(figure)
    return figure


# --- what to show


def _pick_scale(response: Response, scale: float | None) -> float:
    """The scale asked for, or the largest that was run."""
    if scale is None:
        return response.largest_scale
    known = [float(value) for value in response.data["scale"].values]
    if scale not in known:
        raise InvalidInput(f"scale {scale:g} was not run; choose from {', '.join(f'{k:g}' for k in known)}")
    return scale


def _known(response: Response, changes: Sequence[str]) -> list[str]:
    names = [str(name) for name in response.data["change"].values]
    unknown = [name for name in changes if name not in names]
    if unknown or not changes:
        asked = f"there is no change {unknown[0]!r}" if unknown else "no change was named"
        raise InvalidInput(f"{asked}; choose from {', '.join(names[:SHOWN])}")
    return list(dict.fromkeys(changes))


def _errors(response: Response) -> xr.Dataset:
    errors = response.certificate.errors
    if errors is None:
        raise InvalidInput("errors need the exact response beside an approximate one; run more than one answer")
    return errors


def _frame(data: xr.DataArray, best: str) -> list[float]:
    """A vertical range around the truth, where a prediction or a run that goes away cannot flatten it."""
    shown = data.where(finite(data))
    truth = shown.sel({"answer": best})
    calm = truth.where(truth.notnull().all("horizon"))  # changes that do not diverge, where there are any
    limit = FRAME * float(abs(calm if calm.notnull().any() else truth).max())
    limit = limit if limit > 0 else 1.0
    low = min(0.0, float(shown.clip(min=-limit).min()))
    high = max(0.0, float(shown.clip(max=limit).max()))
    margin = 0.08 * (high - low) or 1.0
    return [low - margin, high + margin]


def _diverged(truth: xr.DataArray) -> list[str]:
    """A note of the runs that have no curve from some horizon on."""
    first = diverged_at(truth).dropna("change")
    names = [f"{escape(str(at['change'].item()))} at h = {int(at)}" for at in first]
    return [f"no longer finite: {', '.join(names)}"] if names else []


# --- how to show it


def _add_change(figure: Figure, response: Response, data: xr.DataArray, colour: str, *, named: bool) -> None:
    """Every answer's curve of one change, and a ring around its true peak, with its numbers where `named`."""
    horizons, best = data["horizon"].values, response.best_answer
    name = escape(str(data["change"].item()))  # plotly reads names as markup
    for answer in (str(m) for m in data["answer"].values):
        figure.add_scatter(
            x=horizons,
            y=gaps(data.sel({"answer": answer}).values),
            name=name,
            legendgroup=name,
            showlegend=answer == best,
            mode="lines+markers" if answer == best and len(horizons) <= MARKED else "lines",
            line={"color": colour, "width": 2.5 if answer == best else 1.5, "dash": DASHES[answer]},
            marker={"size": 4},
            opacity=1.0 if answer == best else 0.75,
            hovertemplate=f"h = %{{x}}, {answer}: %{{y:+.4g}}<extra>%{{fullData.name}}</extra>",
        )
    truth = data.sel({"answer": best})
    lost = response.noise.sel({at: truth[at].item() for at in ("answer", "change", "scale")})
    _add_peak(figure, name, truth, lost, colour, named=named)


def _add_peak(figure: Figure, name: str, truth: xr.DataArray, noise: xr.DataArray, colour: str, *, named: bool) -> None:
    """A ring around the largest effect; for a run that diverges, around its last finite one."""
    known = truth.where(finite(truth), drop=True)
    if not (known != 0).any():
        return
    lost = diverged_at(truth)
    whole = bool(lost.isnull())
    peak = known.isel(horizon=int(abs(known).argmax("horizon")) if whole else -1)
    h, value = int(peak["horizon"]), float(peak)
    size = "within rounding" if bool(noise.sel(horizon=h)) else f"{value:+.3g}"
    figure.add_scatter(
        x=[h],
        y=[value],
        legendgroup=name,
        showlegend=False,
        mode="markers",
        marker={"size": 12, "color": "rgba(0,0,0,0)", "line": {"color": colour, "width": 2}},
        hoverinfo="skip",
    )
    if named:
        figure.add_annotation(
            x=h,
            y=value,
            text=f"{size} at h = {h}" if whole else f"diverges at h = {int(lost)}",
            ax=0,
            ay=-34 if value >= 0 else 34,
            arrowcolor=colour,
            arrowwidth=1,
            arrowhead=0,
            standoff=7,
            font={"color": colour, "size": 13},
            bgcolor=VEIL,
        )


def _add_answer_key(figure: Figure, response: Response) -> None:
    """A second key that says what the dashes mean; it holds no data, so clicking it does nothing."""
    for answer in (str(m) for m in response.data["answer"].values):
        figure.add_scatter(
            x=[None],
            y=[None],
            name=answer if answer != "exact" else "exact (two real runs)",
            mode="lines",
            legend="legend2",
            line={
                "color": INK,
                "dash": DASHES[answer],
                "width": 2.5 if answer == response.best_answer else 1.5,
            },
        )


def _add_spread(figure: Figure, errors: xr.DataArray, over: str, x: Any, names: Sequence[str]) -> None:
    """The median over changes as a strong line per answer, single changes as faint ones."""
    several = errors.sizes["change"] > 1
    for answer in (str(m) for m in errors["answer"].values):
        colour, data = ANSWER_COLOURS[answer], errors.sel({"answer": answer})
        for name in names if several else []:
            figure.add_scatter(
                x=x,
                y=gaps(data.sel({"change": name}).values),
                name=escape(name),
                legendgroup=answer,
                showlegend=False,
                mode="lines",
                line={"color": colour, "width": 1, "dash": DASHES[answer]},
                opacity=0.4,
                hovertemplate=f"{answer}, {over} %{{x}}: %{{y:.3g}}<extra>%{{fullData.name}}</extra>",
            )
        figure.add_scatter(
            x=x,
            y=gaps(_median(data).values),
            name=f"{answer}, median of {errors.sizes['change']} changes" if several else answer,
            legendgroup=answer,
            mode="lines+markers",
            marker={"size": 5},
            line={"color": colour, "width": 2.5},
            hovertemplate=f"{answer}, {over} %{{x}}: %{{y:.3g}}<extra></extra>",
        )


def _median(errors: xr.DataArray) -> xr.DataArray:
    """Over the changes that have a number."""
    known = errors.notnull().any("change")
    return errors.where(known, 0.0).median("change").where(known)


def _trust_line(figure: Figure, level: float, text: str) -> None:
    figure.add_hline(
        y=level,
        line={"color": "#2e8b6f", "width": 1.5, "dash": "dash"},
        annotation={"text": text, "font": {"color": "#1f6b54", "size": 12}, "bgcolor": VEIL},
        annotation_position="top right",
    )


def _key_beside(figure: Figure) -> None:
    figure.update_layout(
        legend={
            "x": 1.02,
            "y": 1,
            "xanchor": "left",
            "yanchor": "top",
            "title": {"text": "change"},
            "tracegroupgap": 0,
        },
        legend2={
            "x": 1.02,
            "y": 0,
            "xanchor": "left",
            "yanchor": "bottom",
            "title": {"text": "answer"},
            "itemclick": False,
            "itemdoubleclick": False,
        },
    )


def _note(figure: Figure, text: str) -> None:
    figure.add_annotation(
        text=text,
        xref="paper",
        yref="paper",
        x=0,
        y=1,
        xanchor="left",
        yanchor="bottom",
        yshift=6,
        showarrow=False,
        font={"color": FAINT, "size": 12},
    )
