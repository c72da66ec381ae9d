"""The proof before the first answer: does this model's Hessian product equal a difference of gradients?

One central difference of the gradient catches every known silent error: weight_norm,
`detach` inside a model, spectral_norm, straight-through estimators, private random generators.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import Nondeterministic, NotFinite, UnsupportedModel, WrongHessian
from .batches import Batch
from .calls import WRITTEN
from .graphs import GradientGraph, graph_apart, graph_gradient
from .loss import Gradient, LossFunction
from .randomness import RandomState
from .reductions import finite, gradients_apart, mean, norm, norms, products
from .state import JointState


@dataclass(frozen=True)
class Proof:
    """The numbers that decide whether gradients and Hessian products are right."""

    # Rounding of the gradient over the step, plus curvature of the gradient over it: about 1e-5 in float64
    # and 1e-2 in float32 at the best step. The known silent errors start at 6e-3 (spectral_norm).
    double: float = 1e-3
    single: float = 5e-2
    clear: float = 0.1  # of these: a product is right then, and no better step size is looked for
    # Of a gradient run twice: sums in another order, as of a GPU's atomic additions, stay far below it in float32, and
    # other random numbers or another batch are far above.
    noise: float = 1e-3
    # Biases of zero and an empty image put a ReLU on its kink: no step is small enough there. Products that are right
    # beside it, where each parameter is moved by this much of its size, are right; wrong ones are wrong there, too.
    beside: float = 0.1
    slope: float = 5e-2  # of a slope along the gradient: float32 and curvature stay below it at the best step
    heard: float = 0.1  # of the change of the loss by a step, for its slope: what rounding may be of it at most
    short: float = 1e-2  # of ‖θ‖: no longer step is taken for a slope

    def tolerance(self, dtype: torch.dtype) -> float:
        """Of the error of a Hessian product, and of its asymmetry."""
        return self.double if dtype == torch.float64 else self.single


PROOF = Proof()
# The usual best step first. A network of millions of ReLUs crosses kinks unless the step is tiny, and their
# jumps do not shrink with it; models that compute parts in float32 need large steps even in float64.
RELATIVE_STEPS = {
    torch.float64: (1e-6, 1e-8, 1e-9, 1e-4, 1e-3, 1e-2),
    torch.float32: (1e-2, 3e-2, 3e-3, 1e-1, 1e-3),
}
SLOPE_STEPS = (1e-3, 1e-4, 1e-5, 1e-2, 1e-1)  # of the loss, which a step is to change by so much
CHANGING = (
    "the same Hessian product was wrong once and right once: the model or loss_fn counts its calls, or uses something "
    "that changes by itself"
)


@dataclass(frozen=True)
class Check:
    """What `check` found. Made only where the Hessian products are right."""

    error: float  # ‖H u − central difference‖ / ‖H u‖, at the best step size
    asymmetry: float  # |⟨w, H u⟩ − ⟨u, H w⟩| / (‖w‖ ‖H u‖ + ‖u‖ ‖H w‖)
    replay_noise: float  # relative difference of the same gradient run twice; 0 where it is deterministic
    hidden: tuple[str, ...]  # buffers that a step moves and the loss depends on
    dtype: torch.dtype
    steps: tuple[int, ...] = ()  # of the path, where it was made at several
    beside: bool = False  # made at weights moved by `Proof.beside`: those of the run lie on a kink
    other_masks: float = 0.0  # how far off a gradient is whose passes draw other dropout masks than training's; 0: none

    @property
    def tolerance(self) -> float:
        """What an error was compared with."""
        return PROOF.tolerance(self.dtype)

    @classmethod
    def joined(cls, checks: Mapping[int, Check]) -> Check:
        """The worst of the checks of some steps."""
        all_of = list(checks.values())
        return cls(
            max(one.error for one in all_of),
            max(one.asymmetry for one in all_of),
            max(one.replay_noise for one in all_of),
            tuple(dict.fromkeys(name for one in all_of for name in one.hidden)),
            all_of[0].dtype,
            tuple(checks),
            any(one.beside for one in all_of),
            max(one.other_masks for one in all_of),
        )

    def __str__(self) -> str:
        where = f"; steps {', '.join(map(str, self.steps))} of the path" if self.steps else ""
        text = (
            f"Hessian products agree with central differences of the gradient to {self.error:.1e} "
            f"(in {str(self.dtype).removeprefix('torch.')}{where}) and are symmetric to {self.asymmetry:.1e}; "
        )
        if self.beside:
            text += f"that is at weights moved by {PROOF.beside:.0%}, since the run's own lie on a kink; "
        text += "replay is exact to the bit" if self.replay_noise == 0 else f"replay noise {self.replay_noise:.1e}"
        if self.other_masks:
            text += "; they are of other dropout masks than training's, which torch's fused attention draws by itself"
        if self.hidden:
            text += f"; the loss depends on moving buffers ({', '.join(self.hidden[:3])})"
        return text + "."


def check(loss: LossFunction, state: JointState, batch: Batch, random: RandomState) -> Check:
    """Compare one Hessian product with a central difference and test its symmetry: about 8 g, up to 16.

    Five times as much where the weights lie on a kink. Raises `WrongHessian` or `Nondeterministic`.
    """
    once, noise = repeated(loss, state, batch, random, "the check")
    rounding = _rounding(loss, once)
    moved = moved_buffers(state.buffers, once.buffers)
    if not once.random.same(random):  # what draws may draw otherwise where it is differentiated twice
        graph_apart(loss, state.theta, state.buffers, batch, random, "the check", once)
    del once  # memory is short on a large model: no more vectors than are needed
    tolerance = PROOF.tolerance(_working_dtype(loss))
    compared = partial(_compared, loss, batch=batch, random=random, rounding=rounding)
    error, asymmetry = compared(state)
    beside = error > tolerance >= asymmetry and _on_kink(loss, state, batch, random)
    if beside:
        away = PROOF.beside * _direction(loss, state, _directions(loss))
        with contextlib.suppress(NotFinite):  # on both sides: on one of them a unit is dead, and nothing is compared
            sides = [compared(replace(state, theta=state.theta + side * away)) for side in (1, -1)]
            error, asymmetry = torch.tensor(sides, dtype=torch.float64).amax(0).tolist()  # NaN stays NaN
        if error <= tolerance and compared(state)[0] <= tolerance:
            raise Nondeterministic(CHANGING)
    if math.isnan(asymmetry):
        raise WrongHessian(
            "a Hessian product is not a number where the gradient is one, so that nothing can be predicted. Known "
            "causes: the second derivative of a norm, a root or a power at 0 (add a small number under it), and what "
            "torch.where does not choose. Exact answers need no Hessian: change.response(..., answers=('exact',))"
        )
    right = error <= tolerance and (
        asymmetry <= tolerance or _along_the_other(loss, state, batch, random, rounding) <= tolerance
    )
    if not right:
        raise WrongHessian(
            f"a Hessian product differs from a central difference of the gradient by {error:.1%} "
            f"(and from symmetry by {asymmetry:.1%}), so no response could be trusted. Known causes: "
            "weight_norm in either form (torch._weight_norm has a wrong second derivative; write w = g * v / v.norm() "
            "out), detach() or a straight-through estimator inside the model, spectral_norm, a custom autograd function"
            ", routing or another discrete choice that a small step of the weights changes (a mixture of experts), a "
            "buffer that a forward pass writes and then reads; or a loss so near to 0 that its gradient is rounding. "
            "Exact answers need no Hessian: change.response(..., answers=('exact',))"
        )
    hidden = hidden_buffers(loss, state, moved, batch, random)
    return Check(error, asymmetry, noise, hidden, _working_dtype(loss), beside=beside)


def check_later(loss: LossFunction, state: JointState, batch: Batch, random: RandomState, first: Check) -> Check | None:
    """The same at a later step of a path whose first one was checked: about 4 g, up to 14.

    A product that is wrong here differs from a difference of gradients here. Symmetry says the same once more, and
    whether the model repeats itself is known from `first`. None where they differ: `check` says why.
    """
    graph = GradientGraph(loss, state.theta, state.buffers, batch, random, "the check")
    u = _direction(loss, state, _directions(loss))
    hu = graph.products(u[None])[0]
    moved, rounding = moved_buffers(state.buffers, graph.gradient.buffers), _rounding(loss, graph.gradient)
    del graph
    error, dtype = _best_difference(loss, state, batch, random, u, hu, rounding), _working_dtype(loss)
    if not error <= PROOF.tolerance(dtype):
        return None
    return replace(first, error=error, hidden=hidden_buffers(loss, state, moved, batch, random), dtype=dtype)


def other_masks(loss: LossFunction, state: JointState, batch: Batch, random: RandomState) -> float:
    """How far off the gradient of a pass is that draws other dropout masks where it is differentiated twice; 0 for any
    other model. 2 g, once for a model. A check in float64 does not see it: there attention is never fused."""
    apart = graph_apart(loss, state.theta, state.buffers, batch, random, "the check")
    return apart if loss.draws_otherwise else 0.0


def _compared(
    loss: LossFunction,
    state: JointState,
    *,
    batch: Batch,
    random: RandomState,
    rounding: float,
) -> tuple[float, float]:
    """How far a product is from a difference of gradients, at the best step, and how far from symmetry."""
    graph, generator = GradientGraph(loss, state.theta, state.buffers, batch, random, "the check"), _directions(loss)
    w = _direction(loss, state, generator)
    hw = graph.products(w[None])[0]
    u = _direction(loss, state, generator)
    across, size = products(u, hw), norms(hw)
    del hw
    hu = graph.products(u[None])[0]
    scale = norms(w) * norms(hu) + norms(u) * size
    asymmetry = 0.0 if scale == 0 else float((products(w, hu) - across).abs() / scale)  # NaN where a product is
    del w, graph
    return _best_difference(loss, state, batch, random, u, hu, rounding), asymmetry


def _along_the_other(
    loss: LossFunction, state: JointState, batch: Batch, random: RandomState, rounding: float
) -> float:
    """How far the other product of a comparison is from its difference of gradients: where the curvature is next to
    nothing, products that are right are not symmetric to each other's rounding."""
    w = _direction(loss, state, _directions(loss))
    hw = GradientGraph(loss, state.theta, state.buffers, batch, random, "the check").products(w[None])[0]
    return _best_difference(loss, state, batch, random, w, hw, rounding)


def _on_kink(loss: LossFunction, state: JointState, batch: Batch, random: RandomState) -> bool:
    """Whether gradients on the two sides differ from the one between by what no smaller step makes smaller: 3 g a step.

    Where a wrong product is all that is wrong, the gradient is smooth, and forward and backward differences agree.
    """
    generator, dtype = _directions(loss), _working_dtype(loss)
    u = (_direction(loss, state, generator), _direction(loss, state, generator))[1]  # as compared

    def gradient(at: float) -> Tensor:
        return _gradient(loss, replace(state, theta=state.theta + at * u), batch, random)

    middle = gradient(0.0)
    for h in RELATIVE_STEPS[dtype]:
        try:
            up, down = gradient(h) - middle, middle - gradient(-h)
        except NotFinite:
            continue
        if not float(norms(up - down)) > PROOF.tolerance(dtype) * float(norms(up + down)):
            return False
    return True


def _gradient(loss: LossFunction, state: JointState, batch: Batch, random: RandomState) -> Tensor:
    """A gradient with the dropout masks that products have: the plain one, but for a model that draws otherwise there.
    Raises `NotFinite`."""
    given = (state.theta, state.buffers, batch, random, "the check")
    if not loss.draws_otherwise:
        return loss.layout.join(loss.gradient(*given).grads)
    found = loss.layout.join(graph_gradient(loss, *given))
    if not finite(found):
        raise NotFinite("a gradient of the check is not finite")
    return found


def refuse_changing(again: Callable[[], Check]) -> None:
    """Raise where a check that failed passes when it is made again."""
    with contextlib.suppress(WrongHessian):
        again()
        raise Nondeterministic(CHANGING)


def repeated(
    loss: LossFunction, state: JointState, batch: Batch, random: RandomState, where: str
) -> tuple[Gradient, float]:
    """A gradient, and the relative difference of the same one run again: 2 g. Raises where it is another one."""
    before = _fingerprint(loss, state)
    once, twice = (loss.gradient(state.theta, state.buffers, batch, random, where) for _ in range(2))
    if _fingerprint(loss, state) != before:
        raise UnsupportedModel(WRITTEN)
    noise = gradients_apart(once.grads, twice.grads)
    if noise > PROOF.noise:
        raise Nondeterministic(
            f"the same gradient at {where}, run twice from the same random state, differs by {noise:.1%}. The model or "
            "loss_fn uses something that changes by itself: the time, os.urandom, an iterator, a random generator that "
            "is none of torch's, NumPy's and Python's global ones; or it changes the batch in place"
        )
    return once, noise


def _fingerprint(loss: LossFunction, state: JointState) -> list[float]:
    """Changes where the parameters do, also where torch does not count it (p.data.clamp_())."""
    tensors = [state.theta, *(p for p in loss.constants.values() if p.is_floating_point())]
    return torch.stack([norm(p, dtype=torch.float64).cpu() for p in tensors]).tolist()


def hidden_buffers(
    loss: LossFunction,
    state: JointState,
    moved: Mapping[str, Tensor],
    batch: Batch,
    random: RandomState,
    *,
    evaluating: bool = False,
) -> tuple[str, ...]:
    """Names of buffers that training moves and this loss depends on: state outside (θ, m, v)."""
    if not moved:
        return ()
    after = {**state.buffers, **moved}
    losses = [
        loss.value(state.theta, buffers, batch, random, "the check", evaluating=evaluating).loss
        for buffers in (state.buffers, after)
    ]
    return () if torch.equal(*losses) else tuple(moved)


def slope_error(
    loss: LossFunction, value: Callable[[Tensor], Tensor], gradient: Gradient, theta: Float[Tensor, " param"]
) -> float:
    """How far ‖∇F‖ is from the central difference of F along ∇F, relative to the larger, at the best step; 0 where no
    step is heard above rounding. Two forward passes, up to ten.

    A product may be right, and the gradient no derivative: of a term that is counted and not trained (`detach`), or of
    a straight-through estimator.
    """
    g = loss.layout.join(gradient.grads)
    length, size = float(norms(g)), abs(float(gradient.loss))
    if length == 0 or not math.isfinite(length) or size == 0:
        return 0.0
    dtypes = {*loss.layout.dtypes, *((loss.autocast.dtype,) if loss.autocast.enabled else ())}
    rounding, error = 2 * size * max(torch.finfo(dtype).eps for dtype in dtypes), math.inf
    for share in SLOPE_STEPS:
        change = share * size  # of F, as the gradient has it
        if rounding > PROOF.heard * change or change / length > PROOF.short * float(norms(theta)):
            continue
        step = (change / length**2) * g
        with contextlib.suppress(NotFinite):
            found = (float(value(theta + step)) - float(value(theta - step))) / 2
            error = min(error, max(abs(found - change) - rounding, 0.0) / max(abs(found), change))
        if error <= PROOF.clear * PROOF.slope:
            break
    return error if math.isfinite(error) else 0.0


def moved_buffers(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of `after` that differ."""
    return {name: after[name] for name in before if not torch.equal(before[name], after[name])}


def _working_dtype(loss: LossFunction) -> torch.dtype:
    return torch.float64 if all(dtype == torch.float64 for dtype in loss.layout.dtypes) else torch.float32


def _directions(loss: LossFunction) -> torch.Generator:
    """The same ones in every comparison. On the device: a CPU would draw 1.4 B numbers for half a minute."""
    return torch.Generator(loss.layout.device).manual_seed(0)


def _direction(loss: LossFunction, state: JointState, generator: torch.Generator) -> Tensor:
    """A random direction in which each parameter moves in proportion to its own size."""
    pieces = []
    for view in loss.layout.views(state.theta):
        # a CPU draws float64 six times as slowly
        noise = torch.randn(view.shape, generator=generator, dtype=torch.float32, device=view.device).to(view)
        pieces.append(noise * (mean(view.square()).sqrt() + 1e-3))
    return loss.layout.join(pieces)


def _rounding(loss: LossFunction, found: Gradient) -> float:
    """Of one gradient."""
    return 2 * torch.finfo(_working_dtype(loss)).eps * float(found.norm)


def _best_difference(
    loss: LossFunction,
    state: JointState,
    batch: Batch,
    random: RandomState,
    u: Tensor,
    hu: Tensor,
    rounding: float,
) -> float:
    """Relative distance of H u from a central difference at the best step."""
    dtype, error = _working_dtype(loss), float("inf")
    tolerance = PROOF.tolerance(dtype)
    for h in RELATIVE_STEPS[dtype]:
        error = min(error, _difference_error(loss, state, batch, random, u, hu, h, rounding / h))
        if error <= PROOF.clear * tolerance:
            break
    return error


def _difference_error(
    loss: LossFunction,
    state: JointState,
    batch: Batch,
    random: RandomState,
    u: Tensor,
    hu: Tensor,
    h: float,
    rounding: float,
) -> float:
    """Relative distance of H u from a central difference of step h."""
    try:
        up, down = (
            _gradient(loss, replace(state, theta=state.theta + sign * h * u), batch, random) for sign in (1.0, -1.0)
        )
    except NotFinite:
        return float("inf")
    estimate = up.sub_(down).div_(2 * h)
    del down
    scale = max(float(norms(hu)), float(norms(estimate)))
    return 0.0 if scale <= rounding else float(norms(estimate - hu)) / scale  # a linear loss has H = 0; NaN is one
