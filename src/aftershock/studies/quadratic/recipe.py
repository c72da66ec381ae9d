"""Experiments 1 and 2 on the controlled quadratic systems, one system as one batched float64 program."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from ...core.state import Tangent, difference
from ...theory.baselines import readout_null
from ...theory.samplers import fit_process, sample_futures
from ..study import Study, System, systems_of
from .family import HYPER, Probe, Quadratic, mean_loss, stacked, values_of
from .frozen import frozen_memory
from .rows import (
    HYBRIDS,
    Family,
    hybrid_responses,
    identity_residual,
    path_of,
    persistent_responses,
    propagated,
    read,
    read_exactly,
    responses,
    rollout,
    rows_of,
    with_control,
)
from .scene import CANDIDATES, HORIZON, Matched, Scene

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr

LONG_HORIZON = 128
SCALES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
FUTURES, QUICK_FUTURES, SAMPLED = 32, 8, 8
PERMUTATIONS = 100
DECAYS = {"m": (0.5, 0.8, 0.9, 0.95, 0.99), "v": (0.9, 0.99, 0.999, 0.9999)}
PERSISTENCE_SCALE = 0.25
SYSTEMS_PER_SEED, QUICK_SYSTEMS_PER_SEED = 8, 2
ROOTS = 6  # the paper's 32 systems, six times over: they are cheap
PIECES = ("mechanism", "memory", "futures")


def quadratic_study(seed: int = 2026, quick: bool = False, roots: int | None = None) -> Study:
    """32 systems, as many as the paper's, for each of six root seeds; quick: 8 in all, with fewer futures."""
    futures, roots = QUICK_FUTURES if quick else FUTURES, roots or (1 if quick else ROOTS)
    systems = systems_of("quadratic", seed, QUICK_SYSTEMS_PER_SEED if quick else SYSTEMS_PER_SEED, roots)
    attrs = {"seed": seed, "roots": roots, "quick": quick, "futures": futures, "dtype": "float64"}
    return Study("quadratic", systems, PIECES, partial(run_piece, futures=futures), attrs)


def run_piece(system: System, piece: str, *, futures: int) -> dict[str, xr.Dataset]:
    """One piece of one system, by setting (probe)."""
    scene = Scene.of(system)
    if piece == "mechanism":
        return mechanism(scene)
    if piece == "memory":
        return memory(scene)
    return prospects(scene, futures)


# --- Experiment 1: mechanism


def mechanism(scene: Scene) -> dict[str, xr.Dataset]:
    """Fidelity, scores and matching along the realized future."""
    natural, written = _family(scene, scene.xi), scene.written(scene.xi)
    residual = identity_residual(_deviation(scene, scene.xi), written, scene.path, scene.future, HYPER)
    fidelities = _fidelity(scene)
    return {
        name: fidelities[name].merge(_table(scene, probe, natural)).assign(identity_residual=residual)
        for name, probe in scene.probes.items()
    } | {"rotating": _table(scene, scene.rotating, natural=None)}


def _family(scene: Scene, xi: Float[Tensor, "change d"]) -> Family:
    return Family.of(xi, scene.written(xi), _deviation(scene, xi), scene.path, scene.future, HYPER)


def _deviation(scene: Scene, xi: Float[Tensor, "change d"]) -> Tangent:
    """The exact difference of the states right after the shock."""
    return difference(scene.after(xi), rows_of(scene.control, len(xi)))


def _fidelity(scene: Scene) -> dict[str, xr.Dataset]:
    """Exact responses at every scale beside the linear ones, by probe."""
    import xarray as xr

    scaled, probes = torch.cat([scale * scene.xi for scale in SCALES]), scene.probes
    exact = responses(with_control(scene.control, scene.after(scaled)), scene.future, list(probes.values()), HYPER)
    ends = propagated(_deviation(scene, scaled), scene.path, scene.future, HYPER)
    moved = propagated(scene.written(scene.xi), scene.path, scene.future, HYPER)
    dims = ("change", "scale", "horizon")
    coords = {**_coordinates(), "scale": list(SCALES), "answer": ["tangent", "endpoint"]}
    found = {}
    for own, (name, probe) in zip(exact, probes.items()):
        linear = read(probe, scene.path, moved)
        tangent = torch.cat([scale * linear for scale in SCALES])
        curves = [
            x.unflatten(0, (len(SCALES), -1)).transpose(0, 1)
            for x in (own, tangent, read_exactly(probe, scene.path, ends))
        ]
        predicted = (("answer", *dims), torch.stack(curves[1:]).numpy())
        found[name] = xr.Dataset({"exact": (dims, curves[0].numpy()), "predicted": predicted}, coords)
    return found


def _table(scene: Scene, probe: Probe, natural: Family | None) -> xr.Dataset:
    """Scores, magnitudes and the null of shuffled readouts, for the natural and the matched family."""
    import xarray as xr

    matched = scene.matched(probe)
    families = {} if natural is None else {"natural": natural}
    families["matched"] = _family(scene, matched.xi)
    found = [_scored(scene, probe, family) for family in families.values()]
    data = xr.concat(found, dim="family", combine_attrs="override").assign_coords(family=list(families))
    slopes = torch.stack([probe.gradient(state.theta)[0] for state in scene.path])
    cosine = torch.nn.functional.cosine_similarity(slopes, slopes[:1], dim=1)
    return data.assign(readout_cosine=("horizon", cosine.numpy()), **_stress(scene, probe, matched))


def _scored(scene: Scene, probe: Probe, family: Family) -> xr.Dataset:
    """Scores and magnitudes of a family, and how Full ISO ranks with shuffled readouts."""
    import xarray as xr

    (exact,) = responses(with_control(scene.control, scene.after(family.xi)), scene.future, [probe], HYPER)
    scores = family.scores(probe, scene.path, exact, mean_loss(scene.references))
    magnitude = exact.abs().amax(1).numpy()
    table = xr.Dataset(
        {
            "full_iso": ("change", scores["full_iso"].numpy()),
            "alignment": (("change", "horizon", "readout_horizon"), family.alignment(probe, scene.path).numpy()),
        },
        _coordinates(),
    )
    null = readout_null(table, magnitude, generator=scene.system.generator("permutations"), permutations=PERMUTATIONS)
    return xr.Dataset(
        {
            "score": (("score_method", "change"), torch.stack(list(scores.values())).numpy()),
            "magnitude": ("change", magnitude),
            "first_step": ("change", exact[:, 0].numpy()),
            "null_correlation": ("permutation", null["spearman"].values),
        },
        {**_coordinates(), "score_method": list(scores)},
    )


def _stress(scene: Scene, probe: Probe, matched: Matched) -> dict[str, Any]:
    """What the matched candidates become: exact responses, and by how much θ's deviation grows."""
    rows = with_control(scene.control, scene.after(matched.xi))
    norms, values = [], []
    for state in rollout(rows, scene.future, HYPER):
        norms.append((state.theta[1:] - state.theta[:1]).norm(dim=1))
        values.append(probe.value(state.theta))
    exact = torch.stack(values, dim=1)
    return {
        "accepted": ("change", matched.accepted.numpy()),
        "matched_exact": (("change", "horizon"), (exact[1:] - exact[:1]).numpy()),
        "parameter_gain": ("change", (torch.stack(norms).amax(0) / norms[0]).numpy()),
    }


# --- Experiment 1: memory


def memory(scene: Scene) -> dict[str, xr.Dataset]:
    """Hybrid states by channel, and the persistence of m and v under other decays, both to horizon 128 too."""
    import xarray as xr

    continued = scene.process.after(scene.future[-1], scene.system.generator("extension"))
    long = [*scene.future, *itertools.islice(continued, LONG_HORIZON - HORIZON)]
    probes, shocked = list(scene.probes.values()), scene.after(PERSISTENCE_SCALE * scene.xi)
    hybrids = hybrid_responses(scene.control, scene.after(scene.xi), long, probes, HYPER).numpy()
    lasting = {
        channel: persistent_responses(scene.control, shocked, long, probes, HYPER, channel, decays).numpy()
        for channel, decays in DECAYS.items()
    }
    coords = {
        "channel": list(HYBRIDS),
        "channel_change": range(CANDIDATES),
        "persistence_change": range(CANDIDATES),
        "horizon": range(1, HORIZON + 1),
        "long_horizon": range(1, LONG_HORIZON + 1),
    } | {f"decay_{channel}": list(decays) for channel, decays in DECAYS.items()}
    found = {}
    for k, (name, probe) in enumerate(scene.probes.items()):
        curves = _short_and_long("channel_exact", "channel_long", ("channel", "channel_change"), hybrids[k])
        for channel, swept in lasting.items():
            dims = (f"decay_{channel}", "persistence_change")
            curves |= _short_and_long(f"persistence_{channel}", f"persistence_long_{channel}", dims, swept[k])
        frozen = frozen_memory(scene, probe).coefficients
        curves["frozen_memory"] = ("coefficient", list(frozen.values()))
        found[name] = xr.Dataset(curves, {**coords, "coefficient": list(frozen)})
    return found


def _short_and_long(short: str, long: str, dims: tuple[str, ...], values: np.ndarray) -> dict[str, Any]:
    """One curve under two names: to the horizon of the tables, and whole."""
    return {short: ((*dims, "horizon"), values[..., :HORIZON]), long: ((*dims, "long_horizon"), values)}


# --- Experiment 2: unknown futures


def prospects(scene: Scene, futures: int) -> dict[str, xr.Dataset]:
    """Exact responses under resampled futures, and what is known of them at the time of the shock."""
    import xarray as xr

    probes = scene.probes
    matched = {name: scene.matched(probe).xi for name, probe in probes.items()}
    xi = torch.cat([scene.xi, *matched.values()])
    drawn = scene.process.after(scene.seen[-1], scene.system.generator("futures"), futures)
    resampled = _under_futures(scene, xi, drawn, futures, probes)
    sampled = _sampled_scores(scene, xi, probes)
    found = {}
    for k, (name, probe) in enumerate(probes.items()):
        own = [slice(0, CANDIDATES), slice((k + 1) * CANDIDATES, (k + 2) * CANDIDATES)]
        scores = [_present_scores(scene, probe, xi[rows]) | _of_rows(sampled[name], rows) for rows in own]
        found[name] = xr.Dataset(
            {
                "future_response": (
                    ("family", "change", "future", "horizon"),
                    torch.stack([resampled[name][:, rows].transpose(0, 1) for rows in own]).numpy(),
                ),
                "present_score": (
                    ("family", "present_method", "change"),
                    torch.stack([torch.stack(list(each.values())) for each in scores]).numpy(),
                ),
                "matched_first_step": ("change", resampled[name][0, own[1], 0].numpy()),
            },
            {
                **_coordinates(),
                "family": ["natural", "matched"],
                "future": range(futures),
                "present_method": list(scores[0]),
            },
        )
    return found


def _under_futures(
    scene: Scene, xi: Float[Tensor, "row d"], batches: Iterable[Quadratic], futures: int, probes: dict[str, Probe]
) -> dict[str, Float[Tensor, "future row horizon"]]:
    """d^{(k)}_{i,h} of every row under every future, for each probe: one exact run of `[future, row]` states."""
    rows = with_control(scene.control, scene.after(xi))
    start = rows_of(rows, futures, 1 + len(xi))
    values: dict[str, list[Tensor]] = {name: [] for name in probes}
    for state in rollout(start, itertools.islice(batches, HORIZON - 1), HYPER):
        # neither of the two probes has a center
        for name, value in zip(probes, values_of([probe.loss for probe in probes.values()], state.theta)):
            values[name].append(value)
    stacked_values = {name: torch.stack(each, dim=-1) for name, each in values.items()}
    return {name: each[:, 1:] - each[:, :1] for name, each in stacked_values.items()}


def _sampled_scores(
    scene: Scene, xi: Float[Tensor, "row d"], probes: dict[str, Probe]
) -> dict[str, dict[str, Float[Tensor, " row"]]]:
    """The mean of M over futures sampled at the time of the shock.

    sampled_future: from the process fitted to the batches seen so far. sampled_true: from the true process, other
    draws than those of the target. forecast: along the fitted process's expected future alone.
    """
    fitted = fit_process([(batch.diagonal, batch.factor, batch.linear) for batch in scene.seen])
    draws = sample_futures(fitted, SAMPLED, HORIZON - 1, scene.system.generator("fitted futures"))
    futures = {
        "sampled_future": (_by_step(draws), SAMPLED),
        "forecast": (_by_step([fitted.forecast(HORIZON - 1)]), 1),
        "sampled_true": (
            scene.process.after(scene.seen[-1], scene.system.generator("sampled futures"), SAMPLED),
            SAMPLED,
        ),
    }
    found: dict[str, dict[str, Tensor]] = {name: {} for name in probes}
    for answer, (batches, count) in futures.items():
        for name, d in _under_futures(scene, xi, batches, count, probes).items():
            found[name][answer] = d.abs().amax(-1).mean(0)
    return found


def _by_step(futures: list[list[Any]]) -> Iterable[Quadratic]:
    """Futures as lists of batches → one stack of quadratics per step."""
    return (stacked([Quadratic(*batch) for batch in batches]) for batches in zip(*futures))


def _of_rows(scores: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    return {answer: score[rows] for answer, score in scores.items()}


def _present_scores(scene: Scene, probe: Probe, xi: Float[Tensor, "change d"]) -> dict[str, Float[Tensor, " change"]]:
    """Scores at the time of the shock that see no future. `eq:app_present_frozen_iso`"""
    references = [mean_loss(scene.references)] * (HORIZON - 1)
    surrogate = path_of(scene.control, references, HYPER)
    dx, after = scene.written(xi), scene.after(xi)
    frozen = propagated(dx, surrogate, references, HYPER, frozen=True)
    first = probe.gradient(scene.control.theta)[0]
    return {
        "exact_one_step": (probe.value(after.theta) - probe.value(scene.control.theta)).abs(),
        "gradient_norm": xi.norm(dim=1),
        "write_norm": dx.theta.norm(dim=1),
        "present_frozen": (frozen @ first).abs().amax(0),
        "reference_surrogate": read(probe, surrogate, propagated(dx, surrogate, references, HYPER)).abs().amax(1),
    }


# --- labels


def _coordinates() -> dict[str, Any]:
    return {"change": range(CANDIDATES), "horizon": range(1, HORIZON + 1)}
