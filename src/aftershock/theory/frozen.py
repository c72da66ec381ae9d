"""The frozen memory model: one coordinate of AdamW with its coefficients held fixed (the paper's section 3.5, app. C).

    z' = Ā z,   z = (δθ, δm, δv),       Ā = ⎡ a    b_m  b_v ⎤
                                            ⎢ d_m  β1   0   ⎥
                                            ⎣ d_v  0    β2  ⎦        (eq:frozen_memory)

b_m, b_v turn memory into motion; d_m, d_v feed motion back into memory. It shows how a write that waits in m or v
comes out late, and larger, even where the system is stable. It is a picture of the mechanism, not a forecast: the
coefficients of a real run move, and its coordinates are coupled.
"""

from __future__ import annotations

import html
import math
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from ..core.randomness import Randomness
from ..errors import InvalidInput, NotFinite
from ..results.files import load_dataset, save_dataset
from ..results.provenance import provenance
from ..results.summaries import summarize
from .freezing import Coordinate, Place, exact_diagonal, sampled_diagonal

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr

    from ..api.path import Path

CHANNELS = ("m", "v")
COEFFICIENTS = ("a", "b_m", "b_v", "d_m", "d_v", "beta1", "beta2")
# Rounding parts a double pole by √ε ≈ 1e-8 and gives its eigenvectors a condition number of about 1e8. Past 1e6 a
# modal form would have lost half its digits, and nobody could tell it from the modal form of a defective matrix.
MODAL_LIMIT = 1e6


@dataclass(frozen=True)
class FrozenMemory:
    """Ā and what follows from it. The channels are m and v; horizon 1 is the state that holds the write.

    >>> frozen = theory.FrozenMemory.of_scalars(
    ...     retention=1.0, dq_dm=-0.1, dq_dv=0.0, dtheta_dg=-0.01, curvature=2.0, gradient=0.5, beta1=0.9, beta2=0.999
    ... )
    >>> frozen.matrix.round(3).tolist()
    [[0.98, -0.09, 0.0], [0.2, 0.9, 0.0], [0.002, 0.0, 0.999]]
    >>> frozen.response(4).sel(channel="m").values.round(3).tolist()  # late, and growing
    [0.0, -0.09, -0.169, -0.237]
    >>> bool(abs(frozen.short_response() - frozen.response(4)).max() < 1e-12)
    True
    >>> frozen.peak(20)["peak_horizon"].values.tolist(), frozen.amplification()["transient"].values.tolist()
    ([10, 1], [True, False])
    >>> frozen.stable, round(frozen.spectral_radius, 3), abs(frozen.poles).round(3).tolist()
    (True, 0.999, [0.999, 0.949, 0.949])
    >>> list(frozen.coefficients)
    ['a', 'b_m', 'b_v', 'd_m', 'd_v', 'beta1', 'beta2']
    >>> frozen.loop_gains.values.round(3).tolist(), frozen.loop_signs().values.tolist()
    ([-0.018, 0.0], [-1, 0])
    >>> dict(frozen.modes().sizes), frozen.characteristic_polynomial.round(3).tolist()
    ({'mode': 3, 'channel': 2}, [1.0, -2.879, 2.778, -0.899])
    >>> bool((abs(frozen.response(9)) <= frozen.bounds(9)["modal"] + 1e-12).all())
    True
    >>> over, under = frozen.transfer_polynomials("m")
    >>> over.round(3).tolist(), frozen.transfer(2.0).values.real.round(3).tolist()
    ([-0.09, 0.09], [-0.079, 0.0])
    """

    a: float
    b_m: float
    b_v: float
    d_m: float
    d_v: float
    beta1: float
    beta2: float
    # A mapping of what made them, which its tables carry: a path's provenance; of numbers that were given nothing.
    made: Any = field(default_factory=dict, compare=False, repr=False)

    kind: ClassVar[str] = "frozen memory model"

    def __post_init__(self) -> None:
        broken = [name for name, value in self.coefficients.items() if not math.isfinite(value)]
        if broken:
            raise NotFinite(
                f"the frozen coefficient {broken[0]} is {getattr(self, broken[0])}: no frozen system exists at this "
                "point. Look for a NaN or an overflow in its gradient, its moments or its curvature"
            )
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise InvalidInput(f"{name} must be at least 0 and below 1; got {getattr(self, name)}")

    @classmethod
    def of_scalars(
        cls, *, retention: float, dq_dm: float, dq_dv: float, dtheta_dg: float, curvature: float,
        gradient: float, beta1: float, beta2: float,
    ) -> FrozenMemory:  # fmt: skip
        """From D (`retention`, 1 − ηλ), M, V, Γ, H, g: a = D + ΓH, b = (β1 M, β2 V), d = ((1−β1) H, 2(1−β2) g H)."""
        return cls(
            a=retention + dtheta_dg * curvature,
            b_m=beta1 * dq_dm,
            b_v=beta2 * dq_dv,
            d_m=(1 - beta1) * curvature,
            d_v=2 * (1 - beta2) * gradient * curvature,
            beta1=beta1,
            beta2=beta2,
        )

    @classmethod
    def of(cls, path: Path, step: int, coordinate: Coordinate) -> FrozenMemory:
        """The diagonal of each block of A_s (eq:joint_state_jacobian) at one coordinate, or its mean over several.

        coordinate: a flat index or slice (parameters in the order of their groups), the name of a parameter, or
        (name, index), indexed as the tensor itself. Costs 1.2 g and one Hessian product, 1–2 g, per coordinate.

        >>> frozen = theory.FrozenMemory.of(path, step=1, coordinate="2.bias")
        >>> frozen.stable, round(frozen.a, 3)
        (True, 0.999)
        """
        place = Place.of(path, step, coordinate, exact_diagonal)
        return cls(**place.coefficients(), made=provenance(path.trajectory))

    @classmethod
    def estimate(
        cls, path: Path, step: int, coordinate: Coordinate, *, samples: int, generator: Randomness = 0
    ) -> FrozenMemory:
        """An unbiased estimate of `of` over many coordinates, at one Hessian product per sample.

        Each H_ii is estimated by z_i (Hz)_i with random signs z on these coordinates; b_m and b_v are exact.

        generator: draws the signs; or an integer seed.

        >>> frozen = theory.FrozenMemory.estimate(path, 1, slice(None), samples=4)
        >>> frozen.b_m == theory.FrozenMemory.of(path, 1, slice(None)).b_m
        True
        """
        place = Place.of(path, step, coordinate, sampled_diagonal(samples, generator))
        return cls(**place.coefficients(), made=provenance(path.trajectory))

    @property
    def coefficients(self) -> dict[str, float]:
        """a, b_m, b_v, d_m, d_v, β1 and β2 by name."""
        return {name: getattr(self, name) for name in COEFFICIENTS}

    # --- a result as any other

    @property
    def data(self) -> xr.Dataset:
        """The coefficients as a dataset, with what made them in its attributes.

        >>> float(theory.FrozenMemory.of(path, step=1, coordinate="2.bias").data["beta1"])
        0.9
        """
        import xarray as xr

        return xr.Dataset(self.coefficients, attrs=self.made)

    def save(self, path: str | pathlib.Path) -> None:
        """Write `data` as zarr, whole or not at all. `load` reads it.

        >>> theory.FrozenMemory.of(path, step=1, coordinate="2.bias").save("frozen.zarr")
        """
        save_dataset(self.data, pathlib.Path(path))

    @classmethod
    def load(cls, path: str | pathlib.Path) -> FrozenMemory:
        """A frozen memory model that was saved with `save`; another file is an `InvalidFile`.

        >>> theory.FrozenMemory.of(path, step=1, coordinate="2.bias").save("frozen.zarr")
        >>> theory.FrozenMemory.load("frozen.zarr").stable
        True
        """
        data = load_dataset(pathlib.Path(path), COEFFICIENTS, f"saved {cls.kind}")
        return cls(**{name: float(data[name]) for name in COEFFICIENTS}, made=data.attrs)

    def __str__(self) -> str:
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in self.coefficients.items())
        word = "stable" if self.stable else "not stable"
        return f"frozen memory model, {word} (spectral radius {self.spectral_radius:.6g}): {numbers}"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    # --- the response of the parameter to a unit write into m or v

    @property
    def matrix(self) -> np.ndarray:
        """Ā."""
        import numpy as np

        return np.array(
            [[self.a, self.b_m, self.b_v], [self.d_m, self.beta1, 0.0], [self.d_v, 0.0, self.beta2]], dtype=np.float64
        )

    def response(self, horizon: int, probe_sensitivity: float = 1.0) -> xr.DataArray:
        """γ_F r_k(h) for h = 1 … `horizon`, r_k(h) = e_θᵀ Ā^{h−1} e_k. `probe_sensitivity` is γ_F = ∂F/∂θ.

        eq:memory_channel_response.
        """
        import numpy as np

        if horizon < 1:
            raise InvalidInput(f"the first horizon is 1; got horizon={horizon}")
        if not math.isfinite(probe_sensitivity) or probe_sensitivity == 0:
            raise InvalidInput(f"the probe's sensitivity must be finite and not zero; got {probe_sensitivity}")
        row, rows = np.array([1.0, 0.0, 0.0]), []
        with np.errstate(over="ignore", invalid="ignore"):
            for h in range(1, horizon + 1):
                if not np.isfinite(row).all():
                    raise NotFinite(
                        f"the response overflows at horizon {h}: the spectral radius of this frozen system is "
                        f"{self.spectral_radius:.4g}; ask for an earlier horizon"
                    )
                rows.append(row[1:])
                row = row @ self.matrix
        return _labelled(probe_sensitivity * np.array(rows).T, "response", self.made)

    def short_response(self) -> xr.DataArray:
        """r_k(1 … 4) in closed form (prop:adamw_memory_response, eq:four_step_memory_response)."""
        import numpy as np

        rows = []
        for b, beta in ((self.b_m, self.beta1), (self.b_v, self.beta2)):
            rows.append([0.0, b, b * (self.a + beta), b * self._four_step_factor(beta)])
        return _labelled(np.array(rows), "response", self.made)

    def _four_step_factor(self, beta: float) -> float:
        return self.a**2 + self.a * beta + beta**2 + self.b_m * self.d_m + self.b_v * self.d_v

    def amplification(self) -> xr.Dataset:
        """Whether |r_k(3)| > |r_k(2)| (`two_step`) and |r_k(4)| > |r_k(3)| (`feedback`), from the coefficients alone.

        eq:two_step_amplification_condition, |a + β_k| > 1, and eq:feedback_amplification_condition; both need b_k ≠ 0.
        `transient` marks growth of either kind in a stable system.
        """
        import numpy as np
        import xarray as xr

        betas = (self.beta1, self.beta2)
        coupled = np.array([self.b_m != 0, self.b_v != 0])
        two_step = coupled & np.array([abs(self.a + beta) > 1 for beta in betas])
        feedback = coupled & np.array([abs(self._four_step_factor(beta)) > abs(self.a + beta) for beta in betas])
        values = {"two_step": two_step, "feedback": feedback, "transient": (two_step | feedback) & self.stable}
        variables = {name: ("channel", value) for name, value in values.items()}
        return xr.Dataset(variables, {"channel": list(CHANNELS)}, self.made)

    def peak(self, horizon: int, probe_sensitivity: float = 1.0) -> xr.Dataset:
        """Summaries of the response up to `horizon`: peak, peak_horizon h*_k, peak_sign and the others.

        `settled` says that no later horizon exceeds the peak, so that h*_k is the earliest peak of all h ≥ 1: in a
        stable system the modal bound only falls, and it has fallen below the peak (or b_k = 0, and nothing ever comes
        out). It needs a modal form.
        """
        found = summarize(self.response(horizon, probe_sensitivity))
        later = self.bounds(horizon + 1)["modal"].isel(horizon=-1, drop=True) * abs(probe_sensitivity)
        silent = found["peak"].copy(data=[self.b_m == 0, self.b_v == 0])
        settled = ((later <= found["peak"]) & self.stable) | silent
        return found.assign(settled=settled).assign_attrs(self.made)

    # --- spectrum and transfer functions

    @property
    def loop_gains(self) -> xr.DataArray:
        """b_m d_m and b_v d_v: what a displacement returns to itself through m and through v."""
        import xarray as xr

        gains = [self.b_m * self.d_m, self.b_v * self.d_v]
        return xr.DataArray(gains, {"channel": list(CHANNELS)}, "channel", name="loop_gain", attrs=self.made)

    def loop_signs(self) -> xr.DataArray:
        """sign(b_m d_m) = −sign(H) and sign(b_v d_v) = sign(m g H), as −1, 0 or 1; 0 where β_k = 0 cuts the loop."""
        import numpy as np

        signs = np.sign([self.b_m, self.b_v]) * np.sign([self.d_m, self.d_v])  # the product may underflow
        return self.loop_gains.copy(data=signs.astype(int)).rename("loop_sign")

    @property
    def characteristic_polynomial(self) -> np.ndarray:
        """p(λ) = (λ−a)(λ−β1)(λ−β2) − b_m d_m (λ−β2) − b_v d_v (λ−β1), highest power first.

        eq:app_characteristic_polynomial.
        """
        import numpy as np

        uncoupled = np.poly([self.a, self.beta1, self.beta2])
        through_m = self.b_m * self.d_m * np.poly([self.beta2])
        through_v = self.b_v * self.d_v * np.poly([self.beta1])
        return np.polysub(np.polysub(uncoupled, through_m), through_v)

    @property
    def poles(self) -> np.ndarray:
        """The roots of p, that is the eigenvalues of Ā, largest first."""
        return self._eigen[0]

    @property
    def spectral_radius(self) -> float:
        """ρ(Ā)."""
        return float(abs(self.poles[0]))

    @property
    def stable(self) -> bool:
        """Every pole lies strictly inside the unit disk: Ā^h → 0."""
        return self.spectral_radius < 1

    def transfer_polynomials(self, channel: str) -> tuple[np.ndarray, np.ndarray]:
        """Numerator and denominator of 𝓗_k, highest power first: b_m (z−β2) / p(z) and b_v (z−β1) / p(z)."""
        import numpy as np

        if channel not in CHANNELS:
            raise InvalidInput(f"the memory channels are m and v; got {channel!r}")
        gain, zero = (self.b_m, self.beta2) if channel == "m" else (self.b_v, self.beta1)
        return gain * np.poly([zero]), self.characteristic_polynomial

    def transfer(self, z: complex) -> xr.DataArray:
        """𝓗_k(z) = e_θᵀ (zI − Ā)^{−1} e_k = Σ_h r_k(h) z^{−h}. It does not exist at a pole."""
        import numpy as np
        import xarray as xr

        if np.polyval(self.characteristic_polynomial, z) == 0:
            raise InvalidInput(f"{z} is a pole of this frozen system; its transfer functions do not exist there")
        values = [complex(np.divide(*(np.polyval(p, z) for p in self.transfer_polynomials(k)))) for k in CHANNELS]
        return xr.DataArray(values, {"channel": list(CHANNELS)}, "channel", name="transfer", attrs=self.made)

    # --- modes

    @cached_property
    def _eigen(self) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """(poles, V with unit columns, V^{−1}); V is None where Ā has no modal form.

        Ā is first scaled so that each loop is as strong on its way out as on its way back. The scaling is exact for
        this pattern of zeros, and without it the units of m and v alone would make eigenvectors look parallel.
        """
        import numpy as np

        unit = max(1.0, abs(self.a))
        scale = np.array([1.0, *(_even(b, d, unit) for b, d in ((self.b_m, self.d_m), (self.b_v, self.d_v)))])
        poles, vectors = np.linalg.eig(self.matrix * scale / scale[:, None])
        order = np.argsort(-abs(poles), kind="stable")
        poles, vectors = poles[order], vectors[:, order]
        if not np.linalg.cond(vectors) < MODAL_LIMIT:
            return poles, None, None
        columns = scale[:, None] * vectors
        norms = np.linalg.norm(columns, axis=0)
        return poles, columns / norms, norms[:, None] * np.linalg.inv(vectors) / scale

    def modes(self) -> xr.Dataset:
        """Poles λ_i, residues (e_θᵀ v_i)(w_i* e_k) and κ₂(V).

        r_k(h) = Σ_i residue_ki λ_i^{h−1} (eq:app_modal_response); complex ones come in conjugate pairs.
        A defective matrix has no modal form: residues and κ₂ are NaN, and `reason` says why.
        """
        import numpy as np
        import xarray as xr

        poles, vectors, inverse = self._eigen
        residues, condition = np.full((2, 3), complex("nan+nanj")), math.nan
        if vectors is not None and inverse is not None:
            # a channel that never reaches the parameter has no residue: leave no rounding of zero behind
            reaches = np.array([[self.b_m != 0], [self.b_v != 0]])
            residues = np.where(reaches, vectors[0] * inverse[:, 1:].T, 0.0)
            condition = float(np.linalg.norm(vectors, 2) * np.linalg.norm(inverse, 2))
        data = xr.Dataset(
            {"pole": ("mode", poles), "residue": (("channel", "mode"), residues), "condition": condition},
            {"channel": list(CHANNELS)},
            self.made,
        )
        return data.assign(reason="" if vectors is not None else _NO_MODES)

    def bounds(self, horizon: int) -> xr.Dataset:
        """Three bounds of |r_k(h)|, each looser than the one before; NaN where there is no modal form.

        modal      Σ_i |e_θᵀ v_i| |w_i* e_k| |λ_i|^{h−1}
        norm       ‖e_θᵀ V‖ ‖Λ^{h−1}‖ ‖V^{−1} e_k‖
        condition  κ₂(V) ρ(Ā)^{h−1}, the same for both channels
        """
        import numpy as np
        import xarray as xr

        if horizon < 1:
            raise InvalidInput(f"the first horizon is 1; got horizon={horizon}")
        modes = self.modes()
        with np.errstate(over="ignore"):
            powers = abs(self.poles)[:, None] ** np.arange(horizon)
        modal = _labelled(abs(modes["residue"].values) @ powers, "modal", {})
        _, vectors, inverse = self._eigen
        ends = np.full(2, math.nan)
        if vectors is not None and inverse is not None:
            ends = np.linalg.norm(vectors[0]) * np.linalg.norm(inverse[:, 1:], axis=0)
        norm = _labelled(ends[:, None] * powers[0], "norm", {})
        condition = xr.DataArray(float(modes["condition"]) * powers[0], {"horizon": modal["horizon"]}, "horizon")
        values = {"modal": modal, "norm": norm, "condition": condition, "reason": modes["reason"]}
        return xr.Dataset(values, attrs=self.made)


# --- labels

_NO_MODES = "the matrix is defective, or too close to it to tell: two of its eigenvectors are parallel"


def _even(out: float, back: float, unit: float) -> float:
    """s with |out| s = |back| / s; with one side of the loop cut, the other becomes `unit`."""
    if out and back:
        return math.sqrt(abs(back)) / math.sqrt(abs(out))
    return unit / abs(out) if out else abs(back) / unit if back else 1.0


def _labelled(values: np.ndarray, name: str, made: Mapping[str, Any]) -> xr.DataArray:
    import xarray as xr

    coords = {"channel": list(CHANNELS), "horizon": range(1, values.shape[1] + 1)}
    return xr.DataArray(values, coords, ("channel", "horizon"), name=name, attrs=made)
