"""A small real training run, one bad batch, what it does later, and how it is found again."""

from __future__ import annotations

import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .api.point import capture
from .report.html import write_response_page

if TYPE_CHECKING:
    from rich.console import Console

    from .api.path import Path as FollowedPath
    from .api.ranking import Ranking
    from .api.response import Response

CLIP = 1.0
WIDTH = 100  # columns, where no terminal says otherwise
BAD = "all digits"


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    width: int = 64
    blocks: int = 2
    heads: int = 4
    context: int = 64
    batch: int = 48
    steps: int = 800
    warmup: int = 100
    peak_lr: float = 2e-3
    last_lr: float = 3e-4
    horizon: int = 24
    probe: int = 64
    pool: int = 32
    rank_horizon: int = 12


FULL = Size()
QUICK = Size(width=16, context=32, batch=8, steps=80, warmup=10, horizon=8, probe=16, pool=6, rank_horizon=4)


# --- the text


@dataclass(frozen=True)
class Text:
    """Python's own language reference as numbers, and the generator that batches are drawn with."""

    letters: str
    train: Tensor
    held_out: Tensor
    generator: torch.Generator

    @classmethod
    def of_python(cls, seed: int) -> Text:
        from pydoc_data.topics import topics

        # Topics quote each other: without repeats, the last tenth is text that training never sees.
        paragraphs = dict.fromkeys(p for name in sorted(topics) for p in topics[name].split("\n\n"))
        text = "\n\n".join(paragraphs)
        letters = "".join(sorted(set(text)))
        codes = torch.tensor([letters.index(letter) for letter in text])
        cut = len(codes) * 9 // 10
        return cls(letters, codes[:cut], codes[cut:], torch.Generator().manual_seed(seed))

    def draw(self, source: Tensor, rows: int, context: int) -> Tensor:
        """`rows` passages of `context` letters and the one after them."""
        starts = torch.randint(len(source) - context, (rows, 1), generator=self.generator)
        return source[starts + torch.arange(context + 1)]

    def show(self, passage: Tensor) -> str:
        """A passage on one line, spaces and line ends made visible."""
        return "".join(self.letters[code] for code in passage.tolist()).replace(" ", "·").replace("\n", "⏎")


# --- the model


class Block(nn.Module):
    """Causal attention, then an MLP, each after a LayerNorm and added to its input."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.read, self.write = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.read(self.norm1(x)).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.write(seen.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class LetterModel(nn.Module):
    """A transformer that predicts the next letter."""

    def __init__(self, letters: int, size: Size) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(letters, size.width), nn.Embedding(size.context, size.width)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.place.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.blocks)), nn.LayerNorm(size.width))
        self.head = nn.Linear(size.width, letters, bias=False)

    def forward(self, letters: Tensor) -> Tensor:
        return self.head(self.blocks(self.token(letters) + self.place.weight))


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


# --- the run


@dataclass(frozen=True)
class Trained:
    """What training leaves: the live run, and the loss of each step."""

    model: LetterModel
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    losses: list[float]


def train(text: Text, size: Size, console: Console) -> Trained:
    """AdamW with warm-up, cosine decay and clipping, from scratch."""
    model = LetterModel(len(text.letters), size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.peak_lr)
    floor = size.last_lr / size.peak_lr

    def factor(step: int) -> float:
        decay = 0.5 * (1 + math.cos(math.pi * min(1.0, step / size.steps)))
        return min(1.0, (step + 1) / size.warmup) * (floor + (1 - floor) * decay)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    console.print(f"{'step':>6}  {'loss':>6}  {'seconds':>7}")
    start, losses = time.perf_counter(), []
    for step in range(1, size.steps + 1):
        loss = loss_fn(model, text.draw(text.train, size.batch, size.context))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if step == 1 or step % (size.steps // 8) == 0:
            console.print(f"{step:>6}  {losses[-1]:>6.3f}  {time.perf_counter() - start:>7.1f}")
    return Trained(model, optimizer, scheduler, losses)


def run(out: Path, seed: int = 0, quick: bool = False) -> Response:
    """Train, follow, replace one batch by a bad one, rank it in a pool; print it all and write the page.

    `out` receives report.html and response.zarr. Everything is drawn from `seed`, and the caller's own
    random state stays as it was. About a minute on two cores; `quick` is for tests.
    """
    size, out = QUICK if quick else FULL, Path(out)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=out):
        pass  # a folder that cannot be written to is better known before the training than after it
    console, text = _console(), Text.of_python(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        console.print(f"Training a small transformer on {len(text.train):,} letters of Python's language reference.\n")
        trained = train(text, size, console)
        path, probe, bad = _follow(text, size, trained)
        batches = _side_by_side(text, path.steps[0].batch, bad)
        story = _story(size, trained)
        console.print("", story[-1], "", sep="\n")
        console.print(batches, soft_wrap=True)
        response = _respond(text, path, probe, bad, console)
        ranking = _rank(text, size, path, probe, bad, console)
    response.save(out / "response.zarr")
    page = write_response_page(
        response,
        out / "report.html",
        title="One bad batch in a small training run",
        story=[*story, batches, effect(response), found(ranking)],
    )
    console.print(f"\nThe page with the curves: {page}", soft_wrap=True)
    return response


def _follow(text: Text, size: Size, trained: Trained) -> tuple[FollowedPath, Tensor, Tensor]:
    """The run from here on, the passages to watch, and the bad batch."""
    future = [text.draw(text.train, size.batch, size.context) for _ in range(size.horizon)]
    point = capture(trained.model, trained.optimizer, loss_fn)
    path = point.follow(future, lr=trained.scheduler, clip=CLIP)
    probe = text.draw(text.held_out, size.probe, size.context)
    digits = torch.tensor([text.letters.index(digit) for digit in "0123456789"])
    return path, probe, digits[torch.randint(10, future[0].shape, generator=text.generator)]


def _respond(text: Text, path: FollowedPath, probe: Tensor, bad: Tensor, console: Console) -> Response:
    """The bad batch, and ordinary ones to compare it with, in the place of the first."""
    rows, context = len(bad), bad.shape[1] - 1
    changes = {f"ordinary {i}": text.draw(text.train, rows, context) for i in (1, 2, 3)} | {BAD: bad}
    response = path.replace(list(changes.values()), at=0).response(probe, labels=list(changes))
    console.print("", response.verdict, "", sep="\n", style="bold")
    console.print(response.table(), soft_wrap=True)
    console.print("", effect(response), "", "How far to trust this:", str(response.certificate), sep="\n")
    return response


def _rank(text: Text, size: Size, path: FollowedPath, probe: Tensor, bad: Tensor, console: Console) -> Ranking:
    """The bad batch hidden in a pool of ordinary ones."""
    pool = {f"pool {i}": text.draw(text.train, size.batch, size.context) for i in range(1, size.pool + 1)}
    names = list(pool)
    names.insert(size.pool // 3, BAD)
    ranking = path.rank(
        [pool.get(name, bad) for name in names], probe, horizon=size.rank_horizon, verify=3, labels=names
    )
    console.print(f"\nThe same batch hidden in a pool of {size.pool} other ordinary ones:\n")
    console.print(str(ranking))
    console.print("", found(ranking), sep="\n")
    return ranking


# --- the words: every number in them is taken from the run


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, emoji=False, width=WIDTH)


def _side_by_side(text: Text, usual: Tensor, bad: Tensor) -> str:
    """The first lines of both batches, as the model sees them."""
    return "\n".join(
        ["the batch it had:", *(f"  {text.show(row)}" for row in usual[:3]), "the bad batch:"]
        + [f"  {text.show(row)}" for row in bad[:3]]
    )


def _story(size: Size, trained: Trained) -> list[str]:
    """How the run was made, and what is changed in it."""
    count = sum(parameter.numel() for parameter in trained.model.parameters())
    recent = trained.losses[-size.steps // 20 :]
    return [
        f"A transformer with {count:,} parameters learns to predict the next letter of Python's language "
        f"reference. In {size.steps:,} steps of AdamW, with warm-up, cosine decay and gradients clipped at {CLIP:g}, "
        f"its training loss goes from {trained.losses[0]:.2f} to {sum(recent) / len(recent):.2f} "
        f"(mean of the last {len(recent)} steps).",
        f"Then it trains on for {size.horizon} batches, again and again from the same weights and moments. Only "
        "the first batch differs: its own, three ordinary ones, and one of nothing but random digits. What is watched "
        f"is the loss on {size.probe} passages that training never sees.",
    ]


def effect(response: Response) -> str:
    """When the bad batch acts, and how it compares with ordinary ones."""
    exact = response.exact.isel(scale=0)
    bad, ordinary = exact.sel(change=BAD), exact.drop_sel(change=BAD)
    peak = bad.isel(horizon=int(abs(bad).argmax("horizon")))
    h, first = int(peak["horizon"]), float(bad[0])
    if h == 1:
        when = f"The effect of '{BAD}' is largest at once, {first:+.2g}."
    else:
        ratio = f", {abs(float(peak) / first):.2g} times as much" if first else ""
        when = (
            f"In the first state after '{BAD}' the loss differs by {first:+.2g}; {h} states after it, by "
            f"{float(peak):+.2g}{ratio}."
        )
    return f"{when} The largest effect of an ordinary batch is {float(abs(ordinary).max()):.2g}."


def found(ranking: Ranking) -> str:
    """Where the ranking puts the bad batch."""
    place, count = ranking.order.index(BAD) + 1, len(ranking.order)
    text = f"Before any rerun, one adjoint sweep puts '{BAD}' at rank {place} of {count}."
    if ranking.verified is None:
        return text
    peaks = ranking.verified.summary["peak"].sel({"method": "exact", "scale": 1.0})
    measured = ", ".join(f"{float(peak):.2g} ('{peak['change'].item()}')" for peak in peaks)
    return f"{text} Rerun exactly, the first {len(peaks)} have peaks of {measured}."
