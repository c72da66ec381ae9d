"""Experiments 1 and 2 on the CIFAR-10 networks, one system at a time: public calls of the library on its point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from ... import theory
from ...core.state import CHANNELS
from ...theory.baselines import SCORES
from ..results import merge_pieces
from ..study import Study, System, require_device, systems_of
from .data import load_cifar
from .scene import FULL, QUICK, Protocol, Scene, prepare

if TYPE_CHECKING:
    import xarray as xr

    Labelled = TypeVar("Labelled", xr.DataArray, xr.Dataset)

SYSTEMS_PER_SEED = 4
WHOLE = "all"  # a system as one piece
FAMILIES = ["natural", "matched"]
PREDICTIONS = ("semilinear", "tangent")
PRESENT = ("exact_one_step", "gradient_norm", "write_norm")
PERSISTENCE_SCALE = 0.25


def cifar_study(data: Path | None, seed: int = 2026, quick: bool = False, device: str = "cpu", roots: int = 1) -> Study:
    """16 systems of the MLP, then 16 of the CNN, for each root seed; quick: one of each, with the numbers of `QUICK`.

    One system costs about 14,000 gradients, 12,000 of them the exact responses of Experiment 2, and 5,000 Hessian
    products: on one H200 that seven processes share, a root seed of each network took 508 s, most of them the CNN's.
    """
    protocol = QUICK if quick else FULL
    require_device(device)
    found = load_cifar(data)
    found.require(protocol.images, protocol.probe)
    each = [systems_of(kind, seed, SYSTEMS_PER_SEED, roots)[: 1 if quick else None] for kind in ("mlp", "cnn")]
    attrs = {
        "seed": seed,
        "roots": roots,
        "quick": quick,
        "device": device,
        "dtype": "float64",
        "data": found.digest,
        "train_images": len(found.train),
        "test_images": len(found.test),
        **{key: list(value) if isinstance(value, tuple) else value for key, value in asdict(protocol).items()},
    }
    # every process that works on a system prepares it, its matched candidates among it (700 g): on a GPU, which
    # processes share, that is time lost to all, so that there a system is one piece
    pieces = pieces_of(protocol) if device == "cpu" else (WHOLE,)
    run = partial(run_piece, data=data, digest=found.digest, protocol=protocol, device=device)
    return Study("cifar", tuple(system for some in each for system in some), pieces, run, attrs)


def pieces_of(protocol: Protocol) -> tuple[str, ...]:
    """The longest first, so that workers end together."""
    branches = range(protocol.futures // protocol.futures_per_piece)
    return ("fidelity", "sources", "ranking", "present", *(f"futures-{k}" for k in branches), "memory")


def run_piece(
    system: System, piece: str, *, data: Path | None, digest: str, protocol: Protocol, device: str
) -> dict[str, xr.Dataset]:
    """One piece of one system, or all of them; its setting is its architecture."""
    torch.cuda.empty_cache()  # processes share the device: what the last piece no longer needs is another's
    scene = prepare(system, data, digest, protocol, device)
    if piece == WHOLE:
        return merge_pieces([_piece(scene, each) for each in pieces_of(protocol)])
    return _piece(scene, piece)


def _piece(scene: Scene, piece: str) -> dict[str, xr.Dataset]:
    name, _, part = piece.partition("-")
    if name == "futures":
        return {scene.system.kind: futures(scene, int(part))}
    recipes: dict[str, Callable[[Scene], xr.Dataset]] = {
        "fidelity": fidelity, "sources": sources, "ranking": ranking, "memory": memory, "present": present,
    }  # fmt: skip
    return {scene.system.kind: recipes[name](scene)}


# --- Experiment 1


def fidelity(scene: Scene) -> xr.Dataset:
    """The exact response and two predictions of it, at every scale.

    `switch_fraction` is counted on the batch of the step that follows each state; the last state has none.
    """
    import xarray as xr

    change, scales = scene.path.replace(scene.candidates), scene.protocol.scales
    response = change.response(scene.probe, scales=scales, answers=("exact", *PREDICTIONS)).data["response"]
    data = xr.Dataset(
        {
            "exact": response.sel({"answer": "exact"}, drop=True),
            "predicted": response.sel({"answer": list(PREDICTIONS)}),
        }
    )
    if scene.system.kind == "cnn":
        data["switch_fraction"] = theory.switch_fraction(change, scales=scales, kinds=("relu",))
    return _numbered(data, "change")


def sources(scene: Scene) -> xr.Dataset:
    """Where the tangent's error comes from, for every candidate at one scale, and how well the identity holds."""
    change = scene.path.replace(scene.candidates)
    found = theory.error_shares(change, scene.probe, scale=scene.protocol.sources_at)
    found = found.assign(identity_residual=found["identity_residual"].max("horizon"))
    return _numbered(found.drop_vars(["kind", "at", "probe"]).rename(scale="sources_scale"), "change")


def ranking(scene: Scene) -> xr.Dataset:
    """Every score of both families on the realized future, against the exact magnitude."""
    import xarray as xr

    change = scene.path.perturb(scene.families)
    table, response = theory.scores(change, scene.probe), change.response(scene.probe, answers=("exact",))
    found = _by_family(table[[*SCORES, "alignment"]].assign(curves=response.exact.isel(scale=0, drop=True)), scene)
    found["magnitude"] = abs(found["curves"]).max("horizon")
    draws, permutations = scene.system.generator("permutations"), scene.protocol.permutations
    nulls = [
        theory.readout_null(one, one["magnitude"], generator=draws, permutations=permutations)["spearman"]
        for one in (found.sel(family=family, drop=True) for family in FAMILIES)
    ]
    data = xr.Dataset(
        {
            "score": found[list(SCORES)].to_dataarray("score_method").transpose("family", ...),
            "magnitude": found["magnitude"],
            "first_step": found["curves"].isel(horizon=0, drop=True),
            "null_correlation": xr.concat(nulls, dim="family"),
            "readout_cosine": table["readout_cosine"],
            "matched_exact": found["curves"].sel(family="matched", drop=True),
            "accepted": scene.matched.accepted,
        }
    )
    return _numbered(data, "change", "permutation")


def memory(scene: Scene) -> xr.Dataset:
    """Exact hybrids of θ, m and v, and how long m and v last under other β."""
    import xarray as xr

    protocol = scene.protocol
    change = scene.path.replace(scene.candidates[: protocol.hybrids])
    channels = theory.channel_responses(change, scene.probe, answers=("exact",))["response"].isel({"answer": 0})
    persistence = partial(theory.persistence, change, scene.probe, scale=PERSISTENCE_SCALE)
    names = ["".join("01"[c in str(name).split("+")] for c in CHANNELS) for name in channels["channel"].values]
    swept = {"m": persistence(beta1=protocol.beta1), "v": persistence(beta2=protocol.beta2)}
    data = xr.Dataset(
        {"channel_exact": channels.assign_coords(channel=names).rename(change="channel_change")}
        | {
            f"persistence_{channel}": found["response"].rename(beta=f"decay_{channel}", change="persistence_change")
            for channel, found in swept.items()
        }
    )
    frozen = _frozen_memory(scene).coefficients
    data = data.assign(frozen_memory=("coefficient", list(frozen.values()))).assign_coords(coefficient=list(frozen))
    return _numbered(data.drop_vars("answer"), "channel_change", "persistence_change")


def _frozen_memory(scene: Scene) -> theory.FrozenMemory:
    """Ā at the step after the shock, of the coordinate through which candidate 0 first moves the probe most."""
    path = scene.path
    control, layout = path.control(0), scene.point.loss.layout
    (edit,) = path.perturb(scene.natural[:1]).edits
    moved = edit.shock(control).endpoint(1.0)[0].theta - control.after.theta
    first = layout.compact(path.watch(0, scene.probe, 1).slopes() * moved)[0]
    return theory.FrozenMemory.of(path, 1, int(first.abs().argmax()))


# --- Experiment 2


def present(scene: Scene) -> xr.Dataset:
    """Scores that see no future batch.

    `sampled_future` runs the exact response along futures resampled from images that training has already seen,
    and averages the peak: it shares no image with any future that it is judged by.
    """
    import xarray as xr

    protocol, seen = scene.protocol, scene.order[: scene.protocol.seen]
    common = {
        "point": scene.point,
        "control_batch": scene.control_batch,
        "candidates": lambda path: path.perturb(scene.families),
        "probe": scene.probe,
        "horizon": protocol.horizon,
        "memory": scene.memory,
    }
    sampled = theory.sampled_future(
        **common, answer="exact", samples=protocol.sampled, generator=scene.system.generator("sampled"),
        sampler=lambda length, generator: scene.resampled(seen, generator),
    )  # fmt: skip
    static = theory.scores(scene.path.perturb(scene.families), scene.probe, horizon=1)
    scores = [static[name] for name in PRESENT] + [
        theory.present_frozen(**common)["score"],
        theory.reference_surrogate(**common, references=scene.references)["score"],
        sampled["score"],
    ]
    plain = [_numbered(score, "change").reset_coords(drop=True) for score in scores]
    methods = [*PRESENT, "present_frozen", "reference_surrogate", "sampled_future"]
    table = xr.concat(plain, dim="present_method").assign_coords(present_method=methods)
    data = xr.Dataset({"present_score": _by_family(table, scene), "matched_first_step": scene.matched.first_step})
    return _numbered(data, "change")


def futures(scene: Scene, part: int) -> xr.Dataset:
    """The exact response of both families under a part of the resampled futures."""
    import xarray as xr

    each = scene.protocol.futures_per_piece
    own = range(part * each, (part + 1) * each)
    branches = [scene.branch(k) for k in own]
    found = theory.repeated_futures(
        scene.point, scene.control_batch, lambda path: path.perturb(scene.families), branches, scene.probe,
        memory=scene.memory,
    )  # fmt: skip
    response = found["response"].sel({"answer": "exact"}).reset_coords(drop=True).assign_coords(future=list(own))
    return _numbered(xr.Dataset({"future_response": _by_family(response, scene)}), "change")


def _by_family(data: Labelled, scene: Scene) -> Labelled:
    """The changes of `scene.families` as [family, change]; NaN for matched candidates that do not exist."""
    import xarray as xr

    count = scene.protocol.candidates
    parts = [_numbered(data.isel(change=slice(k * count, (k + 1) * count)), "change") for k in range(len(FAMILIES))]
    accepted = _numbered(scene.matched.accepted, "change")
    return xr.concat([parts[0], parts[1].where(accepted)], dim="family").assign_coords(family=FAMILIES)


def _numbered(data: Labelled, *dims: str) -> Labelled:
    """Candidates by their number, which every piece shares; attributes belong to the study."""
    return data.assign_coords({dim: range(data.sizes[dim]) for dim in dims}).drop_attrs()
