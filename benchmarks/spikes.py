"""`python -m benchmarks.spikes`: spikes that happen by themselves, and whether what is said about them is true.

Small models at hot learning rates, or with --gpu language models of 30M on a GPU; independent batches, nothing
planted; the recorder's own trigger says what is a spike. The truth comes from plain torch: the run without each of the
steps, and with each treatment. A sentence is true if a blamed step removes half of the event and at most a third of all
steps do so too, or if the treatment that it names prevents the event.

Windows and truths are kept in a folder, with the text and the images that they were made with, and are not computed
again. Only what explains is under test.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shutil
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import aftershock as ak
from aftershock.recorder.triggers import Spike

from .spike_runs import AFTER, GPU_KINDS, KINDS, WINDOW, Data, Loop, Window, find
from .spike_truth import HALF, Event, by_luck, clip_as_said, names_treatment, truth, without
from .timing import clock_of

THIRD = 1 / 3
FEW = 3  # steps that can each be called the one that did it
TRIED = r"lr halved \d|Adam restarted [18]|(beta2 .*|clip|stable) 8"  # what an explanation tries by itself
PLACEBOS = 12  # groups drawn to judge a blamed group
BATCHES = ("batch", "group", "own batch")
LUCK = "that is luck"  # of treatments that prevent the event, and not from one rounding away


@dataclass(frozen=True)
class Said:
    """What an explanation says, as far as it can be true or false."""

    kind: str
    blamed: tuple[int, ...]
    treatment: str | None
    hyperparameter: str | None
    verdict: str

    @classmethod
    def of(cls, found: Any) -> Said:
        return cls(found.kind, tuple(found.blamed), found.treatment, found.hyperparameter, found.verdict)


@dataclass(frozen=True)
class Judged:
    """One window: its truth, what was said, whether that is so, and what it cost in times of training the window."""

    window: str
    run: str
    size: float  # of the event's peak, in σ
    share: float  # of steps whose removal removes half
    guilty: list[int]  # those steps, where they are few enough to be specific
    prevented_by: list[str]
    said: Said
    true: bool
    cost: float


# --- recording and judging


def recorded(loop: Loop, window: Window, folder: Path) -> ak.FlightRecorder:
    """The window's steps again, with a recorder."""
    options = {"window": WINDOW, "after": AFTER, "triggers": [Spike("loss")]}
    with ak.FlightRecorder(loop.model, loop.optimizer, loop.kind.loss, folder, **options) as recorder:
        for number in range(window.start, window.last + 1):
            batch, loss = loop.backward(number)
            loop.update(number)
            recorder.step(batch, loss)
            same = float(loss) == window.losses[number - window.start]
            assert same or not window.repeats, "the recorded run is another one"
    return recorder


def judge(said: Said, window: Window, loop: Loop, facts: dict[str, Any]) -> bool:
    """Is the sentence true?"""
    prevents = {name for name, cure in facts["treatments"].items() if cure["prevents"]}
    if said.kind in BATCHES:
        return bool(said.blamed) and specific(said.blamed, window, loop, facts)
    if said.kind == "instability" and said.treatment is not None:
        mostly = {name for name, cure in facts["treatments"].items() if cure["mostly"]}
        named = any(names_treatment(said.treatment, name) for name in mostly)
        return named or clip_as_said(said.treatment, window, loop)
    if said.kind in ("instability", "unknown"):  # that nobody did it, and that nothing of what was tried prevents it
        tried = [name for name in prevents if re.fullmatch(TRIED, name)]
        if LUCK in said.verdict:
            return bool(tried) and not guilty(facts) and all(by_luck(window, loop, name) for name in tried)
        return not tried and not guilty(facts)
    return False  # nothing was planted: no shift, no wrong setting; and every window holds a spike of finite losses


def guilty(facts: dict[str, Any]) -> list[int]:
    """Steps to blame: few, without which less than half of the event is left, and less than half of what is left
    without nine in ten of the others. Where more than a few remove half, or where leaving out many a step makes another
    event of it, larger, smaller or elsewhere, no batch did it."""
    left = {int(n): value for n, value in facts["left"].items()}
    if sum(value <= HALF for value in left.values()) > FEW:
        return []
    kept = statistics.mean(
        HALF < value < 1 / HALF and departs <= HALF for value, departs in zip(left.values(), facts["departs"].values())
    )
    others = sorted(left.values())[len(left) // 10]
    removing = [n for n, value in left.items() if value <= HALF * min(1.0, max(others, HALF))]
    return removing if kept >= 1 - THIRD else []


def specific(blamed: tuple[int, ...], window: Window, loop: Loop, facts: dict[str, Any]) -> bool:
    """Does leaving these steps out remove half of the event, and leaving out others not?"""
    if len(blamed) == 1:
        return facts["left"].get(str(blamed[0]), math.inf) <= HALF and facts["share"] <= THIRD
    event, draw = Event.of(window.by_step, window.trigger), random.Random(0)
    others = [n for n in range(window.start, window.trigger + 1) if n not in blamed]
    groups = [blamed, *(tuple(draw.sample(others, len(blamed))) for _ in range(PLACEBOS))]
    runs = [without(loop.twin(), window.start, window.last, group) for group in groups]
    left = [max(event.left(losses), event.sooner(window.by_step, losses)) <= HALF for losses in runs]
    return left[0] and statistics.mean(left[1:]) <= THIRD


def examine(window: Window, cache: Path, data: Data) -> Judged:
    facts = known_truth(window, cache, data)
    trained = [_training(window, cache, data) for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        recorder = recorded(window.loop(cache, data), window, Path(folder))
        clock = clock_of(_device(window))
        began = clock()
        said = Said.of(ak.explain(recorder, step=window.trigger))
        spent = clock() - began
    trained += [_training(window, cache, data) for _ in range(2)]
    true = judge(said, window, window.loop(cache, data), facts)
    prevented_by = [name for name, cure in facts["treatments"].items() if cure["prevents"]]
    size = facts["event"]["peak"] / facts["event"]["sigma"]
    share, cost = facts["share"], spent / statistics.median(trained)
    return Judged(window.name, window.kind, size, share, guilty(facts), prevented_by, said, true, cost)


def _training(window: Window, cache: Path, data: Data) -> float:
    """Seconds of the window's steps in a plain loop: CPU time, or on a GPU wall time."""
    clock, loop = clock_of(_device(window)), window.loop(cache, data)
    began = clock()
    without(loop, window.start, window.last, [])
    return clock() - began


def _device(window: Window) -> torch.device:
    return torch.device("cpu" if window.repeats else "cuda")


def known_truth(window: Window, cache: Path, data: Data) -> dict[str, Any]:
    path = cache / f"{window.name}.facts.json"
    if not path.is_file():
        path.write_text(json.dumps(truth(window, window.loop(cache, data)), indent=1))
    return json.loads(path.read_text())


# --- the table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spikes", description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path("spikes"), help="where windows and truths are kept")
    parser.add_argument("--each", type=int, default=4, help="windows of each kind of run")
    parser.add_argument("--only", help="kinds of runs whose name holds this")
    parser.add_argument("--text", type=Path, help="a text for the language models; default: a made-up one")
    parser.add_argument("--data", type=Path, help="cifar10.npz for the others; default: made-up images")
    parser.add_argument("--gpu", action="store_true", help="30M language models on a GPU, on the whole of --text")
    parser.add_argument("--tokenizer", type=Path, help="for these: a tokenizer.json; default: bytes")
    parser.add_argument("--truth", action="store_true", help="stop before anything is explained")
    parser.add_argument("--out", type=Path, help="write every window as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.cache.mkdir(parents=True, exist_ok=True)
    given = {"text.txt": options.text, "images.npz": options.data, "tokenizer.json": options.tokenizer}
    data = Data.read(*(_kept(options.cache / name, path) for name, path in given.items()))
    began, console = time.perf_counter(), Console(width=200)
    kinds = [kind for kind in (GPU_KINDS if options.gpu else KINDS) if not options.only or options.only in kind.name]
    windows, facts = list[Window](), list[dict[str, Any]]()
    for kind in kinds:
        for window in find(kind, options.each, data, options.cache):
            windows.append(window)
            facts.append(known_truth(window, options.cache, data))
            print(f"{window.name}: step {window.trigger}; {time.perf_counter() - began:.0f} s", flush=True)
    console.print(truths(windows, facts))
    if options.truth:
        return
    judged = list[Judged]()
    for window in windows:
        judged.append(examine(window, options.cache, data))
        if options.out:
            options.out.write_text(json.dumps([asdict(one) for one in judged], indent=1, ensure_ascii=False))
    console.print(verdicts(judged))
    right, costs = sum(one.true for one in judged), [one.cost for one in judged]
    console.print(
        f"{right} of {len(judged)} verdicts are true; explaining cost {statistics.median(costs):.1f} × training the "
        f"window (median; most {max(costs):.1f}); {time.perf_counter() - began:.0f} s."
    )


def _kept(place: Path, given: Path | None) -> Path | None:
    """A file that the windows of this folder depend on: copied beside them, so that it stays the same."""
    if given is not None and not place.is_file():
        if any(place.parent.glob("*.json")):
            raise SystemExit(f"{place.parent} holds windows that were made without {given}; take another --cache")
        shutil.copyfile(given, place)
    return place if place.is_file() else None


def truths(windows: list[Window], facts: list[dict[str, Any]]) -> Table:
    """What is so, before anybody explains it."""
    share = statistics.median(fact["share"] for fact in facts)
    none = sum(not guilty(fact) for fact in facts)
    table = Table(
        title=f"{len(windows)} spikes: {share:.0%} of the steps remove half (median); no step to blame in {none}"
    )
    table.add_column("treatment")
    table.add_column("prevents", justify="right")
    counts = Counter(name for fact in facts for name, cure in fact["treatments"].items() if cure["prevents"])
    for name in facts[0]["treatments"] | dict(counts):
        table.add_row(name, str(counts[name]))
    return table


def verdicts(judged: list[Judged]) -> Table:
    table = Table(title="spikes that happened by themselves")
    columns = ("window", "event, σ", "steps that remove half", "specific", "treatments that prevent it", "said")
    for name in (*columns, "blamed", "treatment", "true?", "cost ×"):
        table.add_column(name)
    for one in judged:
        blamed = ", ".join(map(str, one.said.blamed))
        table.add_row(
            one.window, f"{one.size:.0f}", f"{one.share:.0%}", ", ".join(map(str, one.guilty)),
            str(len(one.prevented_by)), one.said.kind, blamed, one.said.treatment or "",
            "yes" if one.true else "NO", f"{one.cost:.0f}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
