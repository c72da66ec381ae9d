"""`python -m benchmarks.flights`: the flight recorder on language models on a GPU, every cost beside its bar.

Two runs, each with two batches of noise in a row, planted at the end: a 51M GPT in float32, and a 124M GPT in bfloat16
with dropout, whose kernels do not repeat to the bit. Training is timed while it is recorded; the verdict is
printed in full, because what a run says of itself is what is tried here.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from rich.console import Console
from torch import Tensor, nn

import aftershock as ak
from aftershock.core.memory import begin_peak, peak_held

from .recording import Language, next_token, recording
from .table import Row, bars

WINDOW = 64
STEPS = 192  # of training before the batches of noise
NOISE = 2  # batches of uniform tokens
AFTER = 20  # steps after them
CLIP = 1.0
UNIT = "× training it"


@dataclass(frozen=True)
class Run:
    """A model, how it is trained, and its bars: before proofs and by default, times the training of its window."""

    name: str
    width: int
    layers: int
    sentences: int
    tokens: int
    vocabulary: int = 50257
    dropout: float = 0.0
    half: bool = False
    before_proofs: float | None = None
    default: float = 20.0

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager:
        return torch.autocast(device.type, torch.bfloat16) if self.half else contextlib.nullcontext()

    def batches(self, device: torch.device) -> Iterator[Tensor]:
        """Words by Zipf's law, each sentence every word twice in a row, so that there is something to learn."""
        draws = torch.Generator().manual_seed(0)
        usual = 1 / torch.arange(1, self.vocabulary + 1, dtype=torch.float64)
        shape = (self.sentences, self.tokens // 2)
        for step in range(STEPS + NOISE + AFTER):
            odd = STEPS <= step < STEPS + NOISE
            weights = torch.ones_like(usual) if odd else usual
            words = torch.multinomial(weights, shape[0] * shape[1], replacement=True, generator=draws).reshape(shape)
            yield words.repeat_interleave(1 if odd else 2, 1).to(device)


RUNS = {
    "51m": Run("51M GPT, float32", 512, 8, 8, 512, before_proofs=6.0),
    "124m": Run("124M GPT, bfloat16, dropout", 768, 12, 8, 512, dropout=0.1, half=True),
}
TRIAL = {
    "51m": Run("tiny GPT, float32", 64, 2, 4, 64, vocabulary=2000, before_proofs=6.0),
    "124m": Run("tiny GPT, bfloat16, dropout", 64, 2, 4, 64, vocabulary=2000, dropout=0.1, half=True),
}


def fly(run: Run, device: torch.device, say: Console) -> list[Row]:
    """Train, record, explain before proofs and by default."""
    torch.manual_seed(0)
    model = Language(run.width, run.layers, run.vocabulary, run.tokens, run.dropout).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        with run.autocast(device):
            return next_token(model, batch)

    times = []
    with tempfile.TemporaryDirectory() as folder:
        with ak.FlightRecorder(model, optimizer, loss_fn, folder, window=WINDOW, clip=CLIP) as recorder:
            for batch in run.batches(device):
                began = time.perf_counter()
                optimizer.zero_grad()
                loss = loss_fn(model, batch)
                loss.backward()
                norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                recorder.step(batch, loss, norm=norm)
                _finish(device)
                times.append(time.perf_counter() - began)
        each = sorted(times)[len(times) // 2]
        quick = {"verify": 0, "placebos": 0, "treatments": False, "examples": 0}
        before, _ = _explained(recorder, device, each, quick)
        default, found = _explained(recorder, device, each, {})
    say.print(f"[bold]{run.name}[/bold], noise at steps {STEPS} to {STEPS + NOISE - 1}:", highlight=False)
    say.print(str(found), highlight=False, markup=False)
    say.print(
        f"before proofs {before.times:.1f}, by default {default.times:.1f} {UNIT}, {default.peak}", highlight=False
    )
    beside = f"{found.data.sizes['place']} steps of {1e3 * each:.0f} ms, recorded"
    grows = "two replays, a sweep of 2–3 g per step, instruments"
    return [
        Row(f"before proofs, {run.name}", before.times, run.before_proofs, UNIT, grows, f"{beside}; {before.peak}"),
        Row(f"by default, {run.name}", default.times, run.default, UNIT, "reruns of the window", default.peak),
    ]


@dataclass(frozen=True)
class Cost:
    times: float
    peak: str


def _explained(
    recorder: ak.FlightRecorder, device: torch.device, each: float, options: dict
) -> tuple[Cost, ak.FlightExplanation]:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        begin_peak(device)
    began = time.perf_counter()
    found = ak.explain(recorder, **options)
    times = (time.perf_counter() - began) / (each * found.data.sizes["place"])
    peak = f"peak {peak_held(device) / 2**30:.0f} GiB" if device.type == "cuda" else ""
    return Cost(times, peak), found


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flights", description=__doc__)
    parser.add_argument("--only", action="append", choices=list(RUNS), help="one run; may be repeated")
    parser.add_argument("--device", default="cuda", help="a CPU takes a tiny model, to try the program")
    options = parser.parse_args()
    device, say = torch.device(options.device), Console(width=140)
    runs = RUNS if device.type == "cuda" else TRIAL
    rows = [row for name in options.only or runs for row in fly(runs[name], device, say)]
    if not options.only and device.type == "cuda":
        rows += recording(device, full=False)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, trial"
    say.print(bars(rows, f"aftershock, {name}, torch {torch.__version__}"))


if __name__ == "__main__":
    main()
