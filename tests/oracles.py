"""Truth from outside the code under test: dense Jacobians of the paper's formulas, and torch.optim itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

import aftershock as ak
from aftershock.core.batches import Accumulated
from aftershock.core.dynamics import Step
from aftershock.core.state import JointState, Tangent


class StepOracle:
    """One step of a path as a plain function of the stacked vector x = (θ, m, v), without padding.

    Written from the paper's equations and torch's documentation, in one dense vector; shares nothing with
    the package but the list of parameter names and the numbers of the step.
    """

    def __init__(self, path: ak.Path, at: int, model: nn.Module, loss_fn: Callable) -> None:
        self.layout = path.point.loss.layout
        self.step: Step = path.steps[at]
        self.state: JointState = path.trajectory.state(at)
        self.model, self.loss_fn = model, loss_fn
        self.x = torch.cat([self.layout.compact(t) for t in (self.state.theta, self.state.m, self.state.v)])
        self.present = [g is not None for g in self.gradients(self.split(self.x)[0])]
        self.columns = {
            key: self._column(key)
            for key in (
                "lr",
                "beta1",
                "beta2",
                "eps",
                "weight_decay",
                "decoupled",
                "maximize",
                "count",
                "present",
            )
        }

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        theta, m, v = x.split(self.layout.size)
        return theta, m, v

    def _column(self, key: str) -> Tensor:
        """A per-parameter number spread over coordinates."""
        values = []
        for i, group in enumerate(self.layout.groups):
            if key == "count":
                value = self.state.counts[i] + 1
            elif key == "present":
                value = self.present[i]
            else:
                value = getattr(self.step.hypers[group], key)
            values.append(torch.full((self.layout.sizes[i],), float(value), dtype=torch.float64))
        return torch.cat(values)

    def gradients(self, theta: Tensor, batch: object = None, create_graph: bool = False) -> tuple[Tensor | None, ...]:
        leaf = theta if theta.requires_grad else theta.detach().requires_grad_()
        pieces = leaf.split(self.layout.sizes)
        parameters = [p.view(s) for p, s in zip(pieces, self.layout.shapes)]
        named = dict(zip(self.layout.names, parameters))
        batch = self.step.batch if batch is None else batch
        micro = batch.batches if isinstance(batch, Accumulated) else (batch,)
        with (
            torch.random.fork_rng(devices=[]),
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        ):
            torch.set_rng_state(self.step.random.cpu)

            def run(model: nn.Module) -> tuple[Tensor | None, ...]:
                loss = sum(self.loss_fn(model, b) for b in micro) / len(micro)
                return torch.autograd.grad(loss, parameters, create_graph=create_graph, allow_unused=True)

            buffers = {f"model.{name}": b.clone() for name, b in self.state.buffers.items()}
            tensors = {f"model.{name}": p for name, p in named.items()} | buffers
            return torch.func.functional_call(_Run(self.model), tensors, (run,))

    def raw(self, theta: Tensor, create_graph: bool = False) -> Tensor:
        grads = self.gradients(theta, create_graph=create_graph)
        return torch.cat(
            [theta.new_zeros(size) if g is None else g.reshape(-1) for g, size in zip(grads, self.layout.sizes)]
        )

    def clip(self, raw: Tensor) -> Tensor:
        if self.step.max_norm is None:
            return raw
        norm = raw.norm()
        return raw * torch.clamp(self.step.max_norm / (norm + 1e-6), max=1.0)

    def update(self, x: Tensor, raw: Tensor) -> Tensor:
        """The paper's equations for AdamW (and torch's for Adam), all coordinates at once."""
        theta, m, v = self.split(x)
        c = self.columns
        g = self.clip(raw) * (1 - 2 * c["maximize"]) + (1 - c["decoupled"]) * c["weight_decay"] * theta
        m_new = c["beta1"] * m + (1 - c["beta1"]) * g
        v_new = c["beta2"] * v + (1 - c["beta2"]) * g**2
        m_hat, v_hat = m_new / (1 - c["beta1"] ** c["count"]), v_new / (1 - c["beta2"] ** c["count"])
        shrunk = theta * (1 - c["lr"] * c["weight_decay"] * c["decoupled"])
        theta_new = shrunk - c["lr"] * m_hat / (v_hat.sqrt() + c["eps"])
        new = torch.stack([theta_new, m_new, v_new])
        return torch.where(c["present"] > 0, new, torch.stack([theta, m, v])).reshape(-1)

    # --- dense derivatives

    def step_of(self, x: Tensor) -> Tensor:
        """x_{s+1} = f_s(x_s)."""
        return self.update(x, self.raw(self.split(x)[0], create_graph=x.requires_grad))

    def transition(self, smooth: bool) -> Tensor:
        """A_s as a dense matrix."""
        if smooth:
            return reverse_jacobian(self.step_of, self.x)
        theta, _, v = self.split(self.x)
        fine = torch.where(v > 0, 1e-4 * v, 1e-12)  # √v bends on the scale of v itself
        return central_jacobian(self.step_of, self.x, torch.cat([torch.full_like(theta, 1e-6).repeat(2), fine]))

    def write_in(self, smooth: bool) -> Tensor:
        """B_s as a dense matrix."""
        raw = self.raw(self.split(self.x)[0]).detach()
        if smooth:
            return reverse_jacobian(lambda g: self.update(self.x, g), raw)
        # at v = 0 the step bends over gradients of size eps: the difference must stay far below it
        return central_jacobian(lambda g: self.update(self.x, g), raw, 1e-6 * self.columns["eps"])


class _Run(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, program: Callable) -> object:
        return program(self.model)


def reverse_jacobian(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Dense Jacobian by reverse mode, one row at a time."""
    x = x.detach().requires_grad_()
    y = f(x)
    rows = [torch.autograd.grad(y[i], x, retain_graph=True, allow_unused=True)[0] for i in range(len(y))]
    return torch.stack([torch.zeros_like(x) if row is None else row for row in rows]).detach()


def central_jacobian(f: Callable[[Tensor], Tensor], x: Tensor, h: Tensor) -> Tensor:
    """Dense Jacobian by central differences; forward ones where x is 0 and a step back leaves the domain (v ≥ 0)."""
    columns = []
    for i in range(len(x)):
        up, down = x.detach().clone(), x.detach().clone()
        up[i] += h[i]
        down[i] -= h[i]
        low = f(down).detach()
        if torch.isfinite(low).all():
            columns.append((f(up).detach() - low) / (2 * h[i]))
        else:
            columns.append((f(up).detach() - f(x.detach()).detach()) / h[i])
    return torch.stack(columns, dim=1)


class KickOracle:
    """Predicted responses carried forward, coordinate by coordinate, from the exact difference after one step.

    A stiff write (δm, δv) leaves the tangent and moves θ at every later step by AdamW's own arithmetic, with the step
    counts that the changed run has; everything else goes through the dense-tested transitions A_s.
    """

    def __init__(self, path: ak.Path, model: nn.Module, loss_fn: Callable) -> None:
        self.path, self.layout = path, path.point.loss.layout
        self.steps = [StepOracle(path, s, model, loss_fn) for s in range(len(path))]
        self.after = [self._compact(path.trajectory.state(s + 1)) for s in range(len(path))]
        self.transitions = [path.transition(s) for s in range(len(path))]

    def _compact(self, x: JointState | Tangent) -> Tensor:
        return torch.stack([self.layout.compact(getattr(x, c)) for c in ("theta", "m", "v")])

    def spread(self, values: Sequence[float]) -> Tensor:
        """One number per parameter, for each of its coordinates."""
        pairs = zip(values, self.layout.sizes)
        return torch.cat([torch.full((size,), float(value), dtype=torch.float64) for value, size in pairs])

    def q(self, s: int, m: Tensor, v: Tensor, lag: Tensor) -> Tensor:
        """Step s of θ without decay, −η m̂/(√v̂ + ε), with counts `lag` behind; 0 where the step is not taken."""
        c = self.steps[s].columns
        count = (c["count"] - lag).clamp(min=1)
        step = -c["lr"] * m / (1 - c["beta1"] ** count) / ((v / (1 - c["beta2"] ** count)).sqrt() + c["eps"])
        return step * c["present"]

    def written(self, at: int, batch: object) -> tuple[Tensor, Tensor]:
        """The exact (δθ, δm, δv) of another batch, and by how many steps its counts are then behind."""
        o = self.steps[at]
        theta, _, _ = o.split(o.x)
        grads = o.gradients(theta, batch)
        present = self.spread([g is not None for g in grads])
        own, o.columns["present"] = o.columns["present"], present
        pieces = [torch.zeros(n) if g is None else g.reshape(-1) for g, n in zip(grads, self.layout.sizes)]
        end = o.update(o.x, torch.cat(pieces).double()).view(3, -1).detach()
        o.columns["present"] = own
        return end - self.after[at], own - present

    def bent(self, s: int, m: Tensor, v: Tensor, dv: Tensor, lag: Tensor) -> Tensor:
        """What v adds at a step by eq:bent_kick: q(m, v) w x (−1/2 + (0.11 + 0.4 w) x)."""
        c = self.steps[s].columns
        root = (v / (1 - c["beta2"] ** (c["count"] - lag).clamp(min=1))).sqrt()
        w, x = root / (root + c["eps"]), torch.where(v > 0, dv / v, 0.0)
        return self.q(s, m, v, lag) * w * x * (-0.5 + (0.11 + 0.4 * w) * x)

    def responses(
        self,
        at: int,
        dx: Tensor,
        stiff: Tensor,
        lag: Tensor,
        slopes: Mapping[int, Tensor],
        bent: Tensor | None = None,
    ) -> Tensor:
        """⟨∇F, δθ⟩ by row and state of `slopes`, from rows [row, 3, d] of δx after step `at`, kicked where `stiff`; of
        these, `bent` ones by eq:bent_kick."""
        dx, m, v = dx.clone(), dx[:, 1] * stiff, dx[:, 2] * stiff
        dx[:, 1:] *= ~stiff.expand(len(dx), -1)[:, None]
        found = {at + 1: dx[:, 0]}
        for s in range(at + 1, max(slopes)):
            c = self.steps[s].columns
            carried = self.transitions[s].mv(Tangent(*(self.layout.expand(dx[:, i]) for i in range(3))))
            dx = self._compact(carried).transpose(0, 1)
            m = torch.where(c["present"] > 0, c["beta1"] * m, m)
            v = torch.where(c["present"] > 0, c["beta2"] * v, v)
            _, m_after, v_after = self.after[s]
            moved = self.q(s, m_after + m, (v_after + v).clamp(min=0), lag)
            if bent is not None:
                near = self.q(s, m_after + m, v_after, lag) + self.bent(s, m_after + m, v_after, v, lag)
                moved = torch.where(bent, near, moved)
            found[s + 1] = dx[:, 0] + moved - self.q(s, m_after, v_after, torch.zeros_like(m_after))
            dx = torch.stack([found[s + 1], dx[:, 1], dx[:, 2]], dim=1)
        return torch.stack([found[time] @ self.layout.compact(slope) for time, slope in slopes.items()], dim=1)

    def is_bent(self, at: int, dv: Tensor) -> Tensor:
        """Where −0.4 v ≤ δv ≤ 0.1 v: eq:bent_kick holds."""
        v = self.after[at][2]
        return (dv >= -0.4 * v) & (dv <= 0.1 * v)

    def is_stiff(self, at: int, dv: Tensor) -> Tensor:
        return dv.abs() > 0.1 * self.after[at][2]
