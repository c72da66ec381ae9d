"""AdamW: torch's own step on the flat state, and its derivative in closed form.

The derivative is one elementwise map and its transpose. With u the variation of the gradient that
reaches the moments, a step takes a tangent to

    δm' = β1 δm + (1−β1) u
    δv' = β2 δv + 2(1−β2) g ⊙ u
    δθ' = (1−ηλ) δθ + M δm' + V δv'            (`LinearStep.absorb_`)

which is the paper's carry K at u = 0, its write-in B at δx = 0 and its transition A at u = H δθ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.optim.adam import adam

from .clipping import TORCH_EPSILON, Clip, clip_jacobian
from .layout import Layout
from .state import Cotangent, JointState, Tangent

CACHED_BYTES = 2**19  # of each of the tensors that one pass after another reads
COMPILE_FROM = 2**26  # elements of a batch of tangents, from which compiling pays within a few steps


@dataclass(frozen=True)
class Hyper:
    """One parameter group's hyperparameters at one step."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool = False
    foreach: bool | None = None
    fused: bool | None = None
    capturable: bool = False

    def with_lr(self, lr: float) -> Hyper:
        """The same group at another learning rate, kept as a tensor where the optimizer has a tensor."""
        return replace(self, lr=torch.full_like(self.lr, lr) if isinstance(self.lr, Tensor) else float(lr))


def adamw_step(
    layout: Layout, state: JointState, grads: Sequence[Tensor | None], hypers: Sequence[Hyper]
) -> JointState:
    """x_{s+1} by `torch.optim.adam.adam`, equal to the bit to the optimizer's own step.

    `grads` are those that reach the optimizer (clipped). A parameter whose gradient is `None` is left
    alone, decay and step count included.
    """
    new = state.clone()
    theta, m, v = (layout.typed_views(flat) for flat in (new.theta, new.m, new.v))
    for group, hyper in enumerate(hypers):
        members = [i for i, g in enumerate(layout.groups) if g == group and grads[i] is not None]
        if not members:
            continue
        count_device = layout.device if hyper.fused or hyper.capturable else "cpu"
        adam(
            [theta[i] for i in members],
            [grads[i] for i in members],  # type: ignore[misc]
            [m[i] for i in members],
            [v[i] for i in members],
            [],
            [torch.tensor(float(state.counts[i]), device=count_device) for i in members],
            foreach=hyper.foreach,
            capturable=hyper.capturable,
            fused=hyper.fused,
            decoupled_weight_decay=hyper.decoupled,
            amsgrad=False,
            beta1=hyper.beta1,
            beta2=hyper.beta2,
            lr=hyper.lr,
            weight_decay=hyper.weight_decay,
            eps=hyper.eps,
            maximize=hyper.maximize,
        )
    if not layout.uniform:
        for flat, views in ((new.theta, theta), (new.m, m), (new.v, v)):
            layout.write(flat, views)
    counts = tuple(count + (grad is not None) for count, grad in zip(state.counts, grads))
    return replace(new, counts=counts)


@dataclass(frozen=True)
class Run:
    """A stretch of the flat vector whose parameters share every scalar of the step."""

    where: slice
    active: bool  # False where the gradient is None: torch leaves the parameter alone
    lr: float
    beta1: float
    beta2: float
    eps: float
    bias1: float
    bias2: float
    shrink: float  # 1 − ηλ, decoupled decay
    coupled: float  # λ of Adam, which enters through the gradient
    sign: float  # −1 under maximize

    @classmethod
    def at(cls, hyper: Hyper, s: int, where: slice = slice(None), active: bool = True) -> Run:
        """The scalars of step s, counted from 1."""
        lr, decay = float(hyper.lr), float(hyper.weight_decay)
        return cls(
            where=where,
            active=active,
            lr=lr,
            beta1=hyper.beta1,
            beta2=hyper.beta2,
            eps=hyper.eps,
            bias1=1 - hyper.beta1**s,
            bias2=1 - hyper.beta2**s,
            shrink=1 - lr * decay if hyper.decoupled else 1.0,
            coupled=0.0 if hyper.decoupled else decay,
            sign=-1.0 if hyper.maximize else 1.0,
        )


def runs_of(layout: Layout, hypers: Sequence[Hyper], counts: Sequence[int], present: Sequence[bool]) -> list[Run]:
    """The stretches of the flat vector at a step that starts from `counts`."""
    runs: list[Run] = []
    previous = None
    for i, group in enumerate(layout.groups):
        stop = layout.starts[i] + layout.padded_sizes[i]
        key = (group, counts[i], present[i])
        if key == previous:
            runs[-1] = replace(runs[-1], where=slice(runs[-1].where.start, stop))
            continue
        previous = key
        runs.append(Run.at(hypers[group], counts[i] + 1, slice(layout.starts[i], stop), present[i]))
    return runs


def sensitivities(run: Run, m: Float[Tensor, "*rows param"], v: Float[Tensor, "*rows param"]) -> tuple[Tensor, Tensor]:
    """M = ∂q/∂m = −η/(ρ1 d) and V = ∂q/∂v = η m̂ / (2 ρ2 √v̂ d²), d = √v̂ + ε, at post-update moments.

    Singular at v̂ = 0. There V = 0 is the right derivative if m̂ = 0 too (no gradient ever came: the
    step −c g/(k|g| + ε) has slope −η(1−β1)/(ρ1 ε)); where m̂ ≠ 0 no derivative exists.
    """
    root = (v / run.bias2).sqrt_()
    d = root + run.eps
    dq_dm = (-run.lr / run.bias1) / d
    dq_dv = (run.lr / (2 * run.bias1 * run.bias2)) * m / (root * d * d)
    zero = torch.zeros_like(dq_dv)
    return torch.where(d > 0, dq_dm, zero), torch.where(root > 0, dq_dv, zero)


def _absorb_(
    dtheta: Tensor,
    dm: Tensor,
    dv: Tensor,
    u: Tensor,
    dv_dg: Tensor,
    dq_dm: Tensor,
    dq_dv: Tensor,
    dm_dg: float | Tensor,
    beta2: float | Tensor,
    shrink: float | Tensor,
) -> None:
    dm.lerp_(u, dm_dg)  # β1 δm + (1−β1) u
    dv.mul_(beta2).addcmul_(dv_dg, u)
    dtheta.mul_(shrink).addcmul_(dq_dm, dm).addcmul_(dq_dv, dv)


@cache
def compiled_absorb() -> Callable[..., None]:
    """The same pass as one kernel that reads and writes each tensor once; as it is where nothing compiles.

    Compiling takes up to half a minute, so only large tangents ask for it. It agrees to rounding, not to
    the bit.
    """
    compiled: Callable[..., None] = torch.compile(_absorb_, dynamic=True)

    def absorb_(dtheta: Tensor, *rest: Tensor | float) -> None:
        *tensors, dm_dg, beta2, shrink = rest
        # numbers go in as tensors: as floats they were seen to be baked into a cached kernel, which then
        # silently used the first call's betas for every other
        scalars = [torch.tensor(x, dtype=torch.float64, device=dtheta.device) for x in (dm_dg, beta2, shrink)]
        compiled(dtheta, *tensors, *scalars)

    rows, vectors = [torch.zeros(2, 8) for _ in range(4)], [torch.zeros(8) for _ in range(3)]
    try:
        absorb_(*rows, *vectors, 0.1, 0.99, 1.0)
    except Exception:  # no compiler on this machine
        return _absorb_
    return absorb_


def _blocks(where: slice, rows: Float[Tensor, "change param"]) -> Iterator[slice]:
    """A stretch in pieces that stay in a core's cache through a dozen passes; on a GPU, whole."""
    start, stop, _ = where.indices(rows.shape[-1])
    count = max(rows.numel() // max(rows.shape[-1], 1), 1)
    size = stop - start if rows.is_cuda else max(CACHED_BYTES // (count * rows.element_size()), 512)
    for first in range(start, stop, max(size, 1)):
        yield slice(first, min(first + size, stop))


@dataclass(frozen=True)
class LinearStep:
    """The derivative of one AdamW step at a control state, without the Hessian.

    `raw` is ĝ, the gradient before clipping; `g` the one that reaches the moments.
    """

    layout: Layout
    runs: tuple[Run, ...]
    raw: Float[Tensor, " param"]
    g: Float[Tensor, " param"]
    dv_dg: Float[Tensor, " param"]  # 2(1−β2) g
    dq_dm: Float[Tensor, " param"]
    dq_dv: Float[Tensor, " param"]
    clip: Clip
    zero_v: Bool[Tensor, " param"]  # active coordinates with v̂ = 0
    broken: Bool[Tensor, " param"]  # no derivative: v̂ = 0 with m̂ ≠ 0, or no gradient at all in this step

    @classmethod
    def at(
        cls,
        layout: Layout,
        state: JointState,
        raw: Float[Tensor, " param"],
        present: Sequence[bool],
        clip: Clip,
        hypers: Sequence[Hyper],
    ) -> LinearStep:
        """Linearize the step that takes `state` with gradient `raw`: a few elementwise passes."""
        runs = runs_of(layout, hypers, state.counts, present)
        g, dv_dg, dq_dm, dq_dv = (torch.zeros_like(raw) for _ in range(4))
        zero_v, broken = (torch.zeros_like(g, dtype=torch.bool) for _ in range(2))
        for run in runs:
            w = run.where
            if not run.active:
                broken[..., w] = True
                continue
            torch.mul(raw[..., w], run.sign * clip.factor, out=g[..., w]).add_(state.theta[..., w], alpha=run.coupled)
            m = run.beta1 * state.m[..., w] + (1 - run.beta1) * g[..., w]
            v = run.beta2 * state.v[..., w] + (1 - run.beta2) * g[..., w] * g[..., w]
            torch.mul(g[..., w], 2 * (1 - run.beta2), out=dv_dg[..., w])
            dq_dm[..., w], dq_dv[..., w] = sensitivities(run, m, v)
            zero_v[..., w] = v == 0
            broken[..., w] = zero_v[..., w] & (m != 0)
        return cls(layout, tuple(runs), raw, g, dv_dg, dq_dm, dq_dv, clip, zero_v, broken)

    def gradient_variation(self, xi: Float[Tensor, "change param"]) -> Float[Tensor, "change param"]:
        """σ J ξ: what a raw gradient difference becomes when it reaches the moments. Self-adjoint."""
        u = clip_jacobian(self.clip, self.raw, xi)
        if all(run.active and run.sign == 1.0 for run in self.runs):
            return u
        u = u.clone() if u is xi else u
        for run in self.runs:
            u[..., run.where] *= run.sign if run.active else 0.0
        return u

    def add_coupled_decay_(self, u: Float[Tensor, "change param"], theta: Float[Tensor, "change param"]) -> None:
        """Adam's λ θ enters the gradient after clipping: u += λ θ. Self-adjoint."""
        for run in self.runs:
            if run.active and run.coupled:
                u[..., run.where].add_(theta[..., run.where], alpha=run.coupled)

    def absorb_(self, dx: Tangent, u: Float[Tensor, "change param"]) -> None:
        """One step of tangents, in place, given the gradient variation u they cause."""
        kernel = compiled_absorb() if dx.theta.numel() >= COMPILE_FROM else _absorb_
        for run in self.runs:
            if run.active:
                w = run.where
                kernel(
                    dx.theta[..., w], dx.m[..., w], dx.v[..., w], u[..., w],
                    self.dv_dg[..., w], self.dq_dm[..., w], self.dq_dv[..., w], 1 - run.beta1, run.beta2, run.shrink,
                )  # fmt: skip

    def absorb_exactly_(
        self,
        before: JointState,
        dx: Tangent,
        xi: Float[Tensor, "change param"],
        max_norm: float | None,
    ) -> None:
        """One step of finite differences, in place: AdamW's own arithmetic at g + ξ, less that at g.

        Written in differences, so that a small δx loses no digits.
        """
        factors = torch.ones_like(xi[..., 0])
        if max_norm is not None:
            norms = torch.linalg.vector_norm(self.raw + xi, dim=-1)
            factors = torch.clamp(max_norm / (norms + TORCH_EPSILON), max=1.0)
        for run in self.runs:
            if run.active:
                for w in _blocks(run.where, xi):
                    self._absorb_exactly_at_(run, w, before, dx, xi, factors)

    def _absorb_exactly_at_(
        self, run: Run, w: slice, before: JointState, dx: Tangent, xi: Float[Tensor, "change param"], factors: Tensor
    ) -> None:
        dtheta, dm, dv, g = dx.theta[..., w], dx.m[..., w], dx.v[..., w], self.g[..., w]
        # c' (g + ξ) − c g = c' ξ + (c' − c) g
        change = (factors - self.clip.factor)[..., None]
        u = torch.addcmul(factors[..., None] * xi[..., w], change, self.raw[..., w])
        u.mul_(run.sign).add_(dtheta, alpha=run.coupled)
        m = run.beta1 * before.m[..., w] + (1 - run.beta1) * g
        v = run.beta2 * before.v[..., w] + (1 - run.beta2) * g * g
        dm.lerp_(u, 1 - run.beta1)
        dv.mul_(run.beta2).addcmul_(u.add(g, alpha=2), u, value=1 - run.beta2)
        d = (v / run.bias2).sqrt_().add_(run.eps)
        shocked_d = torch.add(v, dv).clamp_(min=0).div_(run.bias2).sqrt_().add_(run.eps)
        # m'/d' − m/d = (δm − (d' − d) m/d) / d', and 0/0 is a coordinate that does not move (ε = 0)
        ratio = torch.addcmul(dm, shocked_d - d, m / d, value=-1).div_(shocked_d).nan_to_num_(0.0)
        dtheta.mul_(run.shrink).sub_(ratio, alpha=run.lr / run.bias1)

    def absorb_transposed_(self, c: Cotangent) -> Float[Tensor, "outcome param"]:
        """The transpose of `absorb_`: cotangents one step back, in place; returns the dual of u."""
        w_all = torch.zeros_like(c.theta)
        for run in self.runs:
            if run.active:
                w = run.where
                theta, m, v = c.theta[..., w], c.m[..., w], c.v[..., w]
                m.addcmul_(self.dq_dm[w], theta)
                v.addcmul_(self.dq_dv[w], theta)
                torch.mul(m, 1 - run.beta1, out=w_all[..., w])
                w_all[..., w].addcmul_(self.dv_dg[w], v)
                theta.mul_(run.shrink)
                m.mul_(run.beta1)
                v.mul_(run.beta2)
        return w_all
