"""The same adjoint by autograd through an unrolled AdamW (torchopt), for time, memory and v = 0.

`python -m benchmarks.unrolled WHO STEPS DEVICE` prints the bytes that one side needs, in its own process.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import aftershock as ak
from aftershock.core.operators import readout
from aftershock.core.sweeps import adjoint_sweep

from .models import OPTIONS, Batch, System, cnn_system, loss_fn
from .table import Row, Skipped
from .timing import Work, cycled, interleave

STEPS = 24
AGREEMENT_STEPS = 4
LEAST_V = 1e-10  # a gradient of 3e-4 gives so much in one step
Adjoint = tuple[list[Tensor], list[Tensor], list[Tensor]]  # of θ, m and v, one tensor per parameter


def unrolled(device: torch.device, full: bool) -> list[Row | Skipped]:
    """Time, peak memory and finiteness, each against torchopt."""
    if importlib.util.find_spec("torchopt") is None:
        return [Skipped("adjoint by autograd through an unrolled AdamW", "torchopt is not installed here")]
    system = cnn_system(device)
    return [_time(_lifted(device), 5 if full else 3), _memory(system), _zero_v(system)]


def _lifted(device: torch.device) -> System:
    """The CNN with v raised to where no coordinate is 0.

    After five steps its quiet ReLUs leave some at 0, and one of them makes the whole unrolled adjoint NaN, so
    that there would be nothing to compare.
    """
    system = cnn_system(device)
    for p in system.parameters:
        system.optimizer.state[p]["exp_avg_sq"].clamp_(min=LEAST_V)
    return replace(system, point=ak.capture(system.model, system.optimizer, loss_fn))


# --- the two sides --------------------------------------------------------------------------------


def ours(point: ak.TrainingPoint, batches: Sequence[Batch], probe: Batch, keep: str) -> Adjoint:
    """∂F(x_H)/∂x_0 by one closed-form sweep, the control followed too."""
    path = point.follow(batches, keep=keep)
    time, layout = len(path), point.loss.layout
    state = path.trajectory.state(time)
    found = ak.Probe.of(probe).gradient(path.trajectory, time, state)
    c = adjoint_sweep(path.trajectory, time, 0, readout(layout.join(found.grads)[None]))
    return tuple(layout.views(part[0]) for part in (c.theta, c.m, c.v))  # type: ignore[return-value]


def theirs(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch], probe: Batch) -> Adjoint:
    """The same by torchopt: every update in one graph, then one backward pass.

    torchopt's AdamW is torch's: decoupled decay on every parameter, ε outside the root (`eps_root` is 0). Its
    state is an ordinary tuple, so it starts from the moments and step counts of the live optimizer.
    """
    import torchopt

    names = [name for name, _ in model.named_parameters()]
    theta = tuple(p.detach().clone().requires_grad_() for p in model.parameters())
    m, v, counts = _moments(model, optimizer)
    differentiable = torchopt.FuncOptimizer(torchopt.adamw(**OPTIONS))
    first, *rest = differentiable.impl.init(theta)
    differentiable.load_state_dict((first._replace(mu=m, nu=v, count=counts), *rest))

    def loss_at(parameters: tuple[Tensor, ...], batch: Batch) -> Tensor:
        return functional_call(_Loss(model), dict(zip([f"model.{n}" for n in names], parameters)), (batch,))

    now = theta
    for batch in batches:
        now = differentiable.step(loss_at(now, batch), now)
    found = torch.autograd.grad(loss_at(now, probe), [*theta, *m, *v])
    size = len(names)
    return list(found[:size]), list(found[size : 2 * size]), list(found[2 * size :])


class _Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        return loss_fn(self.model, batch)


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    m, v, counts = [], [], []
    for p in model.parameters():
        state: dict[str, Any] = optimizer.state.get(p, {})
        m.append(state.get("exp_avg", torch.zeros_like(p)).detach().clone().requires_grad_())
        v.append(state.get("exp_avg_sq", torch.zeros_like(p)).detach().clone().requires_grad_())
        counts.append(torch.tensor(int(state.get("step", 0)), device=p.device))
    return m, v, counts


def relative_difference(a: Adjoint, b: Adjoint) -> float:
    """‖a − b‖/‖b‖, the largest of θ, m and v."""
    norms = [
        (sum((x - y).square().sum() for x, y in zip(left, right)), sum(y.square().sum() for y in right))
        for left, right in zip(a, b)
    ]
    return max(float((off / whole).sqrt()) for off, whole in norms)


# --- time -----------------------------------------------------------------------------------------


def _time(system: System, rounds: int) -> Row:
    batches, probe = system.batches(STEPS), system.probe
    found: dict[str, Adjoint] = {}

    def side(name: str, run: Callable[[], Adjoint]) -> Work:
        return Work(lambda: found.update({name: run()}))

    works = {
        "g": Work(cycled(system.gradient, len(system.data)), 12),
        "graphs": side("ours", lambda: ours(system.point, batches, probe, "graphs")),
        "theirs": side("theirs", lambda: theirs(system.model, system.optimizer, batches, probe)),
    }
    times = interleave(works, rounds, system.device, warm=system.device.type == "cuda")
    rounded, exact = relative_difference(found["ours"], found["theirs"]), _agreement(system)
    each = {name: times.ratio(lambda t, name=name: t[name] / t["g"] / STEPS) for name in ("graphs", "theirs")}
    return Row(
        f"adjoint and its control, {STEPS} steps, graphs kept, against unrolled autograd: {system.name}",
        times.ratio(lambda t: t["graphs"] / t["theirs"]),
        1.0,
        "× its time",
        "H graphs and products",
        f"per step {each['graphs']:.2f} g against {each['theirs']:.2f} g; "
        f"adjoints differ by {exact:.0e} in float64 over {AGREEMENT_STEPS} steps, by {rounded:.0e} here",
    )


def _agreement(system: System) -> float:
    """The difference of the two adjoints in float64.

    In float32 rounding moves both by several percent, through ReLUs and small v, and torchopt computes its bias
    corrections in torch's default dtype, so that is raised too.
    """

    def double(batch: Batch) -> Batch:
        return batch[0].double(), batch[1]

    batches, probe = [double(batch) for batch in system.batches(AGREEMENT_STEPS)], double(system.probe)
    mine = ours(system.point.to(dtype=torch.float64), batches, probe, "states")
    model = copy.deepcopy(system.model).double()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    optimizer.load_state_dict(system.optimizer.state_dict())
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        other = theirs(model, optimizer, batches, probe)
    finally:
        torch.set_default_dtype(before)
    return relative_difference(mine, other)


# --- memory ---------------------------------------------------------------------------------------


def _memory(system: System) -> Row:
    bytes_of = {who: _measured_apart(who, STEPS, system.device) for who in ("states", "theirs")}
    short = {who: _measured_apart(who, STEPS // 2, system.device) for who in ("states", "theirs")}
    mib = {who: count / 2**20 for who, count in bytes_of.items()}
    return Row(
        f"peak memory of the same, graphs recomputed, against unrolled autograd: {system.name}",
        bytes_of["states"] / bytes_of["theirs"],
        1 / 3,
        "× its memory",
        f"H states and one graph: {short['states'] / 2**20:.0f} MiB at H = {STEPS // 2} "
        f"(unrolled {short['theirs'] / 2**20:.0f})",
        f"{mib['states']:.0f} MiB against {mib['theirs']:.0f}",
    )


def _measured_apart(who: str, steps: int, device: torch.device) -> int:
    """Peak bytes of one side in a fresh process: a high-water mark cannot be put back inside this one."""
    # With a fixed threshold glibc gives freed tensors back: the mark shows the work and not the allocator.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.unrolled", who, str(steps), str(device)],
        cwd=FilePath(__file__).parents[1], env=env, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return int(done.stdout)


def peak_bytes(who: str, steps: int, device: torch.device) -> int:
    """How far one side takes this process above where it stood after a first run of one step.

    The high-water mark of resident memory is what the system must give: saved tensors, states, temporaries
    and all. Counting saved tensors by hooks would leave out our states and the other side's moments.
    """
    torch.set_num_threads(1)
    system = cnn_system(device)
    batches, probe = system.batches(steps), system.probe

    def run(some: Sequence[Batch]) -> Adjoint:
        if who == "theirs":
            return theirs(system.model, system.optimizer, some, probe)
        return ours(system.point, some, probe, who)

    run(batches[:1])  # code, kernels and work buffers that any run needs
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run(batches)
        return torch.cuda.max_memory_allocated(device) - before
    before = _resident("VmRSS")
    run(batches)
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    """Bytes resident now (VmRSS) or at most so far (VmHWM).

    Not `ru_maxrss`: Linux hands the parent's mark to the program that a process starts.
    """
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


# --- v = 0 ----------------------------------------------------------------------------------------


class _Words(nn.Module):
    """An embedding half of whose rows no batch touches: there v stays 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.out = nn.Linear(16, 10)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(torch.tanh(self.embedding(words).mean(1)))


def _zero_v(system: System) -> Row:
    """Values that are not finite in our adjoint where v = 0; the other side's are counted beside them."""
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randint(32, (5, 16, 4), generator=generator).to(system.device)
    labels = torch.randint(10, (5, 16), generator=generator).to(system.device)
    *batches, probe = zip(inputs, labels)
    model = _Words().to(system.device)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    mine = ours(ak.capture(model, optimizer, loss_fn), batches, probe, "states")
    other = theirs(model, optimizer, batches, probe)
    cnn = theirs(system.model, system.optimizer, system.batches(2), system.probe)
    bad, total = _not_finite(other)
    cnn_bad, cnn_total = _not_finite(cnn)
    return Row(
        "adjoint through coordinates with v = 0 (an embedding's untouched rows), values that are not finite",
        _not_finite(mine)[0] if bad else float("nan"),  # if the other side were finite, this would show nothing
        0,
        f"of {total:,}",
        "does not grow",
        f"unrolled {bad:,} of {total:,}; and {cnn_bad:,} of {cnn_total:,} for {system.name} as it is",
    )


def _not_finite(adjoint: Adjoint) -> tuple[int, int]:
    values = torch.cat([x.flatten() for part in adjoint for x in part])
    return int((~values.isfinite()).sum()), values.numel()


if __name__ == "__main__":
    print(peak_bytes(sys.argv[1], int(sys.argv[2]), torch.device(sys.argv[3])))
