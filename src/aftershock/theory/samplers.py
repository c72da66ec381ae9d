"""Where unknown futures come from: a data loader, past batches, or a process fitted to what was seen."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from ..core.batches import Batch
from ..core.randomness import Randomness, generator_of
from ..core.structure import flatten
from ..errors import InvalidInput

Sampler = Callable[[int, torch.Generator], Sequence[Batch]] | Iterable[Batch]


def sample_futures(sampler: Sampler, count: int, length: int, generator: Randomness = 0) -> list[list[Batch]]:
    """`count` futures of `length` batches each. No gradient.

    sampler: a function of (length, generator) that returns the batches of one future, such as a
        `FittedProcess`; a list of past batches, from which each step draws one at random; or a data loader,
        read on from future to future and begun again at its end, as training reads it.
    generator: draws them; or an integer seed.

    >>> futures = theory.sample_futures(batches[:4], 3, 2)  # three futures of two past batches each
    >>> [len(future) for future in futures]
    [2, 2, 2]
    """
    if count < 1:
        raise InvalidInput(f"at least one future must be sampled; got {count}")
    generator = generator_of(generator)
    if callable(sampler):
        futures = [list(sampler(length, generator)) for _ in range(count)]
    elif isinstance(sampler, Sequence):
        if not sampler:
            raise InvalidInput("the list of past batches is empty; there is nothing to draw futures from")
        draws = torch.randint(len(sampler), (count, length), generator=generator, device=generator.device)
        futures = [[sampler[i] for i in row] for row in draws.tolist()]
    else:
        taken = _read_on(sampler, count * length)
        futures = [taken[i * length : (i + 1) * length] for i in range(count)]
    short = [len(future) for future in futures if len(future) < length]
    if short:
        raise InvalidInput(f"the sampler returned {short[0]} batches for a future of {length}; it must return them all")
    return [future[:length] for future in futures]


def _read_on(loader: Iterable[Batch], total: int) -> list[Batch]:
    taken: list[Batch] = []
    while len(taken) < total:
        more = list(itertools.islice(loader, total - len(taken)))
        if not more:
            raise InvalidInput(
                f"the source of futures ended after {len(taken)} of {total} batches and cannot be begun again; "
                "pass a data loader, or a list of past batches to draw from"
            )
        taken += more
    return taken


@dataclass(frozen=True)
class FittedProcess:
    """x' = μ + φ (x − μ) + σ ε: a first-order process of batches, with one φ and σ for each of a batch's tensors.

    Made by `fit_process`. Called with (length, generator) it samples one future that starts from
    the last batch; a seed will do.

    >>> process = theory.fit_process([inputs for inputs, labels in batches])
    >>> [len(process(2)), len(process.forecast(3))]
    [2, 3]
    """

    last: tuple[Tensor, ...]
    mean: tuple[Tensor, ...]
    persistence: tuple[float, ...]
    innovation: tuple[float, ...]
    structure: TreeSpec

    def __call__(self, length: int, generator: Randomness = 0) -> list[Batch]:
        draw = generator_of(generator)
        return self._future(length, lambda x: torch.randn(x.shape, generator=draw, device=draw.device).to(x))

    def forecast(self, length: int) -> list[Batch]:
        """The expected future: the last batch decays to the mean."""
        return self._future(length, torch.zeros_like)

    def _future(self, length: int, noise: Callable[[Tensor], Tensor]) -> list[Batch]:
        future, now = [], list(self.last)
        for _ in range(length):
            now = [
                mean + phi * (x - mean) + sigma * noise(x)
                for x, mean, phi, sigma in zip(now, self.mean, self.persistence, self.innovation)
            ]
            future.append(self.structure.unflatten(now))
        return future


def fit_process(batches: Sequence[Batch]) -> FittedProcess:
    """Fit a `FittedProcess` by least squares to the batches seen so far, in their order, the latest last.

    Batches are floating-point tensors, or tuples, lists or dicts of them, of the same shapes throughout.

    >>> process = theory.fit_process([torch.tensor([x]) for x in (8.0, 4.0, 2.0, 1.0)])
    >>> round(process.persistence[0], 2)
    0.5
    """
    if len(batches) < 3:
        raise InvalidInput(f"a process is fitted to at least 3 batches in their order; got {len(batches)}")
    leaves, structures = zip(*(flatten(batch) for batch in batches))
    for i, (some, structure) in enumerate(zip(leaves, structures)):
        if not all(isinstance(x, Tensor) and x.is_floating_point() for x in some):
            raise InvalidInput(
                f"batch {i} holds something else than floating-point tensors (labels, tokens, accumulated batches), "
                "for which no process can be fitted; sample futures from a data loader or a list of past batches"
            )
        if structure != structures[0] or [x.shape for x in some] != [x.shape for x in leaves[0]]:
            raise InvalidInput(f"batch {i} has another shape than batch 0; a process needs the same shapes throughout")
    fits = [_fit_tensor(torch.stack(sequence)) for sequence in zip(*leaves)]
    means, persistence, innovation = zip(*fits)
    return FittedProcess(tuple(leaves[-1]), means, persistence, innovation, structures[0])


def _fit_tensor(x: Tensor) -> tuple[Tensor, float, float]:
    """(μ, φ, σ) of one tensor's sequence: μ by element, φ and σ over all elements together."""
    before, after = x[:-1] - x[:-1].mean(0), x[1:] - x[1:].mean(0)
    spread = float(before.square().sum())
    longest = 1 - 1 / len(x)  # a memory longer than the record cannot be told from a trend
    phi = float((before * after).sum()) / spread if spread > 0 else 0.0
    phi = min(max(phi, -longest), longest)
    freedom = (len(after) - 1) * x[0].numel()  # each element's mean was fitted
    return x.mean(0), phi, (float((after - phi * before).square().sum()) / freedom) ** 0.5
