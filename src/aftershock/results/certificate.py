"""How far each answer may be trusted, measured against the exact pair and said in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import xarray as xr

TRUST_ERROR = 0.2  # the paper's bar for the symmetric error of a valid horizon or scale
TRUST_NRMSE, CARE_NRMSE = 0.2, 0.5
TRUST_SIGNS, CARE_SIGNS = 0.9, 0.75
NOISE_MARGIN = 10.0  # a peak below this many roundings of the loss is noise
TINY = 1e-30


def symmetric_error(exact: xr.DataArray, predicted: xr.DataArray) -> xr.DataArray:
    """e_h = |d − d̂| / (|d| + |d̂| + 1e−30)."""
    return abs(exact - predicted) / (abs(exact) + abs(predicted) + TINY)


def nrmse(exact: xr.DataArray, predicted: xr.DataArray) -> xr.DataArray:
    """(Σ_h (d − d̂)² / Σ_h d²)^½; undefined (NaN) where the exact response is zero throughout."""
    size = (exact**2).sum("horizon")
    return (((exact - predicted) ** 2).sum("horizon") / size.where(size > 0)) ** 0.5


def sign_agreement(exact: xr.DataArray, predicted: xr.DataArray, noise: xr.DataArray) -> xr.DataArray:
    """Share of horizons with the same sign, among those at which the exact response is above float noise."""
    counted = abs(exact) > noise
    return ((exact * predicted > 0) & counted).sum("horizon") / counted.sum("horizon")


def trusted_horizon(error: xr.DataArray) -> xr.DataArray:
    """The last horizon up to which every symmetric error stays within 0.2; 0 where the first fails."""
    good = (error <= TRUST_ERROR).astype(int).cumprod("horizon")
    return (good * error["horizon"]).max("horizon")


def validity_radius(error: xr.DataArray) -> xr.DataArray:
    """The largest scale run whose median symmetric error over horizons is within 0.2; 0 where none is."""
    valid = error.median("horizon") <= TRUST_ERROR
    return (valid * error["scale"]).max("scale")


@dataclass(frozen=True)
class Certificate:
    """Errors per answer, change and scale (`errors`, an xarray Dataset), and the verdict in words."""

    errors: xr.Dataset | None
    text: str

    def __str__(self) -> str:
        return self.text


def certify(data: xr.Dataset) -> Certificate:
    """The certificate of a response's dataset."""
    lines = [_noise_line(data), *_warnings(data)]
    response, answers = data["response"], [str(m) for m in data["answer"].values]
    if data.attrs.get("refused"):
        lines.insert(0, f"Only the exact response is given: {data.attrs['refused']}.")
    if "exact" not in answers:
        lines.insert(0, "Not verified: the exact pair was not run, so nothing here is proved. Do not trust it blindly.")
        return Certificate(None, "\n".join(lines))
    exact = response.sel({"answer": "exact"}, drop=True)
    others = [answer for answer in answers if answer != "exact"]
    if not others:
        lines.insert(0, "Exact: every number is the difference of two real runs.")
        return Certificate(None, "\n".join(lines))
    errors = _errors(data, exact, response.sel({"answer": others}))
    verdicts = [_verdict(answer, errors.sel({"answer": answer}), data) for answer in others]
    return Certificate(errors, "\n".join(verdicts + lines))


def _errors(data: xr.Dataset, exact: xr.DataArray, predicted: xr.DataArray) -> xr.Dataset:
    import xarray as xr

    error = symmetric_error(exact, predicted)
    return xr.Dataset(
        {
            "symmetric_error": error,
            "nrmse": nrmse(exact, predicted),
            "sign_agreement": sign_agreement(exact, predicted, data["noise_floor"]),
            "trusted_horizon": trusted_horizon(error),
            "validity_radius": validity_radius(error),
        }
    )


def _verdict(answer: str, errors: xr.Dataset, data: xr.Dataset) -> str:
    """One sentence: is this answer to be trusted at the largest scale, how good is it, how far does it reach."""
    scale = float(data["scale"].values.max())
    at = errors.sel(scale=scale)
    bad = at["nrmse"] > CARE_NRMSE
    bad |= ~(at["sign_agreement"] >= CARE_SIGNS)  # also where no horizon rises above the noise
    good = (at["nrmse"] <= TRUST_NRMSE) & (at["sign_agreement"] >= TRUST_SIGNS)
    count, last = data.sizes["change"], int(data["horizon"].values[-1])
    if int(bad.sum()) == count:
        word = "do not trust it"
    elif int(good.sum()) == count:
        word = "trust it"
    elif int(bad.sum()):
        word = f"do not trust it for {_names(data['change'].values[bad.values])}"
    else:
        word = "use it with care"
    reach = at["trusted_horizon"].median()
    text = (
        f"{answer.capitalize()} at scale {scale:g}: {word}. Its error (NRMSE) is {float(at['nrmse'].median()):.2g}"
        f"{_worst(at['nrmse'], count)}, its sign is right at {float(at['sign_agreement'].median()):.0%} of horizons, "
        f"and it holds within 20 % up to horizon {float(reach):.0f} of {last}"
    )
    if data.sizes["scale"] > 1:
        text += f"; its validity radius among the scales run is {float(errors['validity_radius'].median()):.3g}"
    return text + "."


def _worst(values: xr.DataArray, count: int) -> str:
    return f" (worst of {count}: {float(values.max()):.2g})" if count > 1 else ""


def _names(values: Any) -> str:
    names = [str(value) for value in values]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _noise_line(data: xr.Dataset) -> str:
    noise = float(data["noise_floor"].max())
    size = abs(data["response"]).max()
    text = f"One rounding of the probe's loss ({data.attrs.get('dtype', 'float')}) is {noise:.1g}"
    if float(size) < NOISE_MARGIN * noise:
        return (
            f"{text}, and no response rises clearly above it: do not trust any sign here. "
            "Use point.to(dtype=torch.float64)."
        )
    return f"{text}, {float(size) / max(noise, TINY):.1e} times below the largest response."


def _warnings(data: xr.Dataset) -> list[str]:
    lines = []
    touched, zero = int(data["zero_v_touched"].max()), int(data["zero_v"].max())
    if zero:
        lines.append(
            f"{zero:,} coordinates had no gradient yet (v = 0)"
            + (
                f"; a change touches {touched:,} of them, where the tangent's slope holds only for gradients far below "
                "eps: read the exact response, or the semilinear one."
                if touched
                else ", and no change touches them."
            )
        )
    broken = int(data["no_derivative"].max())
    if broken:
        lines.append(
            f"At {broken:,} touched coordinates no derivative exists (v = 0 with m ≠ 0, or no gradient in the "
            "control's step), so the tangent leaves them out."
        )
    switched = int(data["clip_switched"].sum())
    if switched:
        lines.append(
            f"Clipping switched on or off in {switched} of {data['clip_switched'].size} shocked runs: "
            "the linear answers cross a kink."
        )
    return lines
