"""How far each answer may be trusted: its errors against thresholds, and findings as data and words.

A finding is data first: its level, and the number that decided it beside its threshold. Pages and terminals take
their colours from the level; the sentence is for people, and no code reads it.
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from .fidelity import TINY, VALID, nrmse, sign_agreement, symmetric_error, trusted_horizon, validity_radius
from .summaries import diverged_at, finite

if TYPE_CHECKING:
    import xarray as xr

Level = Literal["note", "ok", "care", "bad"]  # from harmless to bad
SHOWN = 4  # names in one sentence


@dataclass(frozen=True)
class Trust:
    """The numbers that decide a verdict. Pass another one to `certify` to be stricter or more generous.

    >>> Trust(nrmse=0.1).nrmse
    0.1
    """

    symmetric_error: float = VALID  # the paper's bar
    # The paper has no bar for the numbers below; they are our judgement.
    nrmse: float = 0.2  # the same fifth, over all horizons together: sizes can be read off
    careful_nrmse: float = 0.5  # beyond it half of the response is error, and only its rough size is left
    curves: float = 0.05  # of a ranking's curves from exact kicks: a quarter of what its sizes may be off by
    signs: float = 0.9  # one horizon in ten may be wrong: where a response crosses zero, its sign is a toss-up
    careful_signs: float = 0.75  # halfway between always right (1) and a coin (0.5)
    slope: float = 0.05  # of a probe's slope: float32 and its curvature are below it, the known causes far above
    off_scale: float = 10.0  # times the largest rerun, or the outcome itself: there a prediction has lost its size
    noise_margin: float = 5.0  # times the measured scatter of rounding, which is itself known to a factor of a few

    def level(self, error: float) -> Level:
        """What a relative error over all horizons allows.

        >>> Trust().level(0.3)
        'care'
        """
        return "ok" if error <= self.nrmse else "care" if error <= self.careful_nrmse else "bad"


TRUST = Trust()


@dataclass(frozen=True)
class Finding:
    """One thing that was found out about a result.

    level: "ok", "care" (usable, with a reservation), "bad", or "note" (good to know, nothing wrong).
    subject: what it is about: an answer ("tangent"), "noise", "clipping", "divergence", …
    quantity, value, threshold: the number that decided the level, and what it was compared with; None where there
        is no such number.
    sentence: the same in words.

    >>> found = Finding("care", "tangent", "nrmse", 0.31, 0.2, "Tangent at scale 1: use it with care.")
    >>> found.level, found.value > found.threshold
    ('care', True)
    """

    level: Level
    subject: str
    quantity: str
    value: float | None
    threshold: float | None
    sentence: str


@dataclass(frozen=True)
class Certificate:
    """What was found out about a result, most important first, and the errors behind it.

    findings: each has a level, a number, its threshold and a sentence; `str(certificate)` is the sentences.
    errors: an `xarray.Dataset` by answer, change and scale; None where nothing could be compared.

    >>> certificate = Certificate((Finding("ok", "exact", "", None, None, "Exact: two real runs."),))
    >>> print(certificate)
    Exact: two real runs.
    >>> certificate.level
    'ok'
    """

    findings: tuple[Finding, ...]
    errors: xr.Dataset | None = None

    @property
    def level(self) -> Level:
        """The worst level of all findings."""
        order = get_args(Level)
        return max((finding.level for finding in self.findings), key=order.index, default="note")

    def __str__(self) -> str:
        return "\n".join(finding.sentence for finding in self.findings)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def masks(data: xr.Dataset) -> list[Finding]:
    """That predictions are of other dropout masks than the run's.

    >>> import xarray as xr
    >>> [finding.level for finding in masks(xr.Dataset({"other_masks": 0.31}))], masks(xr.Dataset())
    (['care'], [])
    """
    apart = float(data["other_masks"]) if "other_masks" in data else 0.0
    if not apart:
        return []
    sentence = (
        "Predictions are approximate: torch's fused attention draws dropout masks of its own and has no second "
        f"derivative, so that Hessian products are of other masks than training's (gradients of both are {apart:.0%} "
        'apart). Attention without dropout, or attn_implementation="eager" in training, has none of this.'
    )
    return [Finding("care", "dropout", "gradients apart", apart, 0.0, sentence)]


def slopes(data: xr.Dataset) -> list[Finding]:
    """That the probe's gradient, by which linear predictions read it, is not its derivative.

    >>> import xarray as xr
    >>> [len(slopes(xr.Dataset({"slope_error": off}))) for off in (0.5, 0.001)]
    [1, 0]
    """
    off = float(data["slope_error"]) if "slope_error" in data else 0.0
    if off <= TRUST.slope:
        return []
    sentence = (
        f"The probe's gradient is not its slope: a small step along it changes the probe by {off:.0%} less or more. "
        "Known causes: detach() or a straight-through estimator in what it computes, a custom backward pass. Tangent "
        "answers and rankings read it by that gradient; exact and semilinear ones do not."
    )
    return [Finding("care", "slope", "slope_error", off, TRUST.slope, sentence)]


def certify(data: xr.Dataset, trust: Trust = TRUST) -> Certificate:
    """The certificate of a response's dataset: what may be believed, and the numbers that say so.

    data: as in `Response.data`: `response[answer, change, scale, horizon]`, `noise_floor[horizon]`,
        `clip_switched[change, scale]`, and per change `zero_v`, `zero_v_touched`, `no_derivative`; where predictions
        are of other dropout masks, `other_masks`, and how far the probe's gradient is from its slope, `slope_error`.
    trust: the thresholds.

    >>> import xarray as xr
    >>> curves = [[[[1.0, 2.0]]], [[[1.0, 2.1]]]]  # exact and tangent, of one change at one scale
    >>> count = ("change", [0])
    >>> data = xr.Dataset(
    ...     {
    ...         "response": (("answer", "change", "scale", "horizon"), curves),
    ...         "noise_floor": ("horizon", [1e-7, 1e-7]),
    ...         "clip_switched": (("change", "scale"), [[False]]),
    ...         "zero_v": count, "zero_v_touched": count, "no_derivative": count,
    ...     },
    ...     {"answer": ["exact", "tangent"], "change": ["bad batch"], "scale": [1.0], "horizon": [1, 2]},
    ...     {"dtype": "float32"},
    ... )
    >>> found = certify(data)
    >>> [(finding.subject, finding.level) for finding in found.findings]
    [('tangent', 'ok'), ('noise', 'note')]
    >>> print(found.findings[0].sentence)
    Tangent at scale 1: trust it. Its error (NRMSE) is 0.045, its sign is right at 100% of horizons, and it holds \
within 20 % up to horizon 2 of 2.
    """
    answers = [str(answer) for answer in data["answer"].values]
    others = [answer for answer in answers if answer != "exact"]
    warnings = [_noise(data, answers, trust), *_warnings(data, answers), *masks(data), *slopes(data)]
    if "exact" not in answers:
        sentence = "Not verified: the exact pair was not run, so nothing here is proved. Do not trust it blindly."
        return Certificate((Finding("bad", "exact", "answers", None, None, sentence), *warnings))
    exact = data["response"].sel({"answer": "exact"}, drop=True)
    diverged = _divergence(exact)
    if not others:
        sentence = "Exact: every number is the difference of two real runs."
        proved = Finding("ok", "exact", "answers", None, None, sentence)
        return Certificate((*diverged, proved, *_refused(data), *warnings))
    predicted = data["response"].sel({"answer": others})
    errors = _errors(exact, predicted, data["noise_floor"], trust)
    moved = _moved(exact) | _moved(predicted)
    verdicts = [
        _verdict(answer, errors.sel({"answer": answer}), moved.sel({"answer": answer}), bool(diverged), trust)
        for answer in others
    ]
    return Certificate((*diverged, *verdicts, *_refused(data), *warnings), errors)


def _moved(response: xr.DataArray) -> xr.DataArray:
    """Which changes have a response at all: one that is 0 at every horizon, as of a batch replaced by itself, has
    neither an error nor a sign that could be wrong."""
    moved: xr.DataArray = (response != 0).any("horizon")
    return moved


def _errors(exact: xr.DataArray, predicted: xr.DataArray, noise: xr.DataArray, trust: Trust) -> xr.Dataset:
    import xarray as xr

    away = predicted.fillna(math.inf)  # a prediction that has left the numbers is wrong, not missing
    error = symmetric_error(exact, away)
    return xr.Dataset(
        {
            "symmetric_error": error,
            "nrmse": nrmse(exact, away),
            "sign_agreement": sign_agreement(exact, predicted, trust.noise_margin * noise),
            "trusted_horizon": trusted_horizon(error, trust.symmetric_error),
            "validity_radius": validity_radius(error, trust.symmetric_error),
        }
    )


def _verdict(answer: str, errors: xr.Dataset, moved: xr.DataArray, diverged: bool, trust: Trust) -> Finding:
    """Is this answer to be trusted at the largest scale, how good is it, how far does it reach.

    Changes that move nothing, neither in the exact run nor in this answer, are left out.
    """
    scale = float(errors["scale"].values.max())
    errors = errors.isel(change=moved.sel(scale=scale).values)
    at = errors.sel(scale=scale)
    if not at.sizes["change"]:
        sentence = f"{answer.capitalize()} at scale {scale:g}: trust it. It is exactly 0, and so is the exact response."
        return Finding("ok", answer, "nrmse", 0.0, trust.nrmse, sentence)
    wrong, signs, names = at["nrmse"].values, at["sign_agreement"].values, at["change"].values
    # written so that NaN, where nothing is finite and above the noise, is bad
    bad = ~((wrong <= trust.careful_nrmse) & (signs >= trust.careful_signs))
    good = (wrong <= trust.nrmse) & (signs >= trust.signs)
    level: Level = "ok" if good.all() else "bad" if bad.any() else "care"
    some = "" if bad.all() else f" for {_names([str(name) for name in names[bad]])}"
    word = {"ok": "trust it", "care": "use it with care", "bad": f"do not trust it{some}"}[level]
    bars = (trust.careful_nrmse, trust.careful_signs) if level == "bad" else (trust.nrmse, trust.signs)
    by_signs = level != "ok" and bool((wrong <= bars[0]).all())
    decided = ("sign_agreement", signs.min(), bars[1]) if by_signs else ("nrmse", wrong.max(), bars[0])
    sentence = f"{answer.capitalize()} at scale {scale:g}: {word}. {_quality(errors, at, diverged, trust)}."
    value = None if math.isnan(decided[1]) else float(decided[1])
    return Finding(level, answer, decided[0], value, decided[2], sentence)


def _quality(errors: xr.Dataset, at: xr.Dataset, diverged: bool, trust: Trust) -> str:
    """The errors in words."""
    count, last = at.sizes["change"], int(at["horizon"].values[-1])
    if not bool(at["sign_agreement"].notnull().any()):
        return "Its error cannot be measured: no exact response is finite and above the noise"
    worst = f" (worst of {count}: {_size(at['nrmse'].max())})" if count > 1 else ""
    text = (
        f"Its error (NRMSE) is {_size(at['nrmse'].median())}{worst}, its sign is right at "
        f"{float(at['sign_agreement'].median()):.0%} of horizons, and it holds within "
        f"{100 * trust.symmetric_error:g} % up to horizon {float(at['trusted_horizon'].median()):.0f} of {last}"
    )
    if errors.sizes["scale"] > 1:
        text += f"; its validity radius among the scales run is {float(errors['validity_radius'].median()):.3g}"
    return text + (". Only horizons at which the exact run is finite were compared" if diverged else "")


def _size(value: xr.DataArray) -> str:
    number = float(value)
    return f"{number:.2g}" if math.isfinite(number) else "infinite"


def _names(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _divergence(exact: xr.DataArray) -> list[Finding]:
    """Which runs left the finite numbers, and when."""
    first = diverged_at(exact)
    runs = [
        (int(at), str(change), float(scale))
        for change, row in zip(first["change"].values, first.transpose("change", "scale").values)
        for scale, at in zip(first["scale"].values, row)
        if not math.isnan(at)
    ]
    if not runs:
        return []
    runs.sort(key=lambda run: run[0])
    several = exact.sizes["scale"] > 1
    told = [f"'{name}'{f' at scale {scale:g}' if several else ''} at horizon {at}" for at, name, scale in runs]
    last, count = int(exact["horizon"].values[-1]), first.size
    which = "The exact run" if count == 1 else f"{len(runs)} of {count} exact runs"
    sentence = (
        f"{which} left the finite numbers: {_names(told)} (of {last}). From there on the response is infinite, and "
        "no prediction of it can be checked."
    )
    return [Finding("bad", "divergence", "diverged_at", float(runs[0][0]), None, sentence)]


def _refused(data: xr.Dataset) -> list[Finding]:
    reason = str(data["refused"].item()) if "refused" in data else ""
    sentence = f"Only the exact response is given: {reason}."
    return [Finding("note", "refused", "answers", None, None, sentence)] if reason else []


def is_noise(exact: xr.DataArray, floor: xr.DataArray) -> xr.DataArray:
    """Where an exact response is not clearly above what rounding does, so that it has no sign. 0 itself is not noise.

    exact: with a dimension `horizon`. floor: the scatter of rounding, by horizon or one number.

    >>> import xarray as xr
    >>> is_noise(xr.DataArray([0.0, 1e-9, 1.0], dims="horizon"), xr.DataArray(1e-9)).values.tolist()
    [False, True, False]
    """
    return (abs(exact) <= TRUST.noise_margin * floor) & (exact != 0)


def _noise(data: xr.Dataset, answers: list[str], trust: Trust) -> Finding:
    """What rounding alone does to the probe, beside the exact responses; a prediction is no evidence of its size."""
    floor = data["noise_floor"]
    text = f"Rounding alone ({data.attrs.get('dtype', 'float')}) moves the probe by {float(floor.max()):.1g}, measured"
    if "exact" not in answers:
        sentence = f"{text}; no exact response was run, to compare it with."
        return Finding("note", "noise", "peak_over_noise", None, trust.noise_margin, sentence)
    # what rounding swallows is 0 in the exact run and not in a prediction
    response = data["response"].isel(change=_moved(data["response"]).any(("answer", "scale")).values)
    exact = response.sel({"answer": "exact"}, drop=True)
    if not exact.sizes["change"]:
        sentence = f"{text}; no change has any response, to compare it with."
        return Finding("note", "noise", "peak_over_noise", None, trust.noise_margin, sentence)
    over = (abs(exact) / floor.where(floor > 0, TINY)).where(finite(exact)).max("horizon")
    ratio, low = float(over.max()), over.max("scale") < trust.noise_margin
    level: Level = "note"
    if math.isnan(ratio):
        text += "; no exact response is finite, to compare it with."
    elif ratio < trust.noise_margin:
        level = "bad"
        text += ", and no exact response rises clearly above it: do not trust any sign here."
        text += " Use point.to(dtype=torch.float64)." * (data.attrs.get("dtype") != "float64")
    elif low.any():
        level = "care"
        text += f"; {_names([str(name) for name in low['change'].values[low.values]])} cannot be told from it."
    else:
        text += f", {ratio:.1e} times below the largest exact response."
    return Finding(level, "noise", "peak_over_noise", None if math.isnan(ratio) else ratio, trust.noise_margin, text)


def _warnings(data: xr.Dataset, answers: list[str]) -> list[Finding]:
    """What makes linear answers doubtful; notes only, where no such answer was run."""
    linear: Level = "care" if set(answers) - {"exact"} else "note"
    tangent: Level = "care" if "tangent" in answers else "note"
    found = []
    touched, zero = int(data["zero_v_touched"].max()), int(data["zero_v"].max())
    if zero and touched:
        sentence = (
            f"{zero:,} coordinates had no gradient yet (v = 0); a change touches {touched:,} of them, where the "
            "tangent's slope holds only for gradients far below eps: read the exact response, or the semilinear one."
        )
        found.append(Finding(tangent, "v = 0", "zero_v_touched", touched, 0, sentence))
    elif zero:
        sentence = f"{zero:,} coordinates had no gradient yet (v = 0), and no change touches them."
        found.append(Finding("note", "v = 0", "zero_v_touched", touched, 0, sentence))
    if broken := int(data["no_derivative"].max()):
        sentence = (
            f"At {broken:,} touched coordinates no derivative exists (v = 0 with m ≠ 0, or no gradient in the "
            "control's step), so the tangent leaves them out."
        )
        found.append(Finding(tangent, "v = 0", "no_derivative", broken, 0, sentence))
    if switched := int(data["clip_switched"].sum()):
        sentence = (
            f"Clipping switched on or off in {switched} of {data['clip_switched'].size} shocked runs: "
            "the linear answers cross a kink."
        )
        found.append(Finding(linear, "clipping", "clip_switched", switched, 0, sentence))
    return found
