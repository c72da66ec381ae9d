"""The adjoint ∂F(x_H)/∂x_0 by our closed-form sweep and by autograd through H unrolled steps of AdamW.

The other sides are torchopt and `torch.optim.AdamW(differentiable=True)`. Compared are time, peak memory, agreement in
float64, and how many values are not finite, which one coordinate with v = 0 is enough for.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import aftershock as ak
from aftershock.core.operators import readout
from aftershock.core.sweeps import adjoint_sweep

from ..models import Batch
from ..timing import Work, cycled, interleave
from .memory import peak_apart
from .window import Window

AGREEMENT_STEPS = 4
LEAST_V = 1e-10  # a gradient of 3e-4 gives so much in one step
Adjoint = tuple[list[Tensor], list[Tensor], list[Tensor]]  # of θ, m and v, one tensor per parameter
Moments = tuple[list[Tensor], list[Tensor], list[Tensor]]  # m, v and the step counts


# --- our side


def ours_keeping_states(window: Window) -> Adjoint:
    """One closed-form sweep, the control followed too; graphs are made again from the states."""
    return _ours(window, "states")


def ours_keeping_graphs(window: Window) -> Adjoint:
    """The same with every step's graph kept, as unrolling keeps them."""
    return _ours(window, "graphs")


def _ours(window: Window, keep: str) -> Adjoint:
    point = ak.capture(window.model, window.optimizer, window.loss_fn)
    path = point.follow(window.batches, keep=keep)
    time, layout = len(path), point.loss.layout
    found = ak.Probe.of(window.probe).gradient(path.trajectory, time, path.trajectory.state(time))
    c = adjoint_sweep(path.trajectory, time, 0, readout(layout.join(found.grads)[None]))
    return tuple(layout.views(part[0]) for part in (c.theta, c.m, c.v))  # type: ignore[return-value]


# --- the other sides: every update in one graph, then one backward pass

Step = Callable[[Tensor, list[Tensor]], list[Tensor]]  # (loss, θ) -> θ


def torchopt_unrolled(window: Window) -> Adjoint:
    """torchopt's AdamW is torch's: decoupled decay on every parameter, ε outside the root (`eps_root` is 0).

    Its state is an ordinary tuple, so it starts from the moments and step counts of the live optimizer.
    """
    import torchopt

    theta, (m, v, counts) = _leaves(window), moments(window.model, window.optimizer)
    optimizer = torchopt.FuncOptimizer(torchopt.adamw(**window.options))
    first, *rest = optimizer.impl.init(tuple(theta))
    optimizer.load_state_dict((first._replace(mu=m, nu=v, count=counts), *rest))
    return _unrolled(window, theta, m, v, lambda loss, now: list(optimizer.step(loss, tuple(now))))


def torch_unrolled(window: Window) -> Adjoint:
    """`torch.optim.AdamW(differentiable=True)`; it writes in place, so each step has copies and its own optimizer."""
    theta, (m, v, counts) = _leaves(window), moments(window.model, window.optimizer)
    dtype = torch.get_default_dtype()  # as torch itself has it
    state = [{"step": n.to(dtype), "exp_avg": a, "exp_avg_sq": b} for n, a, b in zip(counts, m, v)]

    def step(loss: Tensor, now: list[Tensor]) -> list[Tensor]:
        grads = torch.autograd.grad(loss, now, create_graph=True)
        after = [p.clone() for p in now]
        optimizer = torch.optim.AdamW(after, **window.options, differentiable=True)
        for i, (p, g) in enumerate(zip(after, grads)):
            p.grad = g
            state[i] = {name: value.clone() for name, value in state[i].items()}
            optimizer.state[p] = state[i]
        optimizer.step()
        return after

    return _unrolled(window, theta, m, v, step)


def _unrolled(window: Window, theta: list[Tensor], m: list[Tensor], v: list[Tensor], step: Step) -> Adjoint:
    names = [f"model.{name}" for name, _ in window.model.named_parameters()]
    module = _Loss(window)

    def loss_at(parameters: list[Tensor], batch: Batch) -> Tensor:
        return functional_call(module, dict(zip(names, parameters)), (batch,))

    with math_attention():
        now = theta
        for batch in window.batches:
            now = step(loss_at(now, batch), now)
        found = torch.autograd.grad(loss_at(now, window.probe), [*theta, *m, *v])
    size = len(names)
    return list(found[:size]), list(found[size : 2 * size]), list(found[2 * size :])


class _Loss(nn.Module):
    def __init__(self, window: Window) -> None:
        super().__init__()
        self.model, self.window = window.model, window

    def forward(self, batch: Batch) -> Tensor:
        return self.window.loss_fn(self.model, batch)


def _leaves(window: Window) -> list[Tensor]:
    return [p.detach().clone().requires_grad_() for p in window.model.parameters()]


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> Moments:
    """Copies of the live optimizer's state, one tensor per parameter; m and v require gradients."""
    states = [optimizer.state[p] for p in model.parameters()]
    m, v = ([s[name].detach().clone().requires_grad_() for s in states] for name in ("exp_avg", "exp_avg_sq"))
    return m, v, [torch.tensor(int(s["step"])) for s in states]


@contextmanager
def math_attention() -> Iterator[None]:
    """The fused attention kernels have no second derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


# --- compared


@dataclass(frozen=True)
class Side:
    name: str
    package: str
    run: Callable[[Window], Adjoint]


SIDES = (
    Side("aftershock, states kept", "aftershock", ours_keeping_states),
    Side("aftershock, graphs kept", "aftershock", ours_keeping_graphs),
    Side("torchopt", "torchopt", torchopt_unrolled),
    Side("AdamW(differentiable=True)", "torch", torch_unrolled),
)


@dataclass(frozen=True)
class Measured:
    """One side on one window."""

    window: str
    side: str
    steps: int
    gradients: float  # time, in plain gradients
    mebibytes: float
    not_finite: int
    values: int
    difference: float  # from our sweep, in float64 with v lifted


def compare(window: Window, rounds: int, peak: Mapping[str, float], lost: Container[str]) -> list[Measured]:
    """Every side whose package is not lost, on the window as it is; `peak` from `peaks`."""
    sides = [side for side in SIDES if side.package not in lost]
    found: dict[str, Adjoint] = {}

    def work(side: Side) -> Work:
        return Work(lambda: found.update({side.name: side.run(window)}))

    works = {"g": Work(cycled(window.gradient, len(window.batches)), 12)} | {side.name: work(side) for side in sides}
    times = interleave(works, rounds, torch.device("cpu"), warm=False)
    with _default_dtype(torch.float64):  # both compute bias corrections in it
        mine, *_ = exact = [side.run(lifted(window)) for side in sides]
    return [
        Measured(
            window.name, side.name, len(window.batches),
            times.ratio(lambda t, name=side.name: t[name] / t["g"]), peak[side.name],
            *_not_finite(found[side.name]), relative_difference(other, mine),
        )
        for side, other in zip(sides, exact)
    ]  # fmt: skip


def peaks(window: Window, lost: Container[str]) -> dict[str, float]:
    """MiB that each side needs at its highest, each in a process of its own."""
    short = dataclasses.replace(window, batches=window.batches[:1])

    def mebibytes(side: Side) -> float:
        return peak_apart(lambda: side.run(window), lambda: side.run(short)) / 2**20

    return {side.name: mebibytes(side) for side in SIDES if side.package not in lost}


def lifted(window: Window) -> Window:
    """A short window in float64 with v raised to where no coordinate is 0.

    With one at 0 the whole unrolled adjoint is NaN, and there would be nothing to compare; in float32 rounding moves
    both by several percent, through ReLUs and small v.
    """
    model = copy.deepcopy(window.model).double()
    optimizer = torch.optim.AdamW(model.parameters(), **window.options)
    optimizer.load_state_dict(window.optimizer.state_dict())
    for p in model.parameters():
        optimizer.state[p]["exp_avg_sq"].clamp_(min=LEAST_V)

    def double(batch: Batch) -> Batch:
        inputs, labels = batch
        return (inputs.double() if inputs.is_floating_point() else inputs), labels

    batches = tuple(double(batch) for batch in window.batches[:AGREEMENT_STEPS])
    return dataclasses.replace(window, model=model, optimizer=optimizer, batches=batches, probe=double(window.probe))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def relative_difference(a: Adjoint, b: Adjoint) -> float:
    """‖a − b‖/‖b‖, the largest of θ, m and v."""
    norms = [
        (sum((x - y).square().sum() for x, y in zip(left, right)), sum(y.square().sum() for y in right))
        for left, right in zip(a, b)
    ]
    return max(float((off / whole).sqrt()) for off, whole in norms)


def _not_finite(adjoint: Adjoint) -> tuple[int, int]:
    values = torch.cat([x.flatten() for part in adjoint for x in part])
    return int((~values.isfinite()).sum()), values.numel()
