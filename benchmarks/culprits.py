"""`python -m benchmarks.culprits`: planted bad batches, and how often the recorder names them.

Each case trains a small model, feeds it one bad batch at a known step, and trains on. A second run with the clean
batch in its place says what the bad one really did. Where that is a spike, the recorder explains the loss at a
step up to 40 later, without being told anything.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import aftershock as ak

WARM = 300  # steps before the recording
LEAD = 24  # recorded steps before the bad batch
LONGEST = 40  # the longest delay
CLASSES = 5
LETTERS = 12
LENGTH = 12
SIGMAS = 4.0  # robust σ of the usual loss, from which the truth is called a spike
DELAYS = ((1, 3), (4, 10), (11, 20), (21, 40))

Batch = tuple[Tensor, ...]
Corrupt = Callable[[Batch, torch.Generator], Batch]


# --- three systems


class ConvNet(nn.Module):
    """Two convolutions with batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Letters(nn.Module):
    """A causal transformer of two blocks with dropout."""

    def __init__(self, width: int = 24, dropout: float = 0.1) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(LETTERS, width), nn.Embedding(LENGTH, width)
        block = {"nhead": 2, "dim_feedforward": 48, "dropout": dropout, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(width, activation="gelu", **block) for _ in range(2)])
        self.head = nn.Linear(width, LETTERS)

    def forward(self, letters: Tensor) -> Tensor:
        x = self.token(letters) + self.place.weight[: letters.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(letters.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def classify(model: nn.Module, batch: Batch) -> Tensor:
    inputs, labels, weight = batch
    return (F.cross_entropy(model(inputs), labels, reduction="none") * weight).mean()


def next_letter(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets, weight = batch
    losses = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="none")
    return (losses.view_as(targets).mean(1) * weight).mean()


@dataclass(frozen=True)
class System:
    """A model, its loss, clean batches, and how it is trained."""

    name: str
    build: Callable[[], nn.Module]
    loss_fn: Callable[[nn.Module, Batch], Tensor]
    draw: Callable[[torch.Generator], Batch]
    lr: float
    clip: float | None = None


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, CLASSES))


def _centres(*shape: int) -> Tensor:
    return 1.5 * torch.randn(CLASSES, *shape, generator=torch.Generator().manual_seed(0))


def _points(centres: Tensor, generator: torch.Generator, rows: int = 32) -> Batch:
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    return centres[labels] + torch.randn(rows, *centres.shape[1:], generator=generator), labels, torch.ones(rows)


def _sentences(generator: torch.Generator, rows: int = 16) -> Batch:
    """Letters that usually follow a fixed cycle."""
    letters = torch.randint(LETTERS, (rows, 1), generator=generator)
    for _ in range(LENGTH):
        step = torch.where(torch.rand(rows, 1, generator=generator) < 0.95, 1, 5)
        letters = torch.cat([letters, (letters[:, -1:] + step) % LETTERS], 1)
    return letters[:, :-1].contiguous(), letters[:, 1:].contiguous(), torch.ones(rows)


SYSTEMS = (
    System("MLP", _mlp, classify, lambda g: _points(_centres(16), g), 3e-3),
    System("CNN, BatchNorm", ConvNet, classify, lambda g: _points(_centres(1, 8, 8) * 0.5, g), 3e-3),
    System("transformer, dropout, clipping", Letters, next_letter, _sentences, 3e-3, clip=1.0),
)


# --- four ways to be bad


def wrong_labels(batch: Batch, generator: torch.Generator) -> Batch:
    inputs, labels, weight = batch
    return inputs, (labels + 1) % (labels.max() + 1), weight


def wrong_normalization(batch: Batch, generator: torch.Generator) -> Batch:
    """Images in another range; letters of another alphabet's numbering."""
    inputs, labels, weight = batch
    if inputs.is_floating_point():
        return inputs * 6 + 4, labels, weight
    return (inputs * 7 + 3) % LETTERS, labels, weight


def duplicated_outlier(batch: Batch, generator: torch.Generator) -> Batch:
    """One odd, mislabelled example, as often as the batch is long."""
    inputs, labels, weight = batch
    one = inputs[:1] * 4 if inputs.is_floating_point() else inputs[:1].flip(1)
    wrong = (labels[:1] + 2) % (labels.max() + 1)
    return (
        one.repeat(len(inputs), *[1] * (inputs.ndim - 1)),
        wrong.repeat(len(labels), *[1] * (labels.ndim - 1)),
        weight,
    )


def blown_up(batch: Batch, generator: torch.Generator) -> Batch:
    """A loss weight that is a thousand times too large."""
    inputs, labels, weight = batch
    return inputs, labels, weight * 1000


KINDS: dict[str, Corrupt] = {
    "wrong labels": wrong_labels,
    "wrong normalization": wrong_normalization,
    "duplicated outlier": duplicated_outlier,
    "gradient blow-up": blown_up,
}


# --- one case


@dataclass(frozen=True)
class Case:
    """What was planted, what it did, and what was said about it."""

    system: str
    kind: str
    seed: int
    delay: int
    truth: float  # the loss, less that of the run with the clean batch
    spike: float
    rank: int  # of the planted step, after verification; 1 is first
    predicted_rank: int  # before it
    norm_rank: int  # by gradient norm
    previous: bool  # is it the batch before?
    predicted: float
    measured: float
    verdict: str


class Loop:
    """The training loop; every step's dropout is seeded by its number."""

    def __init__(self, system: System, seed: int) -> None:
        torch.manual_seed(seed)
        self.system, self.model = system, system.build()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=system.lr)

    def step(self, number: int, batch: Batch) -> Tensor:
        torch.manual_seed(number)
        self.optimizer.zero_grad()
        loss = self.system.loss_fn(self.model, batch)
        loss.backward()
        if self.system.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.system.clip)
        self.optimizer.step()
        return loss.detach()

    def twin(self) -> Loop:
        return copy.deepcopy(self)


def run_case(system: System, kind: str, seed: int, wanted: int) -> Case | None:
    """One planted batch; None where it did nothing that anyone would call a spike."""
    generator = torch.Generator().manual_seed(seed)
    loop = Loop(system, seed)
    for number in range(WARM):
        loop.step(number, system.draw(generator))
    batches = [system.draw(generator) for _ in range(LEAD + LONGEST + 1)]
    bad = KINDS[kind](batches[LEAD], generator)
    with tempfile.TemporaryDirectory() as folder:
        options = {"window": LEAD + LONGEST, "clip": system.clip, "triggers": ()}
        recorder = ak.FlightRecorder(loop.model, loop.optimizer, system.loss_fn, folder, **options)
        with recorder:
            losses, clean = [], []
            for i, batch in enumerate(batches):
                if i == LEAD:
                    other = loop.twin()
                fed = bad if i == LEAD else batch
                loss = loop.step(WARM + i, fed)
                recorder.step(fed, loss)
                losses.append(float(loss))
                if i >= LEAD:
                    clean.append(float(other.step(WARM + i, batch)))
        delay = _spike(losses, clean, wanted)
        if delay is None:
            return None
        found = ak.explain(recorder, step=WARM + LEAD + delay)
    return _judged(system.name, kind, seed, delay, losses[LEAD + delay] - clean[delay], found)


def _spike(losses: list[float], clean: list[float], wanted: int) -> int | None:
    """The delay nearest to the wanted one at which the bad batch really makes a spike."""
    middle = statistics.median(losses[:LEAD])
    sigma = 1.4826 * statistics.median(abs(loss - middle) for loss in losses[:LEAD])
    high = [
        d
        for d in range(1, LONGEST + 1)
        if losses[LEAD + d] - clean[d] > SIGMAS * sigma and losses[LEAD + d] - middle > SIGMAS * sigma
    ]
    return min(high, key=lambda d: abs(d - wanted), default=None)


def _judged(system: str, kind: str, seed: int, delay: int, truth: float, found: Any) -> Case:
    planted = WARM + LEAD
    order = [culprit.step for culprit in found.culprits]
    steps = found.data["step"].values
    predicted = found.data["contribution"].sel(change="replace").sum("channel").values
    norms = found.data["norm"].values
    guilty = found.culprits[order.index(planted)]

    def place(values: Any) -> int:
        return [int(steps[i]) for i in (-values).argsort()].index(planted) + 1

    return Case(
        system, kind, seed, delay, truth, found.size,
        order.index(planted) + 1, place(predicted), place(norms), delay == 1,
        guilty.predicted, guilty.measured, found.verdict,
    )  # fmt: skip


def cases(count: int, seed: int = 0) -> Iterator[Case | None]:
    """Systems and kinds in turn, wanted delays spread over 1 … 40."""
    pairs = [(system, kind) for system in SYSTEMS for kind in KINDS]
    for i in range(count):
        system, kind = pairs[i % len(pairs)]
        yield run_case(system, kind, seed + i, 1 + (i * 7 + i // len(pairs) * 11) % LONGEST)


# --- the table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.culprits", description=__doc__)
    parser.add_argument("--cases", type=int, default=144, help="planted batches; those that do nothing are left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write every case as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began, found, nothing = time.perf_counter(), [], 0
    for case in cases(options.cases, options.seed):
        if case is None:
            nothing += 1
        else:
            found.append(case)
    if options.out:
        options.out.write_text(json.dumps([asdict(case) for case in found], indent=1))
    console = Console(width=150)
    title = f"{len(found)} planted culprits ({nothing} more did no harm), {time.perf_counter() - began:.0f} s"
    console.print(ranks(found, title))
    console.print(errors(found))


def ranks(found: list[Case], title: str) -> Table:
    table = Table(title=title)
    for name in ("", "cases", "top 1", "top 3", "top 1 unverified", "top 1 by norm", "top 3 by norm", "batch before"):
        table.add_column(name, justify="right" if name else "left")
    groups: dict[str, list[Case]] = {"all": found}
    for key in ("system", "kind"):
        for case in found:
            groups.setdefault(getattr(case, key), []).append(case)
    for low, high in DELAYS:
        groups[f"delay {low}–{high}"] = [case for case in found if low <= case.delay <= high]
    for name, some in groups.items():
        if some:
            rows = [
                [case.rank <= 1 for case in some], [case.rank <= 3 for case in some],
                [case.predicted_rank <= 1 for case in some],
                [case.norm_rank <= 1 for case in some], [case.norm_rank <= 3 for case in some],
                [case.previous for case in some],
            ]  # fmt: skip
            table.add_row(name, str(len(some)), *(f"{statistics.mean(row):.0%}" for row in rows))
    return table


def errors(found: list[Case]) -> Table:
    """Predicted against measured contribution of the planted step, by delay."""
    table = Table(title="predicted against replayed contribution of the planted batch")
    for name in ("delay", "cases", "median relative error", "same sign", "within 20 %"):
        table.add_column(name, justify="right")
    for low, high in DELAYS:
        some = [c for c in found if low <= c.delay <= high and math.isfinite(c.measured)]
        if some:
            off = [abs(c.predicted - c.measured) / abs(c.measured) for c in some]
            same = [(c.predicted > 0) == (c.measured > 0) for c in some]
            within = [error <= 0.2 for error in off]
            table.add_row(
                f"{low}–{high}", str(len(some)), f"{statistics.median(off):.0%}",
                f"{statistics.mean(same):.0%}", f"{statistics.mean(within):.0%}",
            )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
