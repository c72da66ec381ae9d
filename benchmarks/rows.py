"""One function per row of the table: each measures a ratio inside this run."""

from __future__ import annotations

from collections.abc import Callable

import torch
import xarray  # noqa: F401  (aftershock loads it with its first result, which is not what is timed)
from torch import Tensor

from aftershock import theory
from aftershock.api.path import Path
from aftershock.core.adamw import Hyper
from aftershock.core.clipping import Clip
from aftershock.core.graphs import GradientGraph
from aftershock.core.layout import Layout
from aftershock.core.linear_step import LinearStep
from aftershock.core.operators import readout
from aftershock.core.state import JointState, Tangent
from aftershock.core.sweeps import adjoint_sweep
from aftershock.core.trajectory import Trajectory

from .models import BATCH_SIZE, System, cnn_system, mlp_system
from .table import Growth, Row
from .timing import Times, Work, at_count, cycled, interleave

HORIZONS = 12
VECTORS = 8


# --- Hessian products -----------------------------------------------------------------------------


def hessian(device: torch.device, full: bool) -> list[Row]:
    """One Hessian product of eight on one step, its share of the graph included."""
    return [_hessian(mlp_system(device), 1.5, 15), _hessian(cnn_system(device), 2.2, 3)]


def _hessian(system: System, bar: float, rounds: int) -> Row:
    loss, state = system.point.loss, system.point.captured.state
    random = system.point.captured.random
    vectors = _random_rows(system, VECTORS)

    def ours(i: int) -> Tensor:
        return GradientGraph(loss, state.theta, state.buffers, system.data[i], random, "step").products(vectors)

    pieces = _pieces(system, gradients=6, graphs=2, products=4)
    times = interleave({**pieces, "ours": Work(cycled(ours, len(system.data)))}, rounds, system.device)
    plain = times.ratio(lambda t: (t["graph"] / VECTORS + t["product"]) / t["g"])
    return Row(
        f"Hessian product, each of {VECTORS} on one step, its graph included: {system.name}",
        times.ratio(lambda t: t["ours"] / VECTORS / t["g"]),
        bar,
        "g",
        "one graph per step + one product per vector",
        f"plain double backward {plain:.2f} g",
    )


def _random_rows(system: System, count: int) -> Tensor:
    layout = system.point.loss.layout
    generator = torch.Generator().manual_seed(2)
    return layout.expand(torch.randn(count, layout.size, generator=generator).to(system.device))


def _pieces(system: System, gradients: int, graphs: int, products: int) -> dict[str, Work]:
    """g, a gradient with its graph, and a product on it, by plain torch on the plain module."""
    vectors = [torch.randn_like(p) for p in system.parameters]
    held: list[tuple[Tensor, ...]] = [system.gradient_graph(0)]

    def graph(i: int) -> None:
        held[0] = system.gradient_graph(i)  # frees the last one: a graph's end is part of its cost

    def product() -> object:
        return torch.autograd.grad(held[0], system.parameters, vectors, retain_graph=True)

    return {
        "g": Work(cycled(system.gradient, len(system.data)), gradients),
        "graph": Work(cycled(graph, len(system.data)), graphs),
        "product": Work(product, products),
    }


# --- tangents -------------------------------------------------------------------------------------


def tangents(device: torch.device, full: bool) -> list[Row]:
    """Twelve changes over twelve horizons against the gradients and products they are made of."""
    system, changes = cnn_system(device), 12
    path = _checked(system, HORIZONS)
    works = {**_pieces(system, gradients=8, graphs=4, products=12), "ours": _tangents(system, path, changes, HORIZONS)}
    times = interleave(works, 5 if full else 2, device, warm=device.type == "cuda")
    gradients, steps = changes + 1 + HORIZONS, HORIZONS - 1

    def parts(t: dict[str, float]) -> float:
        return gradients * t["g"] + steps * t["graph"] + changes * steps * t["product"]

    return [
        Row(
            f"tangents, {changes} changes × {HORIZONS} horizons: {system.name}",
            times.ratio(lambda t: t["ours"] / parts(t)),
            1.2,
            "× its parts",
            "N + H gradients, H graphs, N·H products",
            f"parts: {gradients} gradients, {steps} graphs, {changes * steps} products; "
            f"{times.ratio(lambda t: t['ours'] / t['g']):.0f} g in all",
        )
    ]


def growth(device: torch.device, full: bool) -> list[Growth]:
    """The same work at other horizons, numbers of changes and widths."""
    system, narrow, rounds = cnn_system(device), cnn_system(device, width=16), 3 if full else 1
    rows = [_growth(narrow, _checked(narrow, 6), 3, 6, rounds)]
    path = _checked(system, 24)
    sizes = ((3, 6), (6, 6), (12, 6), (3, 12), (3, 24))
    return rows + [_growth(system, path, changes, horizons, rounds) for changes, horizons in sizes]


def _growth(system: System, path: Path, changes: int, horizons: int, rounds: int) -> Growth:
    works = {
        "g": Work(cycled(system.gradient, len(system.data)), 12),
        "ours": _tangents(system, path, changes, horizons),
    }
    times = interleave(works, rounds, system.device, warm=system.device.type == "cuda")
    return Growth(system.name, system.size, changes, horizons, times.ratio(lambda t: t["ours"] / t["g"]))


def _tangents(system: System, path: Path, changes: int, horizons: int) -> Work:
    change = path.replace(system.batches(changes, start=24))
    return Work(lambda: change.response(system.probe, answers=("tangent",), horizon=horizons))


def _checked(system: System, horizons: int) -> Path:
    """A path that was followed and whose Hessian products are proved: both happen once, whatever is asked."""
    path = system.point.follow(system.batches(horizons))
    path.check()
    return path


# --- ranking --------------------------------------------------------------------------------------


def rank(device: torch.device, full: bool) -> list[Row]:
    """A thousand batches ranked at every horizon against their gradients alone."""
    # On the MLP the real thousand takes seconds; on the CNN two shorter pools give the line through it.
    return [_rank(mlp_system(device), 1000, 3), _rank(cnn_system(device), 1000 if full else 112, 1)]


def _rank(system: System, many: int, rounds: int) -> Row:
    path, total, few = _checked(system, HORIZONS), 1000, 16
    works = {
        "few": Work(lambda: path.rank(system.batches(few), system.probe)),
        "g": Work(cycled(system.gradient, len(system.data)), many // 4),
        "many": Work(lambda: path.rank(system.batches(many), system.probe)),
    }
    times = interleave(works, rounds, system.device, warm=system.device.type == "cuda")
    measured = "measured whole" if many == total else f"extrapolated from {few} and {many} batches"
    return Row(
        f"{total:,} batches ranked at {HORIZONS} horizons: {system.name}",
        times.ratio(lambda t: at_count(t, ("few", few), ("many", many), total) / (total * t["g"])),
        1.25,
        f"× {total:,} g",
        "1 g per batch + a sweep of H²/2 products",
        f"{measured}; {_line(times, few, many, 'g', 'g')}",
    )


def _line(times: Times, few: int, many: int, unit: str, name: str) -> str:
    """The two parts of a ranking: so much per batch, and the sweep before them."""

    def slope(t: dict[str, float]) -> float:
        return (t["many"] - t["few"]) / (many - few)

    each = times.ratio(lambda t: slope(t) / t[unit])
    sweep = times.ratio(lambda t: (t["few"] - few * slope(t)) / t[unit])
    return f"{each:.2f} {name} each, sweep {sweep:.0f} {name}"


def examples(device: torch.device, full: bool) -> list[Row]:
    """Ten thousand single examples ranked at one outcome, against forward passes over them."""
    return [_examples(mlp_system(device), 157, 3), _examples(cnn_system(device), 157 if full else 32, 2)]


def _examples(system: System, many: int, rounds: int) -> Row:
    path, total, few = _checked(system, HORIZONS), 157, 4  # 157 batches of 64 are 10,048 examples

    def ours(count: int) -> Callable[[], object]:
        return lambda: path.rank_examples(system.batches(count), system.probe)

    works = {
        "forward": Work(cycled(system.forward, len(system.data)), max(24, many // 2)),
        "few": Work(ours(few)),
        "many": Work(ours(many)),
    }
    times = interleave(works, rounds, system.device, warm=system.device.type == "cuda")
    measured = "measured whole" if many == total else f"extrapolated from {few} and {many} batches"
    return Row(
        f"{total * BATCH_SIZE:,} examples ranked at one outcome, {HORIZONS} steps on: {system.name}",
        times.ratio(lambda t: at_count(t, ("few", few), ("many", many), total) / (total * t["forward"])),
        4.0,
        "forward passes",
        "forward-mode passes over the pool + a sweep of H products",
        f"{measured}; {_line(times, few, many, 'forward', 'passes')}",
    )


# --- the table of scores --------------------------------------------------------------------------


def scores(device: torch.device, full: bool) -> list[Row]:
    """The whole table of scores against the gradients, graphs and products of its five propagations."""
    return [_scores(mlp_system(device), 3), _scores(cnn_system(device), 3 if full else 1)]


def _scores(system: System, rounds: int) -> Row:
    path, changes = _checked(system, HORIZONS), 6
    change = path.replace(system.batches(changes, start=24))
    works = {
        **_pieces(system, gradients=8, graphs=4, products=12),
        "forward": Work(cycled(system.forward, len(system.data)), 24),
        "ours": Work(lambda: theory.scores(change, system.probe)),
    }
    times = interleave(works, rounds, system.device, warm=system.device.type == "cuda")
    steps = HORIZONS - 1

    def parts(t: dict[str, float]) -> float:
        products = 5 * changes * steps * t["product"]  # full, initial θ, clamped θ, frozen, endpoint
        return (changes + 1 + HORIZONS) * t["g"] + steps * t["graph"] + products + changes * HORIZONS * t["forward"]

    return Row(
        f"table of scores, {changes} changes × {HORIZONS} horizons: {system.name}",
        times.ratio(lambda t: t["ours"] / parts(t)),
        1.3,
        "× its propagations",
        "N + H gradients, H graphs, 5·N·H products, N·H forward passes",
        f"{times.ratio(lambda t: t['ours'] / t['g']):.0f} g in all",
    )


# --- the elementwise part -------------------------------------------------------------------------


def elementwise(device: torch.device, full: bool) -> list[Row]:
    """AdamW's part of a tangent step against moving its bytes once."""
    size = 2**21 if device.type == "cpu" else 2**26  # on a GPU less would time the launch
    return [_elementwise(device, rows, size // (1 if device.type == "cpu" else rows)) for rows in (1, 8)]


def _elementwise(device: torch.device, rows: int, size: int) -> Row:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    layout = Layout(("theta",), (torch.Size([size]),), ((1,),), (torch.float32,), (0,), (0,), device)
    state = JointState(random(size), random(size), random(size).square(), (1000,), {})
    hyper = Hyper(1e-3, 0.9, 0.999, 1e-8, 1e-2, decoupled=True)
    step = LinearStep.at(layout, state, random(size), (True,), Clip(1.0, 1.0), (hyper,))
    dx, u = Tangent(*(random(rows, size) for _ in range(3))), random(rows, size)
    # It reads four batched and three shared tensors and writes three: a copy of half as much moves the same.
    moved = (7 * rows + 3) * size
    source, target = (torch.ones(moved // 2, device=device) for _ in range(2))
    calls = max(1, 8 // rows)
    works = {
        "copy": Work(lambda: target.copy_(source), calls),
        "ours": Work(lambda: step.absorb_(dx, u), calls),
    }
    times = interleave(works, 15, device)
    bandwidth = 4 * moved / times.seconds("copy") / 1e9
    return Row(
        f"AdamW's part of a tangent step, {rows} × {size / 1e6:.1f} M elements",
        times.ratio(lambda t: t["ours"] / t["copy"]),
        1.5,
        "× its traffic",
        "parameters × changes",
        f"copy {bandwidth:.0f} GB/s",
    )


# --- the adjoint ----------------------------------------------------------------------------------


def adjoint(device: torch.device, full: bool) -> list[Row]:
    """One outcome carried back with √H states kept, against every state kept."""
    return [_adjoint(mlp_system(device), 64, 3), _adjoint(cnn_system(device), 64 if full else 16, 2)]


def _adjoint(system: System, steps: int, rounds: int) -> Row:
    outcome = _random_rows(system, 1)
    paths = {keep: system.point.follow(system.batches(steps), keep=keep) for keep in ("states", "checkpoints")}
    works = {keep: Work(_sweep(path.trajectory, outcome)) for keep, path in paths.items()}
    works["g"] = Work(cycled(system.gradient, len(system.data)), steps // 2)
    times = interleave(works, rounds, system.device, warm=system.device.type == "cuda")
    each = {keep: times.ratio(lambda t, keep=keep: t[keep] / t["g"] / steps) for keep in paths}
    return Row(
        f"adjoint over {steps} steps, √H checkpoints against every state: {system.name}",
        times.ratio(lambda t: t["checkpoints"] / t["states"]),
        1.5,
        "× its time",
        "H graphs and products; checkpoints H gradients more",
        f"states {each['states']:.2f} g per step, checkpoints {each['checkpoints']:.2f} g",
    )


def _sweep(trajectory: Trajectory, outcome: Tensor) -> Callable[[], object]:
    return lambda: adjoint_sweep(trajectory, len(trajectory), 0, readout(outcome.clone()))
