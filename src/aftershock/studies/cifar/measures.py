"""What the CIFAR-10 networks say about every number of the paper."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...results.statistics import across_candidates, compare_scores
from ...results.summaries import summarize
from ..future_measures import futures
from ..measures import (
    INFERRED,
    NAMES,
    OURS,
    SCORES,
    SHARE_OF_SIGNS,
    UNKNOWN_RULE,
    Results,
    exponents,
    fidelity,
    has,
    has_family,
    measured,
    nested,
    percentile,
    pooled,
    pooled_fidelity,
    radii,
    ranking,
    rankings,
)
from ..verdicts import AGREEMENT, Measure

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr

TEST = "Wilcoxon, the system as the unit, two-sided, equal pairs left out; Holm over the ten alternatives of a network"
HORIZONS = (1, 4, 8, 12)  # at which the paper gives the networks' exponents
PROPAGATION = ("frozen_dynamics", "clamped_theta", "no_propagation", "initial_theta")  # ablations of it
SPLIT = "at the largest scale that the exponents are fitted over"
SOURCES = ("write_in", "smooth", "switching")
PAPER_SYSTEMS = 16  # of each network: a test of fewer is weaker than the paper's, one of more finds more
DRAWS = 101  # of as many systems, where we have more
SHARED_BATCHES = (
    "the paper's text leaves open whether the initializations of a seed share their batches and their probe; if they "
    "do, they peak together, and a median of as many systems lies farther off"
)
LATE = {"111": SHARED_BATCHES} | dict.fromkeys(("010", "110", "011"), "one finding with 111")
SOURCES_IN_WORDS = {"write_in": "The write-in's", "smooth": "Smooth curvature's"}


def cifar_measures(results: Results) -> Iterator[Measure]:
    """Every cell of the CIFAR-10 networks, in the paper's order."""
    networks = ("cnn", "mlp")
    columns = {
        "nrmse": "NRMSE",
        "sign": "Sign agr.",
        "peak": "Rel. M err.",
        "total": "Rel. ARE err.",
        "typical_extremum": "Extremum-sign acc.",
        "extremum": SHARE_OF_SIGNS,
    }
    yield from fidelity(results, "tab:app_exp2_fidelity", networks, columns)
    yield from _neural_text(results)
    for setting in networks:
        yield from _network_text(results, setting)
    yield from ranking(results, "tab:app_exp2_ranking", networks, "natural", tuple(SCORES))
    for setting in networks:
        if has_family(results, setting, "natural"):
            yield from _tests(results[setting], NAMES[setting])
        yield from _relative_channels(results, setting)
    yield from futures(results, ("mlp", "cnn"))


def _neural_text(results: Results) -> Iterator[Measure]:
    import numpy as np

    table, networks = "text:exp1_neural", ("mlp", "cnn")
    results = _paired(results)
    yield from pooled_fidelity(results, table, networks)
    ranked = [rankings(results[s], "natural") for s in networks if has_family(results, s, "natural")]
    if ranked:
        yield measured(
            table, "Full ISO, pooled Spearman", "value", pooled([rho.sel(score="full_iso") for rho in ranked])
        )
    channels = [nested(results[s]["channel_exact"]) for s in networks if has(results, s, "channel_exact")]
    if channels:
        signs = np.concatenate([summarize(c.sel(channel="111"))["peak_sign"].values.ravel() for c in channels])
        systems = sum(c.sizes["system"] for c in channels)
        negative = int((signs < 0).sum())
        note = f"ours: {negative} negative, {negative / len(signs):.1%}"
        yield Measure(table, "Positive extrema", "value", signs > 0, systems, "count", note=note)


def _paired(results: Results) -> Results:
    """The systems that every network has, by seed and index, so that none outweighs another where some are missing."""
    numbers = {s: [str(name).partition("-")[2] for name in data["system"].values] for s, data in results.items()}
    shared = set[str].intersection(*map(set, numbers.values()))
    kept = {s: [i for i, number in enumerate(own) if number in shared] for s, own in numbers.items()}
    return {s: data.isel(system=kept[s]) for s, data in results.items() if kept[s]}


def _network_text(results: Results, setting: str) -> Iterator[Measure]:
    table, column = "text:exp1_neural_by_network", NAMES[setting]
    if has(results, setting, "exact", "predicted"):
        data = results[setting]
        yield measured(table, "Validity radius", column, across_candidates(radii(data)))
        fit = exponents(data)
        for h in [h for h in HORIZONS if h in data["horizon"].values]:
            yield measured(table, f"Error exponent, h = {h}", column, fit["exponent"].sel(horizon=h))
        yield from _exponent_ends(fit, setting)
    if has_family(results, setting, "natural") and "null_correlation" in results[setting]:
        yield from _null(results[setting], setting)
    if has(results, setting, "switch_fraction"):
        yield from _switches(results[setting], setting)
    if has(results, setting, "output_from_switching"):
        yield from _sources(results[setting], column)
    if has(results, setting, "channel_exact"):
        total = summarize(nested(results[setting]["channel_exact"]))["total_abs"]
        contrast = across_candidates(total.sel(channel="111") - total.sel(channel="110"))
        row = "Systems with a negative conditional v"
        yield Measure(table, row, column, contrast.values < 0, contrast.sizes["system"], "count")
    yield from _persistence_ratios(results, setting)


def _null(data: xr.Dataset, setting: str) -> Iterator[Measure]:
    import numpy as np
    import xarray as xr

    table, column = "text:exp1_neural_by_network", NAMES[setting]
    own = rankings(data, "natural").sel(score="full_iso", drop=True)
    shuffled = data["null_correlation"].sel(family="natural").median("permutation")
    yield measured(table, "Spearman of shuffled readouts", column, shuffled)
    pair = xr.concat([own, shuffled], dim="score", coords="minimal", compat="override")
    pair, systems = pair.assign_coords(score=["full_iso", "shuffled"]), own.sizes["system"]
    p = np.array([float(compare_scores(pair.isel(system=some), "full_iso")["p"][0]) for some in _draws(systems)])
    row = "p of Full ISO against shuffled readouts"
    yield _by_draws(table, row, column, p, systems, "p", float(compare_scores(pair, "full_iso")["p"][0]))
    yield measured(f"text:exp1_neural_{setting}", "Percentile in the readout null", column, percentile(data, "natural"))


def _switches(data: xr.Dataset, setting: str) -> Iterator[Measure]:
    import numpy as np

    shares = across_candidates(data["switch_fraction"])
    at = 8 if 8 in shares["horizon"].values else int(shares["horizon"][-1])
    for scale in shares["scale"].values:
        row = f"Switched gates at h = {at}, α = {scale:g}"
        yield measured(f"text:exp1_neural_{setting}", row, NAMES[setting], shares.sel(horizon=at, scale=scale))
    middles = shares.sel(horizon=at).median("system").sortby("scale").values
    row, grows = "Switched gates grow with the scale", np.array([float((np.diff(middles) > 0).all())])
    yield Measure(f"text:exp1_neural_{setting}", row, NAMES[setting], grows, shares.sizes["system"], "statement")


def _exponent_ends(fit: xr.Dataset, setting: str) -> Iterator[Measure]:
    """The exponent at the horizons where its median is smallest and largest, and how well lines fit."""
    table, column = f"text:exp1_neural_{setting}", NAMES[setting]
    middles = fit["exponent"].median("system")
    for word, at in (("smallest", middles.idxmin()), ("largest", middles.idxmax())):
        row = f"Error exponent, {word} over horizons"
        yield measured(table, row, column, fit["exponent"].sel(horizon=at))
    yield measured(table, "R² of the exponent's fit", column, fit["r_squared"].median("horizon"))


def _sources(data: xr.Dataset, column: str) -> Iterator[Measure]:
    """What the error is made of, beside its exponents: switched gates' share by horizon, all shares at the last one."""
    table, states = "text:exp1_neural_by_network", {part: data[f"state_share_{part}"] for part in SOURCES}
    outputs = output_shares(data)
    horizons = [h for h in HORIZONS if h in data["horizon"].values]
    for h in horizons:
        for name, shares in (("response", outputs), ("state", states)):
            row = f"Switched gates' share of the {name}'s error, h = {h} (ours)"
            yield measured(table, row, column, across_candidates(shares["switching"].sel(horizon=h)), note=SPLIT)
    for part in SOURCES[:-1]:
        row = f"{SOURCES_IN_WORDS[part]} share of the response's error, h = {horizons[-1]} (ours)"
        yield measured(table, row, column, across_candidates(outputs[part].sel(horizon=horizons[-1])), note=SPLIT)


def output_shares(data: xr.Dataset) -> dict[str, xr.DataArray]:
    """|part| / Σ |parts| of the response's error, by source: parts may cancel, and their sizes do not."""
    sizes = {part: abs(data[f"output_from_{part}"]) for part in SOURCES}
    total = sum(sizes.values())
    return {part: size / total for part, size in sizes.items()}


def _persistence_ratios(results: Results, setting: str) -> Iterator[Measure]:
    """How much the slow decay exceeds the fast one, candidate by candidate."""
    table, column = "text:exp1_neural_by_network", NAMES[setting]
    for channel, number, fast, slow, known in (("m", "β1", 0.5, 0.99, True), ("v", "β2", 0.9, 0.9999, False)):
        if not has(results, setting, f"persistence_{channel}"):
            continue
        found, decay = summarize(nested(results[setting][f"persistence_{channel}"])), f"decay_{channel}"
        if not {fast, slow} <= set(found[decay].values.tolist()):
            continue
        few, many = found.sel({decay: fast}), found.sel({decay: slow})
        note = INFERRED if known else UNKNOWN_RULE
        for name, key in (("M", "peak"), ("ARE", "total_abs")):
            ratio = across_candidates(many[key] / few[key])
            row = f"{name}, {number} = {slow:g} over {fast:g}"
            yield measured(table, row, column, ratio, known=known, note=note)
        for value, side in ((fast, few), (slow, many)):
            peaks = across_candidates(side["peak_horizon"])
            yield measured(table, f"h* at {number} = {value:g}", column, peaks, known=known, note=note)


def _tests(data: xr.Dataset, column: str) -> Iterator[Measure]:
    """Does Full ISO rank better than each of the paper's alternatives? Holm's family is the architecture."""
    import numpy as np

    rho = rankings(data, "natural")
    wanted = [score for score in SCORES if score in rho["score"].values and score not in OURS]
    rho = rho.sel(score=wanted)
    found, systems = compare_scores(rho, "full_iso"), data.sizes["system"]
    drawn = [compare_scores(rho.isel(system=some), "full_iso") for some in _draws(systems)]
    for score in wanted[1:]:
        one = found.sel(score=score)
        larger = np.array([float(_is_larger(draw.sel(score=score))) for draw in drawn])
        note = f"p = {float(one['p_holm']):.2g} after Holm, median difference {float(one['difference']):+.3f}; {TEST}"
        if systems > PAPER_SYSTEMS:
            note += f"; that is of {systems}; of {PAPER_SYSTEMS} of them {larger.mean():.0%} of {DRAWS} draws say yes"
        table, whole = "text:exp1_neural_tests", float(_is_larger(one))
        yield _by_draws(table, SCORES[score], column, larger, systems, "statement", whole, note)
        if column == NAMES["mlp"] and score in PROPAGATION:
            ahead = np.array([float(one["difference"] > 0)])
            row = f"Full ISO's lead over {SCORES[score].lower()} is positive in median"
            yield Measure("text:exp1_neural_mlp", row, column, ahead, data.sizes["system"], "statement")


def _by_draws(
    table: str, row: str, column: str, draws: np.ndarray, systems: int, kind: str, whole: float, note: str = ""
) -> Measure:
    """A test judged at the paper's number of systems; shown is what all of ours say, where they are more."""
    more = {"whole": whole, "drawn": PAPER_SYSTEMS} if systems > PAPER_SYSTEMS else {}
    unjudged = "weaker test" if systems < PAPER_SYSTEMS else ""
    return Measure(table, row, column, draws, systems, kind, note=note, unjudged=unjudged, **more)  # type: ignore[arg-type]


def _is_larger(test: xr.Dataset) -> bool:
    return float(test["p_holm"]) < AGREEMENT.level and float(test["difference"]) > 0


def _draws(systems: int) -> list[np.ndarray]:
    """As many systems as the paper's, drawn without replacement; all of them where there are no more."""
    import numpy as np

    if systems <= PAPER_SYSTEMS:
        return [np.arange(systems)]
    generator = np.random.default_rng(0)
    return [generator.permutation(systems)[:PAPER_SYSTEMS] for _ in range(DRAWS)]


def _relative_channels(results: Results, setting: str) -> Iterator[Measure]:
    if not has(results, setting, "channel_exact"):
        return
    found = summarize(nested(results[setting]["channel_exact"]))
    relative = across_candidates(found["total_abs"] / found["total_abs"].sel(channel="111"))
    peaks = across_candidates(found["peak_horizon"])
    for channel in [str(c) for c in found["channel"].values if c != "000"]:
        kind = "definition" if channel == "111" else "systems"
        table, name = "tab:app_exp2_channels", NAMES[setting]
        yield measured(table, channel, f"{name}: ARE", relative.sel(channel=channel), kind=kind)
        reason = LATE.get(channel, "") if setting == "cnn" else ""
        yield measured(table, channel, f"{name}: h*", peaks.sel(channel=channel), reason=reason)
