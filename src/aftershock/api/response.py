"""`Response`: signed changes of a probe by change, scale and horizon, with their certificate."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import torch

from ..core.probe import Watch
from ..core.responses import ANSWERS, Responses
from ..errors import InvalidFile
from ..results.certificate import Certificate, certify
from ..results.files import save_dataset
from ..results.provenance import provenance
from ..results.summaries import crossing, spike_margin, summarize

if TYPE_CHECKING:
    import xarray as xr

    from .change import Change

SHOWN_CHANGES = 12
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Response:
    """δF by answer, change, scale and horizon. Positive means that the loss goes up.

    `data` is an `xarray.Dataset`; h = 1 is the first state after the change.
    """

    data: xr.Dataset

    @property
    def exact(self) -> xr.DataArray:
        """The truth: the difference of two real runs."""
        return self.data["response"].sel({"answer": "exact"})

    @property
    def endpoint(self) -> xr.DataArray:
        """Exact write-in and readout, linear propagation."""
        return self.data["response"].sel({"answer": "endpoint"})

    @property
    def semilinear(self) -> xr.DataArray:
        """AdamW exact at every step, only the network's gradient linear."""
        return self.data["response"].sel({"answer": "semilinear"})

    @property
    def tangent(self) -> xr.DataArray:
        """The paper's linear response c Φ B ξ, times the scale."""
        return self.data["response"].sel({"answer": "tangent"})

    @cached_property
    def summary(self) -> xr.Dataset:
        """Peak, its horizon and sign, largest increase and decrease, totals; for every answer."""
        return summarize(self.data["response"])

    @cached_property
    def certificate(self) -> Certificate:
        """How far each answer may be trusted."""
        return certify(self.data)

    def spike_margin(self, threshold: float) -> xr.DataArray:
        """How much the loss may rise at each horizon before it passes the threshold."""
        return spike_margin(self.data["control"], threshold)

    def crossing(self, threshold: float) -> xr.DataArray:
        """The first horizon at which a change lifts the loss over the threshold; NaN where none does."""
        return crossing(self.data["response"], self.spike_margin(threshold))

    def save(self, path: str | FilePath) -> None:
        """Write as zarr, whole or not at all."""
        save_dataset(self.data, FilePath(path))

    def plot(self, **options: Any) -> Any:
        """Response curves as a plotly figure."""
        from ..report.figures import response_figure

        return response_figure(self, **options)

    def report(self, path: str | FilePath = "report.html") -> FilePath:
        """One self-contained page: verdict, curves, summaries, certificate."""
        from ..report.response_page import write_response_page

        return write_response_page(self, FilePath(path))

    def __str__(self) -> str:
        return "\n\n".join([self.verdict, self.table(), str(self.certificate)])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    @property
    def best_answer(self) -> str:
        """The most exact answer that was run."""
        return next(m for m in ANSWERS if m in self.data["answer"].values)

    @property
    def verdict(self) -> str:
        """What the largest change does, in a sentence."""
        scale = float(self.data["scale"].values.max())
        best = self.summary.sel({"answer": self.best_answer, "scale": scale})
        top = best.isel(change=int(best["peak"].argmax("change")))
        h, sign = int(top["peak_horizon"]), int(top["peak_sign"])
        word = "raises" if sign > 0 else "lowers"
        now = float(self.data["control"].sel(horizon=h))
        value = now + sign * float(top["peak"])
        name, at = top["change"].item(), self.data.attrs["at"]
        text = f"'{name}' at step {at} {word} the loss most {_after(h)}: {now:.4g} → {value:.4g}"
        late = int((best["peak_horizon"] > 1).sum())
        count = self.data.sizes["change"]
        if count > 1:
            text += f"; {late} of {count} changes peak later than the first state"
        elif late:
            text += f", {float(top['peak']) / max(abs(self._first(scale)), 1e-300):.3g} × its immediate effect"
        return text + "."

    def _first(self, scale: float) -> float:
        first = self.data["response"].sel({"answer": self.best_answer, "scale": scale})
        return float(first.isel(horizon=0, change=0))

    def table(self) -> str:
        """One line per change and answer at the largest scale."""
        scale = float(self.data["scale"].values.max())
        summary = self.summary.sel(scale=scale)
        order = summary.sel({"answer": self.best_answer})["peak"].argsort().values[::-1][:SHOWN_CHANGES]
        width = max(6, *(len(str(name)) for name in self.data["change"].values))
        lines = [
            f"{'change':<{width}}  {'answer':<10}  {'peak':>10}  {'at h':>4}  {'total |δF|':>10}  response by horizon"
        ]
        for i in order:
            for k, answer in enumerate(self.data["answer"].values):
                row = summary.sel({"answer": answer}).isel(change=i)
                curve = self.data["response"].sel({"answer": answer, "scale": scale}).isel(change=i).values
                name = str(row["change"].item()) if k == 0 else ""
                lines.append(
                    f"{name:<{width}}  {answer:<10}  {float(row['peak_sign'] * row['peak']):>+10.3g}  "
                    f"{int(row['peak_horizon']):>4}  {float(row['total_abs']):>10.3g}  {sparkline(curve)}"
                )
        hidden = self.data.sizes["change"] - len(order)
        return "\n".join(lines + ([f"({hidden} more changes; see .summary)"] if hidden else []))


def _after(horizon: int) -> str:
    return "in the first state after it" if horizon == 1 else f"{horizon} states after it"


def sparkline(values: Iterable[float]) -> str:
    """A curve in characters: heights are magnitudes, the note says where its sign changes."""
    curve = [float(value) for value in values]
    largest = max(map(abs, curve), default=0.0) or 1.0
    bars = "".join(BARS[round(abs(value) / largest * (len(BARS) - 1))] for value in curve)
    signs = ["+" if value > 0 else "−" if value < 0 else "0" for value in curve]
    flip = next((i for i in range(1, len(signs)) if signs[i] != signs[i - 1]), None)
    return f"{bars}  ({signs[0] if flip is None else f'{signs[0]} then {signs[flip]} from h={flip + 1}'})"


def labelled(
    change: Change,
    watch: Watch,
    found: Responses,
    names: Sequence[str],
    scales: Sequence[float],
    refused: str,
) -> Response:
    """Tensors become labelled data."""
    import xarray as xr

    answers = list(found.values)
    zero_v = torch.tensor(found.zero_v)
    data = xr.Dataset(
        {
            "response": (
                ("answer", "change", "scale", "horizon"),
                torch.stack([found.values[answer] for answer in answers]).numpy(),
            ),
            "control": ("horizon", found.control.numpy()),
            "noise_floor": ("horizon", found.noise.numpy()),
            "clip_switched": (("change", "scale"), found.clip_switched.numpy()),
            "zero_v": ("change", zero_v[:, 0].numpy()),
            "zero_v_touched": ("change", zero_v[:, 1].numpy()),
            "no_derivative": ("change", zero_v[:, 2].numpy()),
            "xi_norm": ("change", found.xi_norm),
        },
        coords={
            "answer": answers,
            "change": list(names),
            "scale": list(scales),
            "horizon": watch.range,
        },
        attrs={
            **provenance(change.path.trajectory),
            "check": str(change.path.check()),
            "kind": change.kind,
            "at": change.at,
            "probe": watch.probe.name,
            "refused": refused,
        },
    )
    return Response(data)


def load_response(path: str | FilePath) -> Response:
    """A response saved by `Response.save`."""
    import xarray as xr

    path = FilePath(path)
    if not path.exists():
        raise InvalidFile(f"there is no saved response at {path}")
    try:
        data = xr.open_zarr(path, chunks=None, consolidated=False).load()
        wanted = {"response", "control", "noise_floor"}
        if not wanted <= set(data.data_vars):
            raise InvalidFile(f"{path} is not a saved response: it has no {sorted(wanted - set(data.data_vars))[0]!r}")
    except InvalidFile:
        raise
    except Exception as error:
        raise InvalidFile(f"{path} is damaged or not a saved response: {error}") from error
    return Response(data)
