"""Batches are the user's own objects; these are the few things that must be known of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from ..errors import InvalidInput
from .randomness import RandomState
from .structure import flatten, map_leaves

Batch = Any


@dataclass(frozen=True)
class Accumulated:
    """One batch made of micro-batches; made by `accumulate`."""

    batches: tuple[Batch, ...]
    weights: tuple[float, ...] | None = None
    random: tuple[RandomState, ...] | None = None  # before each micro-batch, where it was recorded
    divisor: float | None = None  # of each micro-batch's loss; None: their number

    @property
    def shares(self) -> tuple[float, ...]:
        """Each micro-batch's factor in the whole."""
        divisor = len(self.batches) if self.divisor is None else self.divisor
        return (1 / divisor,) * len(self.batches) if self.weights is None else self.weights

    def micro(self, device: torch.device) -> Iterator[tuple[Batch, Callable[[Tensor], Tensor]]]:
        """Each micro-batch with the map from its loss to its share of the whole; `device` is the model's."""
        for i, batch in enumerate(self.batches):
            if self.random is not None:  # a loader that draws numbers moved it between the micro-batches
                self.random[i].install(device)
            if self.weights is None:
                # a division, as training loops write it: multiplying by 1/n gives other bits
                yield batch, lambda loss: loss / (len(self.batches) if self.divisor is None else self.divisor)
            else:
                yield batch, lambda loss, weight=self.weights[i]: loss * weight  # type: ignore[misc]


def accumulate(
    batches: Iterable[Batch], *, draws: int | None = None, weights: Sequence[float] | None = None
) -> Accumulated:
    """One batch whose loss is the mean of the given batches' losses.

    This is gradient accumulation, and the paper's reference mean: a path whose step holds
    `accumulate(references)` has their mean gradient as its control. With `draws`, that many batches
    are taken from a sampler or data loader: its conditional-mean reading, E[g_t].

    >>> both = ak.accumulate(batches[:2])  # one step with the mean of two gradients
    >>> mean = (loss_fn(model, batches[0]) + loss_fn(model, batches[1])) / 2
    >>> abs(point.follow([both]).losses[0] - mean.item()) < 1e-12
    True
    """
    taken = tuple(itertools.islice(batches, draws))
    if not taken or (draws is not None and len(taken) < draws):
        raise InvalidInput(f"accumulate needs {draws or 'at least one'} batches; the source gave {len(taken)}")
    if weights is not None and len(weights) != len(taken):
        raise InvalidInput(f"{len(weights)} weights for {len(taken)} batches")
    return Accumulated(taken, None if weights is None else tuple(float(w) for w in weights))


def undrawn(batch: Batch) -> Batch:
    """A batch without the random states that were recorded with its micro-batches."""
    return replace(batch, random=None) if isinstance(batch, Accumulated) else batch


def micro_batches(batch: Batch, device: torch.device) -> Iterator[tuple[Batch, Callable[[Tensor], Tensor]]]:
    if isinstance(batch, Accumulated):
        return batch.micro(device)
    return iter([(batch, lambda loss: loss)])


def added(losses: Sequence[Tensor]) -> Tensor:
    """Losses of micro-batches one after another, as a loop adds them: another order has other bits."""
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return total


def example_count(batch: Batch) -> int:
    """How many examples a batch holds: the first dimension of its first tensor."""
    return _count(flatten(batch)[0])


def batch_bytes(batch: Batch) -> int:
    """Of the tensors of a batch; of the largest one where it is made of several."""
    if isinstance(batch, Accumulated):
        return max(map(batch_bytes, batch.batches))
    return sum(leaf.numel() * leaf.element_size() for leaf in flatten(batch)[0] if isinstance(leaf, Tensor))


def _count(leaves: Sequence[Any]) -> int:
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.ndim:
            return leaf.shape[0]
    seen = sorted({type(leaf).__name__ for leaf in leaves})
    raise InvalidInput(
        "a batch of examples needs a tensor whose first dimension counts them, in lists, tuples, dicts or dataclasses; "
        f"this one holds {', '.join(seen) or 'nothing'}"
    )


def take_examples(batch: Batch, index: slice | Tensor) -> Batch:
    """Some examples of a batch, as a batch."""
    size = example_count(batch)
    return map_leaves(lambda x: x[index] if isinstance(x, Tensor) and x.ndim and x.shape[0] == size else x, batch)


def merged_examples(batches: Sequence[Batch], most: int) -> Iterator[tuple[Batch, list[int]]]:
    """Consecutive batches as one of at most `most` examples, where they can stand in one, and how many each has."""
    group: list[_Examples] = []
    for batch in batches:
        own = _Examples.of(batch)
        if group and (sum(each.count for each in group) + own.count > most or not own.joins(group[0])):
            yield _Examples.joined(group)
            group = []
        group.append(own)
    if group:
        yield _Examples.joined(group)


@dataclass(frozen=True)
class _Examples:
    """A batch in its parts, which are looked up once: on a small model that is a part of a pass."""

    leaves: list[Any]
    structure: TreeSpec
    count: int

    @classmethod
    def of(cls, batch: Batch) -> _Examples:
        leaves, structure = flatten(batch)
        return cls(leaves, structure, _count(leaves))

    def joins(self, other: _Examples) -> bool:
        """Whether two batches differ in their examples only."""

        def same(x: Any, y: Any) -> bool:
            if not isinstance(x, Tensor) or not isinstance(y, Tensor):
                return same_value(x, y)
            per_example = x.ndim > 0 and y.ndim > 0 and (len(x), len(y)) == (self.count, other.count)
            return x.dtype == y.dtype and (x.shape[1:] == y.shape[1:] if per_example else torch.equal(x, y))

        return self.structure == other.structure and all(map(same, self.leaves, other.leaves))

    @staticmethod
    def joined(group: Sequence[_Examples]) -> tuple[Batch, list[int]]:
        """The examples of several batches as one batch, and how many each has."""
        first, columns = group[0], zip(*(each.leaves for each in group))
        leaves = [
            torch.cat(column)
            if isinstance(column[0], Tensor) and column[0].ndim and len(column[0]) == first.count
            else column[0]
            for column in columns
        ]
        return first.structure.unflatten(leaves), [each.count for each in group]


def alike(entries: list[Any], batch: Batch) -> bool:
    """Whether a list is a batch like this one, rather than a list of such: its entries are like those of the batch."""

    def kind(entry: Any) -> tuple[TreeSpec, list[type]]:
        leaves, structure = flatten(entry)
        return structure, [type(leaf) for leaf in leaves]

    if not isinstance(batch, list):
        return False
    known = [kind(entry) for entry in batch]
    return bool(entries) and all(kind(entry) in known for entry in entries)


def same_batch(a: Batch, b: Batch) -> bool:
    """Whether two batches hold the same; False where that cannot be told without running them."""
    if a is b:
        return True
    if isinstance(a, Accumulated) and isinstance(b, Accumulated):
        around = a.shares == b.shares and a.weights == b.weights and a.random is b.random
        return around and all(map(same_batch, a.batches, b.batches))
    (one, spec), (other, other_spec) = flatten(a), flatten(b)
    return spec == other_spec and all(map(_same_leaf, one, other))


def _same_leaf(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        plain = all(t.layout == torch.strided and not t.is_nested for t in (x, y))
        return x is y or (plain and x.dtype == y.dtype and torch.equal(x, y.to(x.device)))
    return same_value(x, y)


def same_value(x: Any, y: Any) -> bool:
    """Whether two leaves that are no tensors say that they are equal; an array of answers is no yes, and neither is an
    object that cannot be compared."""
    try:
        return x is y or (type(x) is type(y) and (x == y) is True)
    except Exception:  # a dataclass of tensors: whatever its comparison raises
        return False
