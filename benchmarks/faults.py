"""`python -m benchmarks.faults`: kill −9 at random moments, mutated bytes and truncations, a full or read-only disk.

The truth is the same loop without a recorder. After every fault a flight opens to records that are equal to it, to the
bit, or it is refused with a reason; a step that is lost is said.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

import torch
from torch import Tensor, nn

import aftershock as ak
from aftershock.api.storage import load_captured
from aftershock.errors import AftershockError
from aftershock.recorder.store import Flight, open_flight
from aftershock.recorder.triggers import AtStep

WINDOW, EVERY, AFTER = 8, 4, 3
TRIGGERS = (9, 21)  # the recorded run of the mutations has two windows
STEPS = 26
SECONDS = 0.4  # within which a run is killed
DISK = "400k"


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@dataclass
class Loop:
    """A small run that is the same every time."""

    recorder: ak.FlightRecorder | None = None
    losses: list[float] = field(default_factory=list)
    batches: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)  # before each step

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.model = nn.Linear(20, 20)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=self.generator))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def run(self, steps: int, told: Callable[[int], None] = lambda step: None) -> Loop:
        for step in range(steps):
            x = torch.randn(4, 20, generator=self.generator)
            self.batches.append(x)
            self.weights.append(self.model.weight.detach().clone())
            self.optimizer.zero_grad()
            loss = mean_square(self.model, x)
            loss.backward()
            self.optimizer.step()
            self.losses.append(float(loss.detach()))
            if self.recorder is not None:
                self.recorder.step(x, loss)
                told(step)
        return self


def record(folder: Path, steps: int = STEPS, told: Callable[[int], None] = lambda step: None) -> ak.FlightRecorder:
    loop = Loop()
    triggers = [AtStep(step) for step in TRIGGERS]
    recorder = ak.FlightRecorder(
        loop.model, loop.optimizer, mean_square, folder, window=WINDOW, every=EVERY, after=AFTER, triggers=triggers
    )
    loop.recorder = recorder
    with recorder:
        loop.run(steps, told)
    return recorder


def judge(folder: Path, step: int | None, truth: Loop) -> str:
    """ "equal" or "refused"; anything else is raised."""
    try:
        flight = open_flight(folder, step)
        for number, path in flight.states.items():
            state = load_captured(path, nn.Linear(20, 20), mean_square).state
            at = state.theta[: 20 * 20].reshape(20, 20)
            assert torch.equal(at, truth.weights[number]), f"another state at step {number}"
    except AftershockError:
        return "refused"
    _compare(flight, truth)
    if step is not None:
        assert step in flight.records
    return "equal"


def _compare(flight: Flight, truth: Loop) -> None:
    for number, found in flight.records.items():
        assert found.loss == truth.losses[number], f"another loss at step {number}"
        assert torch.equal(found.fed[0].tensors[0], truth.batches[number]), f"another batch at step {number}"
    numbers = sorted(flight.records)
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    assert flight.run["window"] == WINDOW
    assert flight.trigger in (None, *TRIGGERS)
    whole = flight.trigger if flight.trigger is not None else numbers[-1]
    lost = [number for number in range(max(0, whole - WINDOW), whole + 1) if number not in flight.records]
    assert set(lost) <= set(flight.missing), f"steps {lost} are gone and {flight.missing} are said to be"


# --- bytes


def mutate(path: Path, draw: random.Random) -> str:
    data = bytearray(path.read_bytes())
    kind = draw.choice(["flip", "flip", "byte", "cut", "cut", "longer", "zeros", "gone"])
    at = draw.randrange(len(data))
    if kind == "flip":
        data[at] ^= 1 << draw.randrange(8)
    elif kind == "byte":
        data[at] = draw.randrange(256)
    elif kind == "cut":
        del data[at:]
    elif kind == "longer":
        data += bytes(draw.randrange(1, 100))
    elif kind == "zeros":
        data[at : at + 64] = bytes(len(data[at : at + 64]))
    path.unlink()  # windows and ring share their bytes
    if kind != "gone":
        path.write_bytes(data)
    return kind


def mutations(count: int, folder: Path, seed: int = 0) -> Counter[str]:
    """One file of a recorded flight damaged, `count` times: what is said is refused, or equal to the truth."""
    draw, truth = random.Random(seed), Loop().run(STEPS)
    with quiet():
        record(folder / "whole")
    found: Counter[str] = Counter()
    for i in range(count):
        victim = folder / f"damaged-{i}"
        shutil.copytree(folder / "whole", victim)
        path = draw.choice(sorted(path for path in victim.rglob("*") if path.is_file()))
        kind = mutate(path, draw)
        for step in (None, TRIGGERS[0], TRIGGERS[1], STEPS - 1):
            found[judge(victim, step, truth)] += 1
        assert any(judge(victim, step, truth) == "equal" for step in (TRIGGERS[0], TRIGGERS[1])), (path, kind)
        shutil.rmtree(victim)
    return found


# --- kills


def kills(count: int, folder: Path, seed: int = 0) -> Counter[str]:
    """A run killed −9 at a random moment, `count` times; what it left, and then the next run in the same folder."""
    draw, found = random.Random(seed), Counter[str]()
    truth = Loop().run(2000)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "benchmarks.faults", "--nursery", str(folder)]
    nursery = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    for i in range(count):
        victim = folder / f"killed-{i}"
        for runs in (1, 2):  # the second run finds what the first left
            nursery.stdin.write(f"{victim}\n")
            nursery.stdin.flush()
            child = int(nursery.stdout.readline())
            time.sleep(SECONDS * draw.random())
            os.kill(child, signal.SIGKILL)
            assert nursery.stdout.readline() == "dead\n"
            for folder_of in [victim, *victim.glob("run-*")]:
                found[judge(folder_of, None, truth)] += 1
            assert len(list(victim.glob(".flight-*"))) <= runs
        with quiet():
            after = record(victim)
        assert judge(after.directory, None, truth) == "equal"
        assert not [path for path in victim.rglob(".*") if path.parent.name != after.directory.name]
        shutil.rmtree(victim)
    nursery.stdin.close()
    nursery.wait()
    nursery.stdout.close()
    return found


def _nursery() -> None:
    """Forks a run for each folder that it is told: importing torch a hundred times would take minutes."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder))  # what is imported late is imported once
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            record(Path(line.strip()), steps=2000)
            time.sleep(60)
        print(child, flush=True)
        os.waitpid(child, 0)
        print("dead", flush=True)


# --- the disk


@contextmanager
def mounted(folder: Path, option: str) -> Iterator[Path]:
    """A small disk; needs the right to mount one."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", option, "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def full_disk(folder: Path) -> str:
    """Training goes on when the disk is full, and what was written before is whole."""
    truth = Loop().run(STEPS)
    with mounted(folder / "disk", f"size={DISK}") as disk:
        (disk / "ballast").write_bytes(bytes(300_000))
        with warnings.catch_warnings(record=True) as said, quiet():
            warnings.simplefilter("always")
            recorder = record(disk / "flight")
        assert [w for w in said if "No space left" in str(w.message)], "the disk was not full"
        return judge(recorder.directory, None, truth)


def read_only(folder: Path) -> str:
    """Training goes on where nothing can be written."""
    with mounted(folder / "read-only", "ro") as disk, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        recorder = record(disk / "flight")
        assert [w for w in said if "has stopped, training goes on" in str(w.message)], "nothing was said"
        assert not recorder.recent
    return "said"


@contextmanager
def quiet() -> Iterator[None]:
    with redirect_stderr(StringIO()):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--mutations", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nursery", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("folder", nargs="?", type=Path)
    options = parser.parse_args()
    if options.nursery:
        return _nursery()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(f"{options.mutations} damaged files:", dict(mutations(options.mutations, Path(folder), options.seed)))
        print(f"{options.kills} × 2 kills:", dict(kills(options.kills, Path(folder), options.seed)))
        try:
            print("a full disk:", full_disk(Path(folder)))
            print("a read-only folder:", read_only(Path(folder)))
        except (subprocess.CalledProcessError, FileNotFoundError):
            print("a full disk, a read-only folder: not tried, since no disk can be mounted here")


if __name__ == "__main__":
    main()
