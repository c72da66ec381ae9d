"""Every reduction over the flat vector: dot products, norms, counts, comparisons.

Nothing else looks at all coordinates at once, so that a model sharded over several devices needs sums over
ranks here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

COUNTED = 2**24  # truths that are summed at once
GLANCE = 2**14  # coordinates that are looked at before others


def products(a: Float[Tensor, "*n param"], b: Float[Tensor, "*k param"]) -> Float[Tensor, "*n *k"]:
    """⟨a_i, b_j⟩ for every row of a with every row of b; a single vector counts as no dimension."""
    return a @ (b.mT if b.ndim > 1 else b)


def each_with(rows: Float[Tensor, "*rows param"], one: Float[Tensor, " param"]) -> Float[Tensor, "*rows"]:
    """⟨x_i, y⟩ of every row, each by itself: a matrix product rounds by the number of its rows, and what a row is does
    not depend on how many are carried with it."""
    return products(rows, one) if rows.ndim == 1 else torch.stack([each_with(row, one) for row in rows])


def paired(a: Float[Tensor, "*rows param"], b: Float[Tensor, "*rows param"]) -> Float[Tensor, "*rows"]:
    """⟨a_i, b_i⟩ of every row with its own."""
    return torch.linalg.vecdot(a, b)


def norms(x: Float[Tensor, "*rows param"]) -> Float[Tensor, "*rows"]:
    """‖x_i‖ of every row."""
    return torch.linalg.vector_norm(x, dim=-1)


def norm(x: Float[Tensor, "..."], dtype: torch.dtype | None = None) -> Float[Tensor, ""]:
    """‖x‖ of one vector, or of one parameter in its own shape."""
    return torch.linalg.vector_norm(x, dtype=dtype)


def joint_norm(tensors: Sequence[Tensor]) -> Float[Tensor, ""]:
    """The norm of several vectors as one: θ, m and v, or a gradient by parameter."""
    return norm(torch.stack([norm(x) for x in tensors]))


def apart(a: Float[Tensor, "..."], b: Float[Tensor, "..."]) -> float:
    """‖a − b‖ / ‖b‖."""
    return float(norm(a - b)) / max(float(norm(b)), 1e-300)


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of one gradient given by parameter, summed as `torch.nn.utils.clip_grad_norm_` does, to the bit."""
    return torch.nn.utils.get_total_norm(tensors)


class TotalNorm:
    """`total_norm` of one gradient after another, the same bits in fewer calls.

    On a GPU torch makes a tensor for the norm of each parameter, and putting hundreds of them together one by one costs
    the CPU as much as taking them: here they are copied at once into memory that is kept.
    """

    def __init__(self) -> None:
        self._norms = torch.empty(0)
        self._places: list[Tensor] = []

    @torch.no_grad()
    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        if set(map(type, tensors)) != {Tensor} or len({tensor.dtype for tensor in tensors}) > 1:
            return total_norm(tensors)  # in which their order is another
        norms = torch._foreach_norm(list(tensors))
        return norm(self._together(norms) if norms[0].is_cuda else torch.stack(norms))  # a CPU copies one by one

    def _together(self, norms: tuple[Tensor, ...]) -> Tensor:
        """As `torch.stack` has them, until the next time."""
        first = norms[0]
        if (len(norms), first.dtype, first.device) != (len(self._places), self._norms.dtype, self._norms.device):
            self._norms = torch.empty(len(norms), dtype=first.dtype, device=first.device)
            self._places = list(self._norms.unbind())
        torch._foreach_copy_(self._places, norms)
        return self._norms


def row_norms(tensors: Sequence[Float[Tensor, "row ..."]]) -> Float[Tensor, " row"]:
    """The same for many gradients at once, one tensor `[row, *shape]` per parameter."""
    return torch.stack([torch.linalg.vector_norm(t.flatten(1), dim=1) for t in tensors]).norm(dim=0)


def parts(a: Float[Tensor, " param"], b: Float[Tensor, " param"], sizes: Sequence[int]) -> Float[Tensor, " parameter"]:
    """⟨a, b⟩ split into the stretches of the given sizes, one per parameter."""
    return torch.stack([torch.dot(x, y) for x, y in zip(a.split(sizes), b.split(sizes))])


def mean(x: Float[Tensor, "..."]) -> Float[Tensor, ""]:
    """Of all coordinates, or of those of one parameter."""
    return x.mean()


def fitted(rows: Float[Tensor, "row param"], one: Float[Tensor, " param"]) -> Float[Tensor, " param"]:
    """The combination of the rows that comes closest to one vector, by least squares."""
    found: Tensor = torch.linalg.lstsq(rows.mT, one[:, None]).solution[:, 0] @ rows
    return found


def largest(x: Float[Tensor, "..."]) -> float:
    """max |x_i|; 0 of nothing."""
    return float(x.abs().max()) if x.numel() else 0.0


def nonzero(x: Float[Tensor, "row param"]) -> Bool[Tensor, " row"]:
    """Which rows are not zero everywhere. On a CPU a row is read only as far as its first stretch that is not."""
    if x.device.type != "cpu":
        return x.any(dim=1)
    return torch.tensor([any(bool(part.any()) for part in row.split(GLANCE)) for row in x], dtype=torch.bool)


def finite(x: Float[Tensor, "..."]) -> bool:
    """Is every coordinate a number?"""
    return bool(torch.isfinite(x).all())


def goes_on(loss: Tensor | float, norm: Tensor | float) -> list[bool]:
    """Is the loss of a step a number, and the norm of its gradient? Where not, a run ends, row by row: the one place
    that decides so, since ranks must decide alike. One wait for a GPU."""
    return [bool(ok) for ok in torch.as_tensor(loss + norm).isfinite().reshape(-1).tolist()]


def count(mask: Bool[Tensor, " param"]) -> int:
    """How many coordinates are marked. The padding is never marked by a mask of values that differ from zero.

    In parts, since a GPU sums truths as integers of eight bytes each.
    """
    return int(torch.stack([part.count_nonzero() for part in mask.split(COUNTED)]).sum())


def marked(mask: Bool[Tensor, " param"]) -> Int64[Tensor, " coordinate"]:
    """Which coordinates are marked. On a CPU by NumPy, which finds them nine times as fast."""
    return torch.from_numpy(mask.numpy().nonzero()[0]) if mask.device.type == "cpu" else mask.nonzero()[:, 0]


def outside(x: Float[Tensor, " param"], low: float, high: float) -> Int64[Tensor, " coordinate"]:
    """Where x lies outside of an interval. On a CPU NumPy compares four times as fast."""
    values = x.numpy() if x.device.type == "cpu" else x
    return marked(torch.as_tensor((values < low) | (values > high)))


def equal(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, coordinate by coordinate."""
    return a is b or torch.equal(a, b)


def gradients_apart(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> float:
    """‖a − b‖ / (‖a‖ + ‖b‖) of gradients given by parameter: 0 where they have the same bits, 1 where other parameters
    have one."""
    if same_bits(a, b):
        return 0.0
    if any((x is None) != (y is None) for x, y in zip(a, b)):
        return 1.0
    pairs = [(x, y) for x, y in zip(a, b) if x is not None and y is not None]
    sizes = sum(joint_norm(list(some)) for some in zip(*pairs))
    return float(joint_norm([x - y for x, y in pairs]) / sizes)


def same_bits(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> bool:
    """The same for gradients given by parameter, `None` where there is none."""
    return all(x is y if x is None or y is None else torch.equal(x, y) for x, y in zip(a, b))
