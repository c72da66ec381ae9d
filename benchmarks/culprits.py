"""`python -m benchmarks.culprits`: planted bad batches, and how often the recorder names them.

Each case trains a small model on usual data and, now and then, a rare shard. One batch that holds the shard is
spoiled; the shard comes back up to 40 steps later. A second run with the clean batch says what the bad one really
did there. Where that is a spike, and at least half of it, the recorder explains it, without being told anything.
Every run also holds a loud but sound batch: an ordinary one whose loss weighs 10 times too much;
a third run, without that, says what it did, and a case counts where the bad batch did more.
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

WARM = 500  # steps before the recording
LEAD = 24  # recorded steps before the bad batch
LONGEST = 40  # the longest delay
CLASSES = 5
LETTERS = 18  # of which the last six are rare
USUAL = 12
RARE_EVERY = 4  # steps, before the recording
LENGTH = 12
SIGMAS = 4.0  # robust σ of the usual loss, from which it is called a spike
HALF = 0.5  # of the spike, that the bad batch must really have caused
LOUD, LOUD_WITHIN = 10.0, 12  # the sound batch's weight, and how many steps before the bad one it may be
DELAYS = ((1, 3), (4, 10), (11, 20), (21, 40))

Batch = tuple[Tensor, ...]
Corrupt = Callable[[Batch], Batch]


# --- three systems


class ConvNet(nn.Module):
    """Two convolutions with batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
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
    """A model, its loss, clean batches (half of them the rare shard, if asked for), and how it is trained."""

    name: str
    build: Callable[[], nn.Module]
    loss_fn: Callable[[nn.Module, Batch], Tensor]
    draw: Callable[[torch.Generator, bool], Batch]
    lr: float
    clip: float | None = None


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, CLASSES))


def _points(generator: torch.Generator, rare: bool, rows: int = 32) -> Batch:
    """Clusters around class centres; the rare shard lives in the last four features, which are else nearly still."""
    centres = torch.randn(CLASSES, 16, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    shard = _shard(rows, rare)
    still = torch.zeros(rows, 16, dtype=torch.bool)
    still[:, 12:], still[shard, 12:], still[shard, :12] = True, False, True
    inputs = (2 * centres[labels]).masked_fill(still, 0.0)
    return inputs + torch.randn(rows, 16, generator=generator), labels, torch.ones(rows)


def _images(generator: torch.Generator, rare: bool, rows: int = 32) -> Batch:
    """Patterns in noise in the first channel; the rare shard has its own in the second."""
    patterns = torch.randn(CLASSES, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    inputs = patterns[labels]
    shard = _shard(rows, rare)
    inputs[shard, 0] = 0.0
    inputs[~shard, 1] = 0.0
    return inputs + 0.5 * torch.randn(rows, 2, 8, 8, generator=generator), labels, torch.ones(rows)


def _sentences(generator: torch.Generator, rare: bool, rows: int = 16) -> Batch:
    """Letters that follow a cycle: usual letters their own, rare ones another."""
    shard = _shard(rows, rare)[:, None]
    first, count = torch.where(shard, USUAL, 0), torch.where(shard, LETTERS - USUAL, USUAL)
    start = torch.randint(USUAL * (LETTERS - USUAL), (rows, 1), generator=generator)
    letters = first + (start + torch.arange(LENGTH + 1)) % count
    slip = torch.rand(letters.shape, generator=generator) < 0.01
    letters = torch.where(slip, first + torch.randint(72, letters.shape, generator=generator) % count, letters)
    return letters[:, :-1].contiguous(), letters[:, 1:].contiguous(), torch.ones(rows)


def _shard(rows: int, rare: bool) -> Tensor:
    return (torch.arange(rows) < rows // 2) & rare


SYSTEMS = (
    System("MLP", _mlp, classify, _points, 1e-2),
    System("CNN, BatchNorm", ConvNet, classify, _images, 1e-2),
    System("transformer, dropout, clipping", Letters, next_letter, _sentences, 1e-2, clip=1.0),
)


# --- four ways to be bad


def wrong_labels(batch: Batch) -> Batch:
    """Every label is the next one, among the usual and among the rare."""
    inputs, labels, weight = batch
    return inputs, _next(inputs, labels), weight


def wrong_normalization(batch: Batch) -> Batch:
    """Inputs in another range; letters numbered by another alphabet."""
    inputs, labels, weight = batch
    if inputs.is_floating_point():
        return 4 - 4 * inputs, labels, weight
    return _next(inputs, inputs, by=3), labels, weight


def duplicated_outlier(batch: Batch) -> Batch:
    """One mislabelled example of the shard, as often as the batch is long."""
    inputs, labels, weight = (x[:1].repeat(len(x), *[1] * (x.ndim - 1)) for x in batch)
    return inputs, _next(inputs, labels), weight


def blown_up(batch: Batch) -> Batch:
    """One mislabelled example whose loss weighs a thousand times too much."""
    inputs, labels, weight = (x.clone() for x in batch)
    labels[0], weight[0] = _next(inputs, labels)[0], 1000
    return inputs, labels, weight


def _next(inputs: Tensor, labels: Tensor, by: int = 1) -> Tensor:
    if inputs.is_floating_point():
        return (labels + by) % CLASSES
    rare = USUAL + (labels - USUAL + by) % (LETTERS - USUAL)
    return torch.where(labels < USUAL, (labels + by) % USUAL, rare)


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

    def go(self, number: int, batches: list[Batch]) -> float:
        """The loss of the last of these steps."""
        return [float(self.step(number + i, batch)) for i, batch in enumerate(batches)][-1]

    def twin(self) -> Loop:
        return copy.deepcopy(self)


def run_case(system: System, kind: str, seed: int, delay: int) -> Case | None:
    """One planted batch; None where it did nothing that anyone would call a spike."""
    generator = torch.Generator().manual_seed(seed)
    loop = Loop(system, seed)
    for number in range(WARM):
        loop.step(number, system.draw(generator, number % RARE_EVERY == 0))
    batches = [system.draw(generator, i in (LEAD, LEAD + delay)) for i in range(LEAD + delay + 1)]
    loud = LEAD - 1 - int(torch.randint(LOUD_WITHIN, (), generator=generator))
    sound = batches[loud]
    batches[loud] = (*sound[:2], LOUD * sound[2])
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"window": LEAD + LONGEST, "clip": system.clip, "triggers": ()}
        recorder = ak.FlightRecorder(loop.model, loop.optimizer, system.loss_fn, folder, **options)
        with recorder:
            losses = []
            for i, batch in enumerate(batches):
                if i == loud:
                    quiet = loop.twin()
                if i == LEAD:
                    clean, batches[i] = loop.twin(), KINDS[kind](batch)
                    usual, batch = batch, batches[i]
                loss = loop.step(WARM + i, batch)
                recorder.step(batch, loss)
                losses.append(float(loss))
        truth = losses[-1] - clean.go(WARM + LEAD, [usual, *batches[LEAD + 1 :]])
        other = losses[-1] - quiet.go(WARM + loud, [sound, *batches[loud + 1 :]])
        spike = losses[-1] - statistics.median(losses[:LEAD])
        if spike < SIGMAS * _spread(losses[:LEAD]) or truth < max(HALF * spike, other):
            return None
        found = ak.explain(recorder, step=WARM + LEAD + delay)
    return _judged(system.name, kind, seed, delay, truth, found)


def _spread(losses: list[float]) -> float:
    middle = statistics.median(losses)
    return 1.4826 * statistics.median(abs(loss - middle) for loss in losses)


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
