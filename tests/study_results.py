"""Made-up results of a study whose tables can be worked out by hand."""

from __future__ import annotations

import numpy as np
import xarray as xr

from aftershock.studies.study import Study

SCALES = {"quadratic": [1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0], "cifar": [0.0625, 0.125, 0.25, 0.5, 1.0]}
HORIZONS = {"quadratic": 32, "cifar": 12}
CHANGES, FUTURES, PERMUTATIONS, LONG = 5, 6, 20, 128
PREDICTIONS = {"quadratic": ["tangent", "endpoint"], "cifar": ["tangent", "semilinear"]}
WOBBLE = 0.04  # less than the curve falls beside its peak
SETTINGS = {"quadratic": ("standard", "anisotropic", "rotating"), "cifar": ("mlp", "cnn")}
SCORES = (
    "full_iso", "no_propagation", "initial_theta", "clamped_theta", "frozen_dynamics", "frozen_readout",
    "norm_product", "exact_one_step", "gradient_norm", "write_norm", "curvature", "endpoint", "semilinear",
)  # fmt: skip
PRESENT = (
    "exact_one_step", "gradient_norm", "write_norm", "present_frozen", "reference_surrogate", "sampled_future",
)  # fmt: skip
CHANNELS = ("000", "100", "010", "001", "110", "101", "011", "111")
PEAKS = {"100": 2, "010": 6, "001": 9, "110": 5, "101": 3, "011": 7, "111": 4, "000": 1}
SIZES = {"100": 0.25, "010": 0.75, "001": 0.05, "110": 1.1, "101": 0.2, "011": 0.7, "111": 1.0, "000": 0.0}


FROZEN = {"a": 0.99, "b_m": -0.02, "b_v": 0.5, "d_m": 0.03, "d_v": 1e-4, "beta1": 0.9, "beta2": 0.999}


def slopes(count: int) -> np.ndarray:
    """The tangent's relative error at α = 1, system by system: 0.30, 0.32, …"""
    return 0.3 + 0.02 * np.arange(count)


def bump(horizons: int, peak: int) -> np.ndarray:
    """1 at the peak, falling by a twentieth each step to either side, never below a tenth."""
    h = np.arange(1, horizons + 1)
    return np.maximum(1 - 0.05 * abs(h - peak), 0.1)


def made(study: str, systems: int = 6) -> dict[str, xr.Dataset]:
    """Results by setting: every variable of the study, the same for each of its settings but for names."""
    return {setting: _setting(study, setting, systems) for setting in SETTINGS[study]}


def study_of(name: str, systems: int = 6) -> Study:
    return Study(name, (), ("all",), lambda system, piece: {}, {"seed": 7, "note": "<b>made up</b>"})


def _setting(study: str, setting: str, systems: int) -> xr.Dataset:
    scales, horizons = np.array(SCALES[study]), HORIZONS[study]
    sizes = 1.0 + np.arange(CHANGES)  # M of candidate i at α = 1
    curve = sizes[:, None, None] * scales[None, :, None] * bump(horizons, 4)
    exact = np.broadcast_to(curve, (systems, *curve.shape))
    grown = 1 + slopes(systems)[:, None, None, None] * scales[None, None, :, None]
    predicted = np.stack([exact * grown, exact * 1.001], axis=1)
    kind = setting if study == "cifar" else "quadratic"
    variables = {
        "exact": (("system", "change", "scale", "horizon"), exact),
        "predicted": (("system", "answer", "change", "scale", "horizon"), predicted),
        **_identity(study, setting, systems, horizons),
        "readout_cosine": (
            ("system", "horizon"),
            np.broadcast_to(np.linspace(1, 0.914, horizons), (systems, horizons)),
        ),
        **_ranked(systems, sizes),
        **_memory(study, systems, horizons),
        **_futures(systems, horizons, sizes),
    }
    if setting != "rotating":
        frozen = np.array(list(FROZEN.values()))
        variables["frozen_memory"] = (("system", "coefficient"), np.broadcast_to(frozen, (systems, len(frozen))))
    if setting == "cnn":
        shares = 1e-4 * scales[None, None, :, None] * np.ones((systems, CHANGES, 1, horizons))
        variables["switch_fraction"] = (("system", "change", "scale", "horizon"), shares)
    coords = {
        "system": [f"{kind}-7-{i}" for i in range(systems)],
        "answer": PREDICTIONS[study],
        "change": np.arange(CHANGES),
        "scale": scales,
        "horizon": np.arange(1, horizons + 1),
        "family": ["natural", "matched"],
        "score_method": list(SCORES),
        "present_method": list(PRESENT),
        "channel": list(CHANNELS),
        "decay_m": [0.5, 0.8, 0.9, 0.95, 0.99],
        "decay_v": [0.9, 0.99, 0.999, 0.9999],
        "long_horizon": np.arange(1, LONG + 1),
        "coefficient": list(FROZEN),
    }
    attrs = {
        "machines": [{"machine": "x86_64", "processor": "made-up CPU", "gpu": None}],
        "seed": 7,
    }
    return xr.Dataset(variables, coords, attrs)


def _identity(study: str, setting: str, systems: int, horizons: int) -> dict[str, tuple]:
    """Of networks also what the error is made of: a fifth write-in, and gates switch in the CNN alone."""
    if study == "quadratic":
        return {"identity_residual": ("system", np.full(systems, 2e-17))}
    shares = (
        {"write_in": 0.2, "smooth": 0.5, "switching": 0.3} if setting == "cnn" else {"write_in": 0.2, "smooth": 0.8}
    )
    found: dict[str, tuple] = {
        "identity_residual": (("system", "change"), np.full((systems, CHANGES), 2e-17)),
        "sources_scale": ("system", np.full(systems, 0.25)),
    }
    for part in ("write_in", "smooth", "switching"):
        values = np.full((systems, CHANGES, horizons), shares.get(part, 0.0))
        found[f"state_share_{part}"] = (("system", "change", "horizon"), values)
        # parts of either sign: shares of the response's error go by their sizes
        found[f"output_from_{part}"] = (
            ("system", "change", "horizon"),
            1e-6 * values * (-1 if part == "smooth" else 1),
        )
    return found


def _ranked(systems: int, sizes: np.ndarray) -> dict[str, tuple]:
    """Full ISO ranks perfectly, the gradient norm backwards, every other score swaps the two smallest (ρ = 0.9)."""
    score = np.broadcast_to(sizes, (systems, 2, len(SCORES), CHANGES)).copy()
    score[..., [0, 1]] = score[..., [1, 0]]
    for name in ("full_iso", "endpoint", "semilinear"):
        score[:, :, SCORES.index(name)] = sizes
    score[:, :, SCORES.index("gradient_norm")] = sizes[::-1]
    score[:, 1, SCORES.index("exact_one_step")] = 0.5  # matched: tied
    first = np.stack([0.5 * sizes, np.full(CHANGES, 0.5) * (-1.0) ** np.arange(CHANGES)])
    return {
        "score": (("system", "family", "score_method", "change"), score),
        "magnitude": (("system", "family", "change"), np.broadcast_to(sizes, (systems, 2, CHANGES))),
        "null_correlation": (("system", "family", "permutation"), np.full((systems, 2, PERMUTATIONS), 0.6)),
        "first_step": (("system", "family", "change"), np.broadcast_to(first, (systems, 2, CHANGES))),
        "accepted": (("system", "change"), np.ones((systems, CHANGES), dtype=bool)),
        "parameter_gain": (("system", "change"), np.full((systems, CHANGES), 7.5)),
    }


def _memory(study: str, systems: int, horizons: int) -> dict[str, tuple]:
    chosen = 3
    signs = np.array([1.0, 1.0, -1.0])[:, None]  # two of three extrema are positive

    def over(curves: list[np.ndarray]) -> np.ndarray:
        stacked = np.stack([signs * curve for curve in curves])
        return np.broadcast_to(stacked, (systems, *stacked.shape))

    decays_m, decays_v = (0.5, 0.8, 0.9, 0.95, 0.99), (0.9, 0.99, 0.999, 0.9999)
    found = {
        "channel_exact": (
            ("system", "channel", "channel_change", "horizon"),
            over([SIZES[c] * bump(horizons, PEAKS[c]) for c in CHANNELS]),
        ),
        "persistence_m": (
            ("system", "decay_m", "persistence_change", "horizon"),
            over([(i + 1) * bump(horizons, 3 + i) for i in range(len(decays_m))]),
        ),
        "persistence_v": (
            ("system", "decay_v", "persistence_change", "horizon"),
            over([(i + 1) * bump(horizons, 5) for i in range(len(decays_v))]),
        ),
    }
    if study == "quadratic":
        found["channel_long"] = (
            ("system", "channel", "channel_change", "long_horizon"),
            over([SIZES[c] * bump(LONG, 4 * PEAKS[c]) for c in CHANNELS]),
        )
        found["persistence_long_m"] = (
            ("system", "decay_m", "persistence_change", "long_horizon"),
            over([(i + 1) * bump(LONG, 3 + 9 * i) for i in range(len(decays_m))]),
        )
    assert all(values.shape[2] == chosen for _, values in found.values())
    return found


def _futures(systems: int, horizons: int, sizes: np.ndarray) -> dict[str, tuple]:
    """Candidate i has M = i in every future, give or take WOBBLE at the peak alone; the last one lowers the loss."""
    response = (sizes[:, None, None] * bump(horizons, 4)).repeat(FUTURES, axis=1)
    response[:, :, 3] += WOBBLE * np.where(np.arange(FUTURES) % 2, 1.0, -1.0)
    response[-1] *= -1
    score = np.broadcast_to(sizes, (systems, 2, len(PRESENT), CHANGES)).copy()
    score[:, :, PRESENT.index("present_frozen")] = sizes[::-1]
    score[:, 1, PRESENT.index("exact_one_step")] = 0.5
    matched = 0.5 * (-1.0) ** np.arange(CHANGES) * (1 + 1e-12 * np.arange(CHANGES))
    return {
        "future_response": (
            ("system", "family", "change", "future", "horizon"),
            np.broadcast_to(response, (systems, 2, *response.shape)),
        ),
        "present_score": (("system", "family", "present_method", "change"), score),
        "matched_first_step": (("system", "change"), np.broadcast_to(matched, (systems, CHANGES))),
    }
