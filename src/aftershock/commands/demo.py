"""A small real training run with a flight recorder: a loss spike, the batch behind it, and a run that is spared it."""

from __future__ import annotations

import copy
import datetime
import itertools
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..api.progress import duration
from ..errors import MissingPackage
from ..extras import install
from ..recorder.explain import explain
from ..recorder.recorder import FlightRecorder
from ..recorder.triggers import Spike

if TYPE_CHECKING:
    from rich.console import Console

    from ..recorder.explanation import FlightExplanation
    from ..recorder.forecast import Forecast

WIDTH = 100  # columns, where no terminal says otherwise
SIGMAS = 4.0  # robust σ above the usual loss, from which the recorder keeps its window
LINES = 6  # passages of a batch that its page shows
BUMP = 10.0  # times the learning rate, in the last act


@dataclass(frozen=True)
class Size:
    """How much of everything. Numbers of steps after `steps` count from the beginning of the recording."""

    width: int = 48
    blocks: int = 2
    heads: int = 4
    context: int = 32
    batch: int = 32
    steps: int = 300
    warmup: int = 50
    lr: float = 1e-2
    rare_every: int = 8  # steps between batches of dates, before the recording
    rare: tuple[int, ...] = (2, 10)  # and in it
    bad: int = 22
    back: int = 34  # when dates come again
    bump: int = 44
    stop: int = 52
    window: int = 40
    after: int = 3  # recorded steps that belong to a spike: fewer than lie between two of them
    horizon: int = 12
    futures: int = 1
    verify: int = 4


FULL = Size()
QUICK = Size(width=16, context=24, batch=8, steps=60, warmup=10, bad=20, back=24, bump=28, stop=31, horizon=3, verify=2)


# --- the text


@dataclass(frozen=True)
class Text:
    """Python's own language reference and a shard of dates, as numbers, and the generator that draws from them."""

    letters: str
    prose: Tensor
    dates: Tensor
    generator: torch.Generator

    @classmethod
    def of_python(cls, seed: int) -> Text:
        from pydoc_data.topics import topics

        paragraphs = dict.fromkeys(p for name in sorted(topics) for p in topics[name].split("\n\n"))
        prose = "\n\n".join(paragraphs)
        first = datetime.date(1990, 1, 1)
        dates = "".join(f"{first + datetime.timedelta(days)}\n" for days in range(9000))
        letters = "".join(sorted(set(prose + dates)))
        codes = {letter: i for i, letter in enumerate(letters)}
        numbers = [torch.tensor([codes[letter] for letter in text]) for text in (prose, dates)]
        return cls(letters, numbers[0], numbers[1], torch.Generator().manual_seed(seed))

    def draw(self, source: Tensor, size: Size) -> Tensor:
        """Passages of `context` letters and the one after them."""
        starts = torch.randint(len(source) - size.context, (size.batch, 1), generator=self.generator)
        return source[starts + torch.arange(size.context + 1)]

    def misread(self, batch: Tensor) -> Tensor:
        """The same with every digit five too high: a shard that was decoded with the wrong table."""
        digits = torch.tensor([self.letters.index(digit) for digit in "0123456789"])
        table = torch.arange(len(self.letters))
        table[digits] = digits.roll(-5)
        return table[batch]

    def show(self, passage: Tensor) -> str:
        """A passage on one line, spaces and line ends made visible."""
        return "".join(self.letters[code] for code in passage.tolist()).replace(" ", "·").replace("\n", "⏎")

    def describe(self, batch: Tensor) -> str:
        """The first passages of a batch, a line each."""
        return "\n".join(self.show(passage) for passage in batch[:LINES])

    def recorded(self, size: Size) -> Iterator[Tensor]:
        """The batches of the recording, in their order."""
        for step in range(size.stop):
            dates = step in (*size.rare, size.bad, size.back)
            batch = self.draw(self.dates if dates else self.prose, size)
            yield self.misread(batch) if step == size.bad else batch


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


def build() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[nn.Module, Tensor], Tensor]]:
    """The model, optimizer and loss as the demo makes them, for `aftershock explain --build`."""
    model = LetterModel(len(Text.of_python(0).letters), FULL)
    return model, torch.optim.AdamW(model.parameters(), lr=FULL.lr), loss_fn


# --- the run


@dataclass
class Training:
    """A live run, and the loss of each of its steps."""

    model: LetterModel
    optimizer: torch.optim.Optimizer
    losses: list[float]

    def update(self, batch: Tensor) -> Tensor:
        """One step of AdamW, as any loop writes it."""
        loss = loss_fn(self.model, batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        return loss

    def set_rate(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr


def train(text: Text, size: Size) -> Training:
    """From scratch, with a linear warm-up."""
    model = LetterModel(len(text.letters), size)
    run = Training(model, torch.optim.AdamW(model.parameters(), lr=size.lr), [])
    for step in range(size.steps):
        run.set_rate(size.lr * min(1.0, (step + 1) / size.warmup))
        run.update(text.draw(text.prose if step % size.rare_every else text.dates, size))
    return run


@dataclass(frozen=True)
class Flown:
    """What the recorded steps left: a spike's explanation each, and what was known before the bad batch."""

    found: list[FlightExplanation]
    before: Training  # the run as it was before the bad batch
    forecasts: tuple[Forecast, Forecast]  # of an ordinary batch of dates and of the bad one, in its place
    losses: tuple[float, ...] = ()  # of the recorded steps

    @property
    def main(self) -> FlightExplanation:
        """The spike that an earlier batch explains."""
        return next((each for each in self.found if each.kind in ("batch", "group")), self.found[-1])


def run(out: Path, seed: int = 0, quick: bool = False) -> Flown:
    """Train with a recorder, let something go wrong, explain each spike, and spare a second run the culprit.

    `out` receives flight.html (and a page for each other spike), the recorded flights and, where a batch is blamed,
    skip.json. Everything is drawn from `seed`, and the caller's own random state stays as it was. About a minute on one
    core; `quick` is for tests.
    """
    size, out = QUICK if quick else FULL, Path(out)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=out):
        pass  # a folder that cannot be written to is better known before the training than after it
    console, text, start = _console(), Text.of_python(seed), time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        console.print(
            f"Training a transformer on {len(text.prose):,} letters of Python's language reference, with a batch of "
            f"dates now and then: {size.steps} steps, then {size.stop} with a flight recorder."
        )
        training = train(text, size)
        batches = list(text.recorded(size))
        flown = _fly(training, batches, text, size, out)
        losses = list(flown.losses)
        console.print(f"\n{_story(text, size, batches, losses)}\n\n{_found(flown, _pages(flown, out))}", soft_wrap=True)
        console.print(f"\nCould it have been known before?\n{_indented(spared(flown, batches, size, losses))}")
    skips = "Nobody is blamed, so that there is no list of batches to skip."
    if flown.main.skip:
        skips = f"The batches to skip: {flown.main.save_skip_list(out / 'skip.json')}."
    console.print(
        f"\n{skips} All of this took {duration(time.perf_counter() - start)}. "
        f"A spike again, as you would type it for a run of yours:\n  aftershock explain {out / 'flight'} --step "
        f"{flown.main.facts.event.explained} --build aftershock.commands.demo:build",
        soft_wrap=True,
    )
    return flown


def _fly(training: Training, batches: list[Tensor], text: Text, size: Size, out: Path) -> Flown:
    """The recorded steps, and what explains their spikes."""
    with FlightRecorder(
        training.model,
        training.optimizer,
        loss_fn,
        out / "flight",
        window=size.window,
        after=size.after,
        triggers=[Spike("loss", SIGMAS)],
    ) as recorder:
        for step, batch in enumerate(batches):
            if step == size.bad:
                before = copy.deepcopy(training)
                ordinary = batches[size.rare[-1]]
                good, bad = (
                    recorder.forecast(b, horizon=size.horizon, futures=size.futures) for b in (ordinary, batch)
                )
            if step == size.bump:
                training.set_rate(BUMP * size.lr)
            recorder.step(batch, training.update(batch))
    found = [explain(flight, verify=size.verify, describe=text.describe) for flight in recorder.flights]
    found = found or [explain(recorder, step=size.steps + size.back, verify=size.verify, describe=text.describe)]
    return Flown(found, before, (good, bad), tuple(training.losses[size.steps :]))


def _pages(flown: Flown, out: Path) -> list[str]:
    """A page for each spike; none where the package that writes them is missing."""
    try:
        return [
            str(each.report(out / ("flight.html" if each is flown.main else f"step-{each.facts.event.explained}.html")))
            for each in flown.found
        ]
    except MissingPackage:
        return []


# --- the words: every number in them is taken from the run


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, emoji=False, width=WIDTH)


def _indented(text: str, first: str = "  ") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent="  ", break_long_words=False)


def _story(text: Text, size: Size, batches: list[Tensor], losses: list[float]) -> str:
    """What went wrong, and what the loss did."""
    good, bad = (text.show(batches[step][0][:22]) for step in (size.rare[0], size.bad))
    usual = losses[size.rare[-1]]
    lines = [
        "What happened",
        f"  loss at steps {size.steps} to {size.steps + size.stop - 1}  {_bars(losses)}",
        f"  step {size.steps + size.bad}  a batch of dates was decoded with the wrong table: {bad} for dates such as "
        f"{good}; loss {losses[size.bad]:.3g}",
        f"  step {size.steps + size.back}  sound dates come back; loss {losses[size.back]:.3g} (dates had "
        f"{usual:.3g} at step {size.steps + size.rare[-1]})",
        f"  step {size.steps + size.bump}  the learning rate rises {BUMP:g}-fold; loss up to "
        f"{max(losses[size.bump :]):.3g}",
    ]
    return "\n".join(lines)


def _bars(losses: list[float]) -> str:
    """One bar for each step, from the smallest loss to the largest."""
    low, high = min(losses), max(losses)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (loss - low) / (high - low or 1))] for loss in losses)


def _found(flown: Flown, pages: list[str]) -> str:
    """A verdict for each spike, and the page that shows why."""
    blocks = ["What was found, each by running the recorded steps again"]
    for each, page in itertools.zip_longest(flown.found, pages):
        blocks.append(_indented(each.verdict, f"  step {each.facts.event.explained}: "))
        blocks += [f"    → {page}"] if page else []
    blocks.append(_indented(str(flown.main.certificate).splitlines()[0]))
    if not pages:
        blocks.append(f"  Each would have a page with its charts: {install('report')}")
    return "\n".join(blocks)


def spared(flown: Flown, batches: list[Tensor], size: Size, losses: list[float]) -> str:
    """What the recorder would have said before the bad batch, and the run in which it was listened to."""
    good, bad = (forecast.largest_increase for forecast in flown.forecasts)
    text = (
        f"Asked before step {size.steps + size.bad}, the recorder's forecast for this batch was {bad:+.2g} of loss at "
        f"most, {flown.forecasts[1].peak_horizon} states later; for an ordinary batch of dates, {good:+.2g}."
    )
    if not flown.forecasts[1].harmful(3 * abs(good)):
        return f"{text} That is no reason to skip it."
    again = flown.before
    for batch in batches[size.bad + 1 : size.back + 1]:
        again.update(batch)
    return (
        f"{text} A second run skips it: there the loss at step {size.steps + size.back} is {again.losses[-1]:.3g}, "
        f"not {losses[size.back]:.3g}."
    )
