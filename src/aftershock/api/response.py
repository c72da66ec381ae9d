"""`Response`: signed changes of a probe by change, scale and horizon, with their certificate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..core.probe import Watch
from ..core.responses import ANSWERS, Responses
from ..results.certificate import Certificate, certify, is_noise
from ..results.labelled import LabelledResult
from ..results.provenance import provenance
from ..results.summaries import crossing, spike_margin, summarize

if TYPE_CHECKING:
    import xarray as xr

    from .change import Change

SHOWN_CHANGES = 12
BARS = "▁▂▃▄▅▆▇█"


class Response(LabelledResult):
    """How the probe's loss differs because of each change, at every later state. Positive: the loss goes up.

    `data` is an `xarray.Dataset`:

    response[answer, change, scale, horizon]    δF; h = 1 is the first state after the change
    control[horizon], noise_floor[horizon]      the loss without the change, and how far rounding alone moves it
    clip_switched[change, scale]                clipping bound on one side of the pair only
    zero_v, zero_v_touched, no_derivative       per change: coordinates with v = 0; the tangent is poor there
    xi_norm                                     per change: ‖ξ‖; NaN where it is no difference of gradients
    at, kind, probe, refused                    the step, the kind of change, what is watched, and why answers are
                                                missing ("" where none is)
    check                                       what proves its Hessian products ("" where nothing is predicted)

    A run that diverges has an infinite response from its first infinite loss on.

    >>> response.order, response.best_answer, response.largest_scale
    (['replace 1', 'replace 0'], 'exact', 1.0)
    >>> [f"{value:+.4f}" for value in response.exact.sel(change="replace 1", scale=1.0).values]
    ['+0.0028', '+0.0053', '+0.0075', '+0.0095']
    """

    kind = "response"
    wanted = ("response", "control", "noise_floor", "at", "kind", "probe", "refused")

    @property
    def exact(self) -> xr.DataArray:
        """The truth: the difference of two real runs.

        >>> (response.exact.sel(horizon=4, scale=1.0) > 0).values.tolist()
        [False, True]
        """
        return self.data["response"].sel({"answer": "exact"})

    @property
    def semilinear(self) -> xr.DataArray:
        """AdamW exact at every step, only the network's gradient linear.

        >>> bool(abs(response.semilinear - response.exact).max() < 1e-4)
        True
        """
        return self.data["response"].sel({"answer": "semilinear"})

    @property
    def tangent(self) -> xr.DataArray:
        """The paper's linear response c Φ B ξ, times the scale.

        >>> bool((response.tangent * response.exact > 0).all())  # the signs agree
        True
        """
        return self.data["response"].sel({"answer": "tangent"})

    @cached_property
    def summary(self) -> xr.Dataset:
        """Peak, its horizon and sign, largest increase and decrease, totals; for every answer.

        An exact peak that cannot be told from rounding has the sign 0.

        >>> response.summary["peak_horizon"].sel(answer="exact", scale=1.0).values.tolist()
        [4, 4]
        """
        found = summarize(self.data["response"])
        lost = self.noise.sel(horizon=found["peak_horizon"]).drop_vars("horizon")
        return found.assign(peak_sign=found["peak_sign"].where(~lost, 0))

    @cached_property
    def noise(self) -> xr.DataArray:
        """Where an exact response is not clearly above what rounding alone does; nowhere for predictions.

        >>> bool(response.noise.any())
        False
        """
        response = self.data["response"]
        return is_noise(response, self.data["noise_floor"]) & (response["answer"] == "exact")

    @cached_property
    def certificate(self) -> Certificate:
        """How far each answer may be trusted: findings with their levels, and the errors behind them.

        >>> [(finding.subject, finding.level) for finding in response.certificate.findings]
        [('semilinear', 'ok'), ('tangent', 'care'), ('noise', 'note')]
        """
        return certify(self.data)

    def spike_margin(self, threshold: float) -> xr.DataArray:
        """How much the loss may rise at each horizon before it passes the threshold.

        >>> response.spike_margin(0.5).values.round(3).tolist()
        [-0.008, -0.003, 0.002, 0.007]
        """
        return spike_margin(self.data["control"], threshold)

    def crossing(self, threshold: float) -> xr.DataArray:
        """The first horizon at which a change lifts the loss over the threshold; NaN where none does.

        >>> response.crossing(0.5).sel(answer="exact", scale=1.0).values.tolist()
        [nan, 3.0]
        """
        return crossing(self.data["response"], self.spike_margin(threshold))

    def plot(self, **options: Any) -> Any:
        """Response curves as a plotly figure: a colour per change, a dash per answer, the peak marked.

        options: `changes`, labels to show (default: the eight largest), and `scale` (default: the largest).

        >>> type(response.plot()).__name__
        'Figure'
        """
        from ..report.figures import response_figure

        return response_figure(self, **options)

    def report(self, path: str | FilePath = "report.html") -> FilePath:
        """One self-contained page: verdict, curves, summaries, certificate.

        >>> response.report("report.html").exists()
        True
        """
        from ..report.response_page import write_response_page

        return write_response_page(self, FilePath(path))

    def __str__(self) -> str:
        return "\n\n".join([self.verdict, self.table(), str(self.certificate)])

    @property
    def best_answer(self) -> str:
        """The most exact answer that was run: exact, else semilinear, else tangent.

        >>> change.response(probe, answers=("semilinear", "tangent")).best_answer
        'semilinear'
        """
        return next(m for m in ANSWERS if m in self.data["answer"].values)

    @property
    def largest_scale(self) -> float:
        """The scale that words and pictures are about.

        >>> change.response(probe, scales=[0.25, 0.5]).largest_scale
        0.5
        """
        return float(self.data["scale"].values.max())

    @cached_property
    def order(self) -> list[str]:
        """Labels of the changes by the size of the best answer's peak at the largest scale, largest first.

        >>> response.order
        ['replace 1', 'replace 0']
        """
        peaks = self.summary["peak"].sel({"answer": self.best_answer, "scale": self.largest_scale})
        ranks = (-peaks.fillna(-1.0)).argsort(kind="stable").values  # a change without a response comes last
        return [str(name) for name in peaks["change"].values[ranks]]

    @property
    def verdict(self) -> str:
        """What the largest change does, in a sentence.

        >>> print(response.verdict.split(";")[0])
        'replace 1' at step 0 raises the loss most 4 states after it: 0.4928 → 0.5023 (+0.00947)
        """
        best = self.summary.sel({"answer": self.best_answer, "scale": self.largest_scale})
        text = f"'{self.order[0]}' at step {int(self.data['at'])} {self._deed()}"
        late, count = int((best["peak_horizon"] > 1).sum()), self.data.sizes["change"]
        if count > 1:
            text += f"; {late} of {count} changes peak later than the first state"
        if self.best_answer != "exact":
            text += f" (predicted by {self.best_answer}, not verified)"
        return text + "."

    def _deed(self) -> str:
        """What the first change of the order does, and when, with its sign."""
        curve = self.data["response"].sel(
            {"answer": self.best_answer, "scale": self.largest_scale, "change": self.order[0]}
        )
        top = self.summary.sel({"answer": self.best_answer, "scale": self.largest_scale, "change": self.order[0]})
        h, peak = int(top["peak_horizon"]), int(top["peak_sign"]) * float(top["peak"])
        now = float(self.data["control"].sel(horizon=h))
        if not float(top["peak"]):
            return "does not move the loss at all"
        if not peak:
            floor = float(self.data["noise_floor"].sel(horizon=h))
            return (
                f"does nothing that can be told from rounding: the loss differs by at most {float(top['peak']):.2g}, "
                f"and rounding alone moves it by {floor:.2g}"
            )
        if not math.isfinite(peak):
            return f"makes the run diverge: {_after(h)} the loss is not finite, and without the change it is {now:.4g}"
        word = "raises" if peak > 0 else "lowers"
        first = f", after {float(curve[0]):+.3g} in the first" if h > 1 and self.data.sizes["change"] == 1 else ""
        return f"{word} the loss most {_after(h)}: {apart(now, now + peak)} ({peak:+.3g}{first})"

    def table(self) -> str:
        """One line per change and answer at the largest scale, in the order that the heading names.

        >>> print(response.table().splitlines()[0])
        Changes by the size of their exact peak at scale 1, largest first:
        """
        scale, names = self.largest_scale, self.order[:SHOWN_CHANGES]
        width = max(6, *(len(name) for name in names))
        lines = [
            f"Changes by the size of their {self.best_answer} peak at scale {scale:g}, largest first:",
            f"{'change':<{width}}  {'answer':<10}  {'peak':>10}  {'at h':>4}  {'total |δF|':>10}  response by horizon",
        ]
        for name in names:
            for k, answer in enumerate(self.data["answer"].values):
                which = {"answer": answer, "scale": scale, "change": name}
                row, curve = self.summary.sel(which), self.data["response"].sel(which).values
                bars = sparkline(curve, self.noise.sel(which).values)
                lines.append(
                    f"{'' if k else name:<{width}}  {answer:<10}  {signed_peak(row):>10}  "
                    f"{int(row['peak_horizon']):>4}  {float(row['total_abs']):>10.3g}  {bars}"
                )
        hidden = self.data.sizes["change"] - len(names)
        return "\n".join(lines + ([f"({hidden} more changes with smaller peaks; see .summary)"] if hidden else []))


def apart(a: float, b: float) -> str:
    """Two numbers with four digits, or as many as it takes to tell them apart.

    >>> apart(0.49281, 0.5023), apart(4.2417, 4.2424), apart(2.0, 2.0)
    ('0.4928 → 0.5023', '4.2417 → 4.2424', '2 → 2')
    """
    digits = next((n for n in range(4, 17) if f"{a:.{n}g}" != f"{b:.{n}g}"), 4)
    return f"{a:.{digits}g} → {b:.{digits}g}"


def _after(horizon: int) -> str:
    return "in the first state after it" if horizon == 1 else f"{horizon} states after it"


def signed_peak(summary: xr.Dataset) -> str:
    """The peak of one response with its sign; ± where it cannot be told from rounding."""
    sign, peak = int(summary["peak_sign"]), float(summary["peak"])
    return f"±{peak:.3g}" if peak > 0 and not sign else f"{sign * peak:+.3g}" if peak else "0"


def sparkline(values: Iterable[float], noise: Iterable[bool] | None = None) -> str:
    """A curve in characters: heights are magnitudes, ∞ is a diverged run, ~ is noise; then where its sign changes.

    >>> sparkline([1.0, 4.0, -2.0])
    '▃█▅  (+ then − from h=3)'
    >>> sparkline([1e-9, 4.0, 4.0], [True, False, False])
    '~██  (noise then + from h=2)'
    """
    curve = [float(value) for value in values]
    lost = [False] * len(curve) if noise is None else [bool(one) for one in noise]
    largest = max((abs(value) for value in curve if math.isfinite(value)), default=0.0) or 1.0
    bars = "".join("~" if gone else _bar(value, largest) for value, gone in zip(curve, lost))
    signs = ["noise" if gone else _sign(value) for value, gone in zip(curve, lost)]
    flip = next((i for i in range(1, len(signs)) if signs[i] != signs[i - 1]), None)
    return f"{bars}  ({signs[0] if flip is None else f'{signs[0]} then {signs[flip]} from h={flip + 1}'})"


def _sign(value: float) -> str:
    return "+" if value > 0 else "−" if value < 0 else "0" if value == 0 else "nothing"


def _bar(value: float, largest: float) -> str:
    if math.isnan(value):
        return "·"
    return BARS[round(abs(value) / largest * (len(BARS) - 1))] if math.isfinite(value) else "∞"


def labelled(
    change: Change,
    watch: Watch,
    found: Responses,
    noise: Float[Tensor, " horizon"],
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
            "noise_floor": ("horizon", noise.numpy()),
            "clip_switched": (("change", "scale"), found.clip_switched.numpy()),
            "zero_v": ("change", zero_v[:, 0].numpy()),
            "zero_v_touched": ("change", zero_v[:, 1].numpy()),
            "no_derivative": ("change", zero_v[:, 2].numpy()),
            "xi_norm": ("change", found.xi_norm),
            "at": change.at,
            "kind": change.kind,
            "probe": watch.probe.name,
            "refused": refused,
            "check": change.path.proof(answers),
            "other_masks": 0.0 if set(answers) == {"exact"} else change.path.check().other_masks,
            "slope_error": watch.slope_error() if "tangent" in answers else 0.0,
        },
        coords={
            "answer": answers,
            "change": list(names),
            "scale": list(scales),
            "horizon": watch.range,
        },
        attrs=provenance(change.path.trajectory),
    )
    return Response(data)


def load_response(path: str | FilePath) -> Response:
    """A response saved by `Response.save`.

    >>> response.save("response.zarr")
    >>> ak.load_response("response.zarr").order == response.order
    True
    """
    return Response.load(path)
