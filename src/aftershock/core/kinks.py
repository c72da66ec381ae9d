"""Which torch functions have kinks, where these lie, and the smooth pieces between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Branch = Callable[[Tensor], Tensor]
Knot = tuple[float | Tensor, bool]  # a bound, and whether it belongs to the piece above it (as in torch's backward)


@dataclass(frozen=True)
class Piecewise:
    """y = finish(branch_k(x)) with k the number of knots that x has passed."""

    x: Tensor
    knots: Sequence[Knot]
    branches: Sequence[Branch]
    in_place: bool = False
    finish: Branch = lambda y: y

    def pieces(self) -> Tensor:
        """k for every element."""
        return self._pieces(self.x.detach())

    def margin(self) -> Tensor:
        """|a|: the distance of every element from its nearest knot."""
        return (self.x.detach() - self._nearest()).abs()

    def across(self) -> Tensor:
        """The piece just beyond the nearest knot of every element."""
        x, nearest = self.x.detach(), self._nearest()
        return self._pieces(torch.nextafter(nearest, torch.where(x > nearest, -torch.inf, torch.inf)))

    def _pieces(self, x: Tensor) -> Tensor:
        passed = [x >= _plain(bound) if closed else x > _plain(bound) for bound, closed in self.knots]
        return torch.stack([p.to(torch.uint8) for p in passed]).sum(0, dtype=torch.uint8)

    def _nearest(self) -> Tensor:
        x = self.x.detach()
        bounds = torch.stack([torch.zeros_like(x) + _plain(bound) for bound, _ in self.knots])
        return bounds.gather(0, (x - bounds).abs().argmin(0, keepdim=True))[0]

    def follow(self, pieces: Tensor, x: Tensor) -> Tensor:
        """The given pieces, continued past their knots."""
        out = torch.zeros_like(x)
        for k, branch in enumerate(self.branches):
            here = pieces == k
            # a branch sees 0 where it is not chosen: its overflow there would reach the gradient as 0 · inf
            out = torch.where(here, branch(torch.where(here, x, 0.0)), out)
        return self.finish(out)


def _plain(bound: float | Tensor) -> float | Tensor:
    return bound.detach() if isinstance(bound, Tensor) else bound


def _zero(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


def _same(x: Tensor) -> Tensor:
    return x


def _constant(value: float | Tensor) -> Branch:
    return lambda x: value + torch.zeros_like(x)


def _relu(input: Tensor, inplace: bool = False) -> Piecewise:
    return Piecewise(input, [(0.0, False)], [_zero, _same], inplace)


def _leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Piecewise:
    return Piecewise(input, [(0.0, False)], [lambda x: negative_slope * x, _same], inplace)


def _prelu(input: Tensor, weight: Tensor) -> Piecewise:
    spread = weight.view(-1, *[1] * (input.ndim - 2)) if weight.numel() > 1 and input.ndim > 1 else weight
    return Piecewise(input, [(0.0, False)], [lambda x: spread * x, _same])


def _threshold(input: Tensor, threshold: float, value: float, inplace: bool = False) -> Piecewise:
    return Piecewise(input, [(threshold, False)], [_constant(value), _same], inplace)


def _hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Piecewise:
    return Piecewise(
        input, [(min_val, False), (max_val, True)], [_constant(min_val), _same, _constant(max_val)], inplace
    )


def _relu6(input: Tensor, inplace: bool = False) -> Piecewise:
    return _hardtanh(input, 0.0, 6.0, inplace)


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Piecewise:
    return Piecewise(input, [(-3.0, False), (3.0, True)], [_zero, lambda x: (x + 3) / 6, _constant(1.0)], inplace)


def _hardswish(input: Tensor, inplace: bool = False) -> Piecewise:
    return Piecewise(input, [(-3.0, False), (3.0, True)], [_zero, lambda x: x * (x + 3) / 6, _same], inplace)


def _elu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Piecewise:
    return Piecewise(input, [(0.0, False)], [lambda x: alpha * torch.expm1(x), _same], inplace)


def _celu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Piecewise:
    return Piecewise(input, [(0.0, False)], [lambda x: alpha * torch.expm1(x / alpha), _same], inplace)


def _selu(input: Tensor, inplace: bool = False) -> Piecewise:
    scale, alpha = 1.0507009873554805, 1.6732632423543772
    below, above = (lambda x: scale * alpha * torch.expm1(x)), (lambda x: scale * x)
    return Piecewise(input, [(0.0, False)], [below, above], inplace)


def _hardshrink(input: Tensor, lambd: float = 0.5) -> Piecewise:
    return Piecewise(input, [(-lambd, True), (lambd, False)], [_same, _zero, _same])


def _softshrink(input: Tensor, lambd: float = 0.5) -> Piecewise:
    return Piecewise(input, [(-lambd, True), (lambd, False)], [lambda x: x + lambd, _zero, lambda x: x - lambd])


def _clamp(input: Tensor, min: float | Tensor | None = None, max: float | Tensor | None = None) -> Piecewise:
    knots: list[Knot] = []
    branches: list[Branch] = [_same]
    if min is not None:
        knots, branches = [(min, True)], [_constant(min), _same]
    if max is not None:
        knots, branches = [*knots, (max, False)], [*branches, _constant(max)]
    return Piecewise(input, knots, branches)


def _abs(input: Tensor) -> Piecewise:
    return Piecewise(input, [(0.0, True), (0.0, False)], [torch.neg, _zero, _same])


def _maximum(input: Tensor, other: Tensor) -> Piecewise:
    """At a tie torch gives half of the gradient to each."""
    tie = (input + other) / 2
    pieces: list[Branch] = [lambda _: other, lambda _: tie, lambda _: input]
    return Piecewise(input - other, [(0.0, True), (0.0, False)], pieces)


def _minimum(input: Tensor, other: Tensor) -> Piecewise:
    swapped = _maximum(other, input)
    return Piecewise(input - other, swapped.knots, swapped.branches)


def _l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Piecewise:
    return _reduced(_abs(input - target), reduction, size_average, reduce, weight)


def _huber_loss(
    input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0, weight: Tensor | None = None
) -> Piecewise:
    tail = delta * delta / 2
    branches: list[Branch] = [lambda x: -delta * x - tail, lambda x: x * x / 2, lambda x: delta * x - tail]
    return _reduced(Piecewise(input - target, [(-delta, False), (delta, True)], branches), reduction, weight)


def _smooth_l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> Piecewise:
    if beta == 0:
        return _l1_loss(input, target, size_average, reduce, reduction)
    branches: list[Branch] = [lambda x: -x - beta / 2, lambda x: x * x / (2 * beta), lambda x: x - beta / 2]
    kink = Piecewise(input - target, [(-beta, False), (beta, True)], branches)
    return _reduced(kink, reduction, size_average, reduce)


def _reduced(kink: Piecewise, reduction: str, *refused: Any) -> Piecewise:
    if any(option is not None for option in refused):
        raise TypeError("weight, size_average and reduce are not known here")
    reductions: dict[str, Branch] = {"none": _same, "mean": lambda y: y.mean(), "sum": lambda y: y.sum()}
    return Piecewise(kink.x, kink.knots, kink.branches, finish=reductions[reduction])


PIECEWISE: dict[str, Callable[..., Piecewise]] = {
    "relu": _relu,
    "relu6": _relu6,
    "leaky_relu": _leaky_relu,
    "prelu": _prelu,
    "threshold": _threshold,
    "hardtanh": _hardtanh,
    "hardsigmoid": _hardsigmoid,
    "hardswish": _hardswish,
    "elu": _elu,
    "celu": _celu,
    "selu": _selu,
    "hardshrink": _hardshrink,
    "softshrink": _softshrink,
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": lambda input, min: _clamp(input, min=min),
    "clamp_max": lambda input, max: _clamp(input, max=max),
    "abs": _abs,
    "absolute": _abs,
    "maximum": _maximum,
    "minimum": _minimum,
    "l1_loss": _l1_loss,
    "huber_loss": _huber_loss,
    "smooth_l1_loss": _smooth_l1_loss,
}


def _along(input: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, int, bool]:
    return input, dim, keepdim


def _ordered(input: Tensor, k: int, dim: int = -1, *rest: Any, **more: Any) -> tuple[Tensor, int, bool]:
    return input, dim, True


def _sorted(input: Tensor, dim: int = -1, *rest: Any, **more: Any) -> tuple[Tensor, int, bool]:
    return input, dim, True


# functions that give (values, indices): the tensor, the dimension, and whether the result keeps it
CHOICES: dict[str, Callable[..., tuple[Tensor, int, bool]]] = {
    "max": _along,
    "min": _along,
    "topk": _ordered,
    "kthvalue": lambda input, k, dim=-1, keepdim=False: (input, dim, keepdim),
    "sort": _sorted,
}


def _over(input: Tensor, dim: int | Sequence[int] = (), keepdim: bool = False) -> tuple[Tensor, Any, bool]:
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return input, dims or tuple(range(input.ndim)), keepdim


# (max and min over all elements come here by way of CHOICES)
REDUCTIONS: dict[str, Callable[..., tuple[Tensor, Any, bool]]] = {"amax": _over, "amin": _over}

# pooling by its largest element: how many dimensions a window has
WINDOWS = {
    f"{kind}max_pool{n}d{suffix}": n
    for kind in ("", "adaptive_")
    for n in (1, 2, 3)
    for suffix in ("", "_with_indices")
}


def windows(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The pooling that also says which element it took."""
    return getattr(F, name if name.endswith("_with_indices") else f"{name}_with_indices")


# functions whose value is a choice: comparisons, places, roundings, draws
TRUTHS = {"gt", "ge", "lt", "le", "eq", "ne", "greater", "greater_equal", "less", "less_equal", "not_equal"}
TRUTHS |= {f"__{name}__" for name in ("gt", "ge", "lt", "le", "eq", "ne", "bool")}
TRUTHS |= {"argmax", "argmin", "argsort", "searchsorted", "bucketize", "isclose", "allclose", "equal", "isin"}
TRUTHS |= {"any", "all", "logical_and", "logical_or", "logical_not", "logical_xor", "is_nonzero", "signbit"}
TRUTHS |= {"count_nonzero", "round", "floor", "ceil", "trunc", "fix", "sign", "sgn"}
TRUTHS |= {"multinomial", "bernoulli", "poisson", "binomial"}
CASTS = {"to", "type", "type_as", "long", "int", "short", "char", "byte", "bool"}  # where they round

# aten operations with a kink, or a jump, in what they are given
ROUGH = {*PIECEWISE, *CHOICES, *TRUTHS, "amax", "amin", "aminmax"} - {"eq", "ne"}  # guards: a point is not a side
ROUGH |= {f"{kind}max_pool{n}d{s}" for kind in ("", "adaptive_") for n in (2, 3) for s in ("", "_with_indices")}
ROUGH |= {"_prelu_kernel", "rrelu_with_noise", "fmax", "fmin", "median", "nanmedian", "mode", "cummax", "cummin"}
ROUGH |= {"frac", "fmod", "remainder", "heaviside", "copysign", "floor_divide", "nonzero", "histc", "renorm"}
ROUGH |= {"_unique2", "unique_dim", "unique_consecutive", "embedding_renorm", "segment_reduce", "angle", "atan2"}
ROUGH |= {"fractional_max_pool2d", "fractional_max_pool3d", "multi_margin_loss", "multilabel_margin_loss_forward"}
ROUGH |= {"grid_sampler_2d", "grid_sampler_3d", "max_unpool2d", "max_unpool3d", "logit", "nan_to_num"}

# where the order of a norm stands among the arguments
NORMS = {"linalg_vector_norm": 1, "norm": 1, "dist": 2, "_cdist_forward": 2, "_pdist_forward": 1}
REDUCED = {"scatter_reduce", "index_reduce", "_embedding_bag", "div"}  # by an option of theirs


def is_rough(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an aten operation has a kink: norms do below the order 2, reductions by their largest element."""
    if name in NORMS:
        order = args[NORMS[name]] if len(args) > NORMS[name] else None
        return order is not None and not 2 <= float(order) < float("inf")
    if name in REDUCED:
        return any(option in ("amax", "amin", "floor", "trunc", 2) for option in _options(name, args, kwargs))
    if name == "_to_copy":
        dtype = kwargs.get("dtype")
        return dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
    if name == "copy":
        return not (args[0].is_floating_point() or args[0].is_complex())
    return name in ROUGH


def _options(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    found = [x for x in (*args, *kwargs.values()) if isinstance(x, str)]
    return [*found, args[4]] if name == "_embedding_bag" and len(args) > 4 else found


_DISPATCHED = {getattr(F, name): name for name in WINDOWS if hasattr(F, name)}


def function_name(func: Any) -> str:
    """The name of a torch function as its documentation has it."""
    name = str(_DISPATCHED.get(func) or getattr(func, "__name__", ""))
    return name.removeprefix("_") if not name.startswith("__") else name
