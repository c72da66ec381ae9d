"""Made-up language systems whose tables can be worked out by hand, with known errors of the finite differences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr

from aftershock.studies.study import Study

SCALES = np.array([0.0625, 0.125, 0.25, 0.5, 1.0])
STEPS = np.array([0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625])
CHANGES, HORIZONS = 8, 8
CHANNELS = ("000", "100", "010", "001", "110", "101", "011", "111")
PARTS = ("load", "continuation", "exact", "semilinear", "tangent", "hybrids", "noise")
PYTHIA = {"pythia-410m": 405_334_016, "pythia-1b": 1_011_781_632, "pythia-1.4b": 1_414_647_808}
PAPER_DOMAINS = ("codeparrot", "openwebtext", "wikitext-103")


def system(
    model: str,
    domain: str,
    parameters: int,
    weights: str = "pretrained",
    seed: int = 0,
    truncation: float = 0.08,
    noise: float = 1e-6,
    floor: float = 1e-9,
    dtype: str = "float32",
) -> xr.Dataset:
    """d(α) = α a + α² c; a step ε answers a + truncation ε² t + noise/ε n, with unit vectors t, n times ‖a‖."""
    draws = np.random.default_rng(seed)
    slope = draws.standard_normal((CHANGES, HORIZONS)) * (1e-3 + 1e-3 * np.arange(CHANGES))[:, None]
    bending = 0.1 + 0.1 * np.arange(CHANGES)[:, None]  # above 0.5 a candidate is not valid at full scale
    curvature = bending * slope * (1 + 0.1 * draws.random((CHANGES, HORIZONS)))
    exact = SCALES[:, None, None] * slope + SCALES[:, None, None] ** 2 * curvature
    tangent = SCALES[:, None, None] * slope
    semilinear = exact + 1e-3 * SCALES[:, None, None] ** 3 * slope
    size = np.linalg.norm(slope, axis=1, keepdims=True)
    bent, rough = (unit(draws.standard_normal((CHANGES, HORIZONS))) * size for _ in range(2))
    steps = STEPS[:, None, None]
    channels = np.zeros((len(CHANNELS), HORIZONS))
    for k, channel in enumerate(CHANNELS):
        channels[k, 2] = {"010": 40.0, "011": -0.0108, "111": 0.0095}.get(channel, 0.001 * k)
    variables = {
        "model": ((), model),
        "domain": ((), domain),
        "parameters": ((), parameters),
        "weights": ((), weights),
        "dtype": ((), dtype),
        "text_digest": ((), domain),
        "note": ((), "rounded to Q4_K; instruction-tuned" if weights == "quantized" else ""),
        "control_loss": ("horizon", np.full(HORIZONS, 3.0)),
        "response": (("answer", "scale", "change", "horizon"), np.stack([exact, semilinear, tangent])),
        "fd_derivative": (
            ("fd_step", "change", "horizon"),
            slope + truncation * steps**2 * bent + noise / steps * rough,
        ),
        "gradient_norm": ("change", 1.0 + np.arange(CHANGES)),
        "write_norm": ("change", 1.0 + np.arange(CHANGES)[::-1]),
        "channel_exact": (("channel", "horizon"), channels),
        "hybrid_change": ((), 0),
        "noise_floor": ("horizon", np.full(HORIZONS, floor)),
        "seconds": ("part", np.arange(1.0, 1 + len(PARTS))),
        "peak_bytes": ((), 3 * 2**30),
    }
    coords = {
        "answer": ["exact", "semilinear", "tangent"],
        "scale": SCALES,
        "fd_step": STEPS,
        "change": np.arange(CHANGES),
        "horizon": np.arange(1, HORIZONS + 1),
        "channel": list(CHANNELS),
        "part": list(PARTS),
    }
    return xr.Dataset(variables, coords)


def unit(values: np.ndarray) -> np.ndarray:
    return values / np.linalg.norm(values, axis=-1, keepdims=True)


def joined(systems: Sequence[xr.Dataset]) -> dict[str, xr.Dataset]:
    """Results as the runner gives them."""
    words = ("model", "domain", "dtype")
    named = [one.expand_dims(system=["-".join([*(one[word].item() for word in words), "7-0"])]) for one in systems]
    data = xr.concat(named, dim="system", data_vars="all", coords="minimal", compat="identical", join="exact")
    machine = {"machine": "x86_64", "processor": "made-up CPU", "gpu": None, "torch": "0"}
    return {"language": data.assign_attrs(machines=[machine], seed=7)}


def paper_systems(**options: float) -> list[xr.Dataset]:
    """The paper's nine conditions."""
    grid = [(model, count, domain) for model, count in PYTHIA.items() for domain in PAPER_DOMAINS]
    return [
        system(f"EleutherAI/{model}", domain, count, seed=i, **options)  # type: ignore[arg-type]
        for i, (model, count, domain) in enumerate(grid)
    ]


def other_systems(**options: float) -> list[xr.Dataset]:
    """Another model on other texts."""
    return [
        system("SmolLM2-135M", domain, 134_515_008, "quantized", seed=i, **options)  # type: ignore[arg-type]
        for i, domain in enumerate(("wikipedia", "web", "code"))
    ]


def language_study() -> Study:
    return Study("language", (), ("all",), lambda system, piece: {}, {"seed": 7})
