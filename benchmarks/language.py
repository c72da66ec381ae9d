"""`python -m benchmarks.language`: GPT-NeoX on one GPU, every cost beside its bar.

Float32 without TF32, fresh weights, random tokens with a Zipf distribution, batch 1 × 128. g is the same model's plain
gradient by torch, measured in turns with the rest. A row that fails says why, and the next one runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path as FilePath

import torch
import xarray  # noqa: F401  (aftershock loads it with its first result, which is not what is timed)
from rich.console import Console
from torch import Tensor, nn

import aftershock as ak
from aftershock.api.ranking import Ranking
from aftershock.core.footprint import measured as metered
from aftershock.core.graphs import GradientGraph
from aftershock.core.memory import begin_peak, free, keep_freed, peak_held, readable
from aftershock.core.planning import Plan
from aftershock.core.playback import Player
from aftershock.core.responses import ANSWERS
from aftershock.core.state import Tangent
from aftershock.errors import OutOfMemory

from .models import BATCH_SIZE, System, cnn_system, mlp_system
from .table import Row, Skipped, bars
from .timing import Work, clock_of, cycled, interleave, quiet

STEPS = 8  # of a path, and horizons
CHANGES = 8
TOKENS = 128
POOL = 256
BURN_IN = 60  # steps before the capture: earlier, most of v is young and every write is stiff
ROUNDS = 3
LIMIT_GIB = 75  # of the row about peak memory, whatever the card has
CPU_LIMIT = 2**31  # the same for the trial on a CPU
MOST_FREE = 0.85  # of the free memory, where a row asks for more than the default
SLOW = 4.0  # seconds from which a work is timed once
ERROR_LENGTH = 300  # characters of an error that are shown
SLACK = 2**30  # what the allocator and the card's libraries take beside the plan
SMALL_HORIZONS = 12
SMALL_POOL, EXAMPLE_BATCHES = 1000, 157  # 157 batches of 64 are 10,048 examples
TRIAL_POOL, TRIAL_EXAMPLE_BATCHES = 32, 4  # on a CPU
OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "fused": True}

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Size:
    """A GPT-NeoX configuration, how many vectors its batched products take, and its bars by row."""

    layers: int
    hidden: int
    heads: int
    inner: int
    vocabulary: int
    vectors: int
    bars: dict[str, float]


SIZES = {
    "tiny": Size(2, 64, 4, 256, 1000, 8, {}),
    "160m": Size(12, 768, 12, 3072, 50304, 8, {}),
    "410m": Size(24, 1024, 16, 4096, 50304, 8, {"follow": 1.1, "exact": 0.4, "products": 0.9, "rank": 1.3}),
    "1.4b": Size(
        24, 2048, 16, 8192, 50304, 4, {"follow": 1.1, "exact": 0.9, "products": 2.1, "seconds": 45, "GiB": LIMIT_GIB}
    ),
}
ESTIMATE_BAR, SMALL_RANK_BAR, EXAMPLES_BAR, FIRST_BAR = 0.2, 0.5, 4.0, 5.0


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch, labels=batch["input_ids"], use_cache=False).loss


def neox(size: Size, device: torch.device) -> nn.Module:
    """Fresh weights from a seed, made on the device: a CPU would take minutes."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        num_hidden_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        intermediate_size=size.inner,
        vocab_size=size.vocabulary,
        rotary_pct=0.25,
        max_position_embeddings=2048,
        attn_implementation="eager",
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return GPTNeoXForCausalLM(config).train()


def token_batches(count: int, vocabulary: int, device: torch.device, seed: int) -> list[Batch]:
    """1 × 128 random tokens, their frequencies by Zipf's law."""
    generator = torch.Generator().manual_seed(seed)
    weights = 1 / torch.arange(1, vocabulary + 1, dtype=torch.float64)
    drawn = torch.multinomial(weights, count * TOKENS, replacement=True, generator=generator).view(count, 1, TOKENS)
    return [{"input_ids": ids.to(device), "attention_mask": torch.ones_like(ids, device=device)} for ids in drawn]


class Run:
    """A live run, trained a little, the point captured from it, and batches.

    What is live leaves when no later row needs it: the optimizer's state and .grad after the row that trains, the
    model after the last row that times g.
    """

    def __init__(self, name: str, device: torch.device, together: bool) -> None:
        self.name, self.size, self.device = name, SIZES[name], device
        self.model: nn.Module = neox(self.size, device)
        self.optimizer: torch.optim.Optimizer | None = torch.optim.AdamW(self.model.parameters(), **OPTIONS)
        self.data = token_batches(2 * STEPS + CHANGES, self.size.vocabulary, device, seed=1)
        self.path_batches, self.candidates = self.data[:STEPS], self.data[STEPS : STEPS + CHANGES]
        self.probe = self.data[-1]
        self.train(token_batches(BURN_IN, self.size.vocabulary, device, seed=2))
        self.point = ak.capture(self.model, self.optimizer, loss_fn)
        self.point.loss.sharing.wanted |= together
        self.vector = self.point.loss.layout.padded_size * self.point.loss.layout.dtype.itemsize
        self.check_seconds = math.nan

    def train(self, batches: Sequence[Batch]) -> None:
        """The loop that a user would write."""
        assert self.optimizer is not None, "the live optimizer is gone"
        for batch in batches:
            self.optimizer.zero_grad(set_to_none=True)
            loss_fn(self.model, batch).backward()
            self.optimizer.step()

    def gradient(self, i: int) -> tuple[Tensor, ...]:
        """g: one plain gradient, without aftershock."""
        return torch.autograd.grad(loss_fn(self.model, self.data[i]), list(self.model.parameters()))

    def g(self, calls: int = 4) -> Work:
        return Work(cycled(self.gradient, len(self.data)), calls)

    def drop_optimizer(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
            self.optimizer = None
            emptied(self.device)

    def drop_everything(self) -> None:
        """Only the captured point stays."""
        self.drop_optimizer()
        self.__dict__.pop("path", None)
        self.model = nn.Identity()
        emptied(self.device)

    def follow(self, memory: int | None = None) -> ak.Path:
        """A path whose Hessian products are proved, once for all paths that start with its first batch."""
        path = self.point.follow(self.path_batches, memory=memory)
        clock = clock_of(self.device)
        began = clock()
        path.check()
        if math.isnan(self.check_seconds):
            self.check_seconds = clock() - began
        return path

    @cached_property
    def path(self) -> ak.Path:
        return self.follow()

    def bar(self, row: str) -> float | None:
        return self.size.bars.get(row)

    def describe(self) -> str:
        return f"NeoX {self.name} ({self.point.loss.layout.size / 1e6:,.1f} M)"


def planned(change: ak.Change, probe: Batch, answers: Sequence[str], memory: int | None) -> Plan:
    """How the work is cut to fit."""
    return change._plan(change._watch(probe, None), (1.0,), answers, memory)


def emptied(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def together(point: ak.TrainingPoint) -> str:
    """Which kinds of work ran in rows, so that a silent fall-back is seen."""
    sharing, player = point.loss.sharing, point.loss.player
    recorded = f"{player.recordings} recordings in {len(player.lanes)} lanes"
    if not sharing.wanted:
        return "rows not wanted together here"
    found = sharing._agreed
    lists = {
        "together": [kind for kind, agreed in found.items() if agreed],
        "ALONE": [kind for kind, agreed in found.items() if not agreed],
    }
    parts = [f"{word}: {', '.join(kinds)}" for word, kinds in lists.items() if kinds]
    return "; ".join(parts or ["no kind compared yet"]) + f"; at once ≤ {sharing.at_once}; {recorded}"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


# --- one function per row -------------------------------------------------------------------------


def follow(run: Run, bandwidth: float) -> Iterator[Row]:
    """The control against plain training of the same steps."""
    works = {
        "plain": Work(lambda: run.train(run.path_batches)),
        "ours": Work(lambda: run.point.follow(run.path_batches)),
        "g": run.g(),
    }
    times = interleave(works, ROUNDS + 2, run.device)
    step, g = times.seconds("plain") / STEPS, times.seconds("g")
    kept = run.point.follow(run.path_batches).trajectory
    note = (
        f"a plain step {milliseconds(step)}, g {milliseconds(g)}; keeps {kept.keep}, one of {kept.spacing}; AdamW "
        f"moves 7 vectors of {readable(run.vector)}: {7 * run.vector / bandwidth / g:.2f} g at the copy's speed"
    )
    yield Row(
        f"follow, {STEPS} steps: {run.describe()}",
        times.ratio(lambda t: t["ours"] / t["plain"]),
        run.bar("follow"),
        "× plain training",
        "H gradients and AdamW steps",
        note,
    )


def exact(run: Run, bandwidth: float) -> Iterator[Row]:
    """Reruns of every change; where the default budget cuts them, with more of what is free as well."""
    run.drop_optimizer()
    change = run.path.replace(run.candidates)
    chunks = change.estimate(run.probe, answers=("exact",)).chunks
    yield _exact(run, change, None)
    if chunks > 1:
        emptied(run.device)
        yield _exact(run, change, int(MOST_FREE * free(run.device)) + run.point.loss.player.nbytes)


def _exact(run: Run, change: ak.Change, memory: int | None) -> Row:
    def ours() -> object:
        return change.response(run.probe, answers=("exact",), memory=memory)

    chunks = change.estimate(run.probe, answers=("exact",), memory=memory).chunks
    times = interleave({"ours": Work(ours), "g": run.g()}, rounds_for(ours, run.device), run.device, warm=False)
    budget = "" if memory is None else f" with memory={readable(memory)}"
    return Row(
        f"exact rows, {CHANGES} changes × {STEPS} horizons, per row and step{budget}: {run.describe()}",
        times.ratio(lambda t: t["ours"] / (CHANGES * STEPS) / t["g"]),
        run.bar("exact"),
        "g",
        "N gradients at the step, then N·H rows with the probe",
        f"{times.seconds('ours'):.2f} s in all, g {milliseconds(times.seconds('g'))}; {chunks} chunk(s); "
        f"check took {run.check_seconds:.1f} s; {together(run.point)}",
    )


def rounds_for(work: Callable[[], object], device: torch.device) -> int:
    """Runs the work once, which warms it, and says how often to time it."""
    clock = clock_of(device)
    with quiet():
        began = clock()
        work()
        return ROUNDS if clock() - began < SLOW else 1


def products(run: Run, bandwidth: float) -> Iterator[Row]:
    """Hessian products on one graph, the graph beside them."""
    run.drop_optimizer()
    run.__dict__.pop("path", None)
    emptied(run.device)
    vectors = random_rows(run, run.size.vectors)
    state, random = run.point.captured.state, run.point.captured.random

    def build() -> GradientGraph:
        return GradientGraph(run.point.loss, state.theta, state.buffers, run.data[0], random, "step")

    graph = build()
    works = {
        "products": Work(lambda: graph.products(vectors)),
        "graph": Work(build, 2),
        "g": run.g(),
    }
    times = interleave(works, ROUNDS, run.device)
    count = len(vectors)
    whole = times.ratio(lambda t: (t["products"] + t["graph"]) / count / t["g"])
    yield Row(
        f"Hessian products, each of {count} on one graph: {run.describe()}",
        times.ratio(lambda t: t["products"] / count / t["g"]),
        run.bar("products"),
        "g",
        "products; the graph beside them",
        f"graph {times.ratio(lambda t: t['graph'] / t['g']):.2f} g; with the graph {whole:.2f} g each; "
        f"g {milliseconds(times.seconds('g'))}; {together(run.point)}",
    )


def random_rows(run: Run, count: int) -> Tensor:
    """Rows of the flat vector, drawn on the device; the padding stays zero."""
    generator = torch.Generator(run.device).manual_seed(2)
    rows = run.point.loss.layout.zeros(count)
    for view in run.point.loss.layout.row_views(rows):
        view.normal_(generator=generator)
    return rows


def elementwise(run: Run, bandwidth: float) -> Iterator[Row]:
    """AdamW's own part of a predicted step, against moving its bytes once."""
    run.drop_optimizer()
    run.__dict__.pop("path", None)
    emptied(run.device)
    linear, rows = run.point.follow(run.path_batches[:1]).control(0).linear, 2
    dx, u = Tangent(*(random_rows(run, rows) * 1e-6 for _ in range(3))), random_rows(run, rows) * 1e-6
    moved = (7 * rows + 4) * run.vector  # four rows read and three written; g, m, v and ĝ are shared
    works = {
        "tangent": Work(lambda: linear.absorb_(dx, u)),
        "semilinear": Work(lambda: linear.absorb_exactly_(dx, u, None)),
    }
    if run.optimizer is None and not isinstance(run.model, nn.Identity):
        works["g"] = run.g()
    times = interleave(works, ROUNDS, run.device)
    for name in ("tangent", "semilinear"):
        each = times.seconds(name) / rows
        share = f", {each / times.seconds('g'):.2f} g" if "g" in works else ""
        yield Row(
            f"AdamW's part of a {name} step, {rows} rows: {run.describe()}",
            times.seconds(name) * bandwidth / moved,
            None,
            "× its traffic",
            "rows × parameters",
            f"{milliseconds(each)} a row{share}",
        )


def rank(run: Run, bandwidth: float) -> Iterator[Row]:
    """Many batches scored at one outcome against their gradients."""
    run.drop_optimizer()
    pool = token_batches(POOL, run.size.vocabulary, run.device, seed=3)
    path, found = run.path, list[Ranking]()
    with quiet():
        path.rank(pool[:48], run.probe, by="response", verify=3)  # every kind of work compared, once
    works = {
        "ours": Work(lambda: found.append(path.rank(pool, run.probe, by="response", verify=3))),
        "g": run.g(16),
    }
    times = interleave(works, 2, run.device, warm=False)
    ranking = found[-1].data
    yield Row(
        f"{POOL} batches ranked at one outcome: {run.describe()}",
        times.ratio(lambda t: t["ours"] / (POOL * t["g"])),
        run.bar("rank"),
        f"× {POOL} g",
        "N gradients, a sweep, 3 reruns",
        f"{times.seconds('ours'):.2f} s; stiff share {float(ranking['stiff_share']):.2e}; held-out error "
        f"{float(ranking['held_out_error']):.2g}; {together(run.point)}",
    )


def answers(run: Run, bandwidth: float) -> Iterator[Row]:
    """All three answers within a fixed memory, beside nothing but the captured point: no pass is recorded yet."""
    run.drop_everything()
    run.point.loss.player = Player(run.point.loss.layout, wanted=run.point.loss.player.wanted)
    short = run.point.follow(run.path_batches, memory=run.point.captured.state.nbytes)  # keeps its first state alone
    emptied(run.device)
    there = torch.cuda.memory_allocated(run.device) if run.device.type == "cuda" else 0
    limit = LIMIT_GIB * 2**30 - there - SLACK if run.device.type == "cuda" else CPU_LIMIT
    path = ak.Path(run.point, short.trajectory, limit)
    path.check()
    change = path.replace(run.candidates)
    emptied(run.device)
    clock = clock_of(run.device)
    try:
        estimate, refused = change.estimate(run.probe, memory=limit), ""
    except OutOfMemory as error:  # measured all the same, with what there is
        refused = f"; {readable(limit)} REFUSED: {first_line(error)}"
        limit = int(MOST_FREE * free(run.device))
        estimate = change.estimate(run.probe, memory=limit)
    plan = planned(change, run.probe, ANSWERS, limit)
    emptied(run.device)
    with quiet():
        recorded = run.point.loss.player.nbytes
        began = clock()
        peak = recorded + peak_of(lambda: change.response(run.probe, memory=limit), run.device)
        seconds = clock() - began
    work = f"exact, semilinear and tangent, {CHANGES} × {STEPS}"
    passes = " + ".join(
        f"{'/'.join(each.answers)} {each.at_once} at once{' (parked)' if each.parked else ''}" for each in plan.passes
    )
    note = f"{estimate.chunks} chunk(s): {passes}; {together(run.point)}{refused}"
    grows = "N·H rows and 2·N·H products"
    yield Row(f"{work}: {run.describe()}", seconds, run.bar("seconds"), "s", grows, note)
    gib = (there + peak) / 2**30
    note = f"{readable(there)} there before, budget {readable(limit)}, estimate {readable(estimate.memory)}"
    yield Row(f"peak memory of the same: {run.describe()}", gib, run.bar("GiB"), "GiB", grows, note)
    ratio = (recorded + estimate.memory) / peak
    note = (
        f"estimate {readable(estimate.memory)}, recorded {readable(recorded)}, real {readable(peak)}: {ratio:.2f} ×; "
        f"said {estimate.seconds:.1f} s"
    )
    yield Row(
        f"estimate of the peak, off by: {run.describe()}", abs(ratio - 1), ESTIMATE_BAR, "of the real one", "", note
    )


def peak_of(work: Callable[[], object], device: torch.device) -> int:
    """Bytes at the peak, beside what was there before."""
    if device.type != "cuda":
        return metered(work)[0]
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    begin_peak(device)
    work()
    torch.cuda.synchronize(device)
    return peak_held(device) - before


# --- small models ---------------------------------------------------------------------------------


def small(device: torch.device, shared: bool) -> Iterator[Row]:
    """The paper's networks: a thousand batches at 12 horizons, and ten thousand examples at one."""
    pool, examples, rounds = SMALL_POOL, EXAMPLE_BATCHES, ROUNDS
    if device.type == "cpu":
        pool, examples, rounds = TRIAL_POOL, TRIAL_EXAMPLE_BATCHES, 1
    for make in (mlp_system, cnn_system):
        system = make(device)
        system.point.loss.sharing.wanted |= shared
        path = system.point.follow(system.batches(SMALL_HORIZONS))
        path.check()
        yield _small_rank(system, path, system.batches(pool), rounds)
        yield _small_examples(system, path, system.batches(examples), rounds)


def _small_rank(system: System, path: ak.Path, pool: Sequence[tuple[Tensor, Tensor]], rounds: int) -> Row:
    found, count = list[Ranking](), len(pool)
    works = {
        "ours": Work(lambda: found.append(path.rank(pool, system.probe))),
        "g": Work(cycled(system.gradient, len(system.data)), max(1, count // 5)),
    }
    times = interleave(works, rounds, system.device)
    return Row(
        f"{count:,} batches ranked at {SMALL_HORIZONS} horizons: {system.name}",
        times.ratio(lambda t: t["ours"] / (count * t["g"])),
        SMALL_RANK_BAR,
        f"× {count:,} g",
        "1 g per batch + a sweep of H²/2 products",
        f"{times.seconds('ours'):.2f} s, g {milliseconds(times.seconds('g'))}; stiff share "
        f"{float(found[-1].data['stiff_share']):.2e}; {together(system.point)}",
    )


def _small_examples(system: System, path: ak.Path, pool: Sequence[tuple[Tensor, Tensor]], rounds: int) -> Row:
    count = len(pool)
    works = {
        "ours": Work(lambda: path.rank_examples(pool, system.probe)),
        "forward": Work(cycled(system.forward, len(system.data)), count),
    }
    times = interleave(works, rounds, system.device)
    return Row(
        f"{BATCH_SIZE * count:,} examples ranked at one outcome: {system.name}",
        times.ratio(lambda t: t["ours"] / (count * t["forward"])),
        EXAMPLES_BAR,
        "forward passes",
        "forward-mode passes over the pool + a sweep of H products",
        f"{times.seconds('ours'):.2f} s, a forward pass of a batch {milliseconds(times.seconds('forward'))}",
    )


# --- the first answer -----------------------------------------------------------------------------


def first(size: str, device: torch.device, shared: bool) -> Iterator[Row]:
    """A fresh process: its first answer against a later one."""
    code = f"from benchmarks.language import first_answer; first_answer({size!r}, {device.type!r}, {shared})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"the fresh process failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    yield Row(
        f"first answer in a fresh process over a later one: NeoX {size}",
        found["first"] - found["later"],
        FIRST_BAR,
        "s more",
        "compilers and libraries that load late",
        f"first {found['first']:.2f} s, later {found['later']:.2f} s (capture, follow, check, response), on the same "
        f"path {found['same']:.2f} s",
    )


def first_answer(size: str, device: str, shared: bool) -> None:
    """Runs in the fresh process: prints the seconds of a first answer, a later one, and one more on the same path."""
    plain_float32()
    place = torch.device(device)
    clock = clock_of(place)
    run = Run(size, place, shared)
    assert run.optimizer is not None
    found, point, path = {}, run.point, None
    for name in ("first", "later"):
        del point, path  # what the one before holds is not in the way
        run.__dict__.pop("point", None)
        emptied(place)
        began = clock()
        point = ak.capture(run.model, run.optimizer, loss_fn)
        point.loss.sharing.wanted |= shared
        path = point.follow(run.path_batches)
        path.replace(run.candidates).response(run.probe)
        found[name] = clock() - began
    began = clock()
    path.replace(run.candidates).response(run.probe)
    print(json.dumps({**found, "same": clock() - began}))


# --- the program ----------------------------------------------------------------------------------

# In this order: what is live leaves on the way.
BY_SIZE = {
    "follow": follow,
    "exact": exact,
    "rank": rank,
    "products": products,
    "elementwise": elementwise,
    "answers": answers,
}
ONCE = {"small": small}
FIRST = "first"  # in a process of its own for the tiny model and each size


def plain_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a plain copy reads and writes."""
    size = 2**30 if device.type == "cuda" else 2**25
    source, target = (torch.ones(size // 4, device=device) for _ in range(2))
    times = interleave({"copy": Work(lambda: target.copy_(source), 4)}, 5, device)
    return 2 * size / times.seconds("copy")


def first_line(error: Exception) -> str:
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {line[:ERROR_LENGTH]}"


class Report:
    """Rows as they come: printed at once and written to the file, so that a run that is cut short is not lost."""

    def __init__(self, title: str, out: FilePath | None) -> None:
        self.title, self.out, self.rows = title, out, list[Row | Skipped]()
        print(title, flush=True)

    def add(self, row: Row | Skipped) -> None:
        self.rows.append(row)
        if isinstance(row, Skipped):
            print(f"FAILED {row.work}: {row.reason}", flush=True)
        else:
            bar = "" if row.bar is None else f" (bar {row.bar:g}: {'ok' if row.met else 'MISSED'})"
            print(f"{row.work}: {row.measured:.3g} {row.unit}{bar}. {row.note}", flush=True)
        if self.out is not None:
            self.out.write_text(json.dumps({"title": self.title, "rows": [asdict(r) for r in self.rows]}, indent=1))

    def guarded(self, name: str, work: Callable[[], Iterator[Row]], device: torch.device) -> None:
        began = time.perf_counter()
        try:
            for row in work():
                self.add(row)
        except Exception as error:  # the next row runs whatever happened to this one
            self.add(Skipped(name, first_line(error), "failed"))
        emptied(device)
        print(f"  [{name}: {time.perf_counter() - began:.1f} s]", flush=True)

    def table(self) -> None:
        console = Console() if sys.stdout.isatty() else Console(width=170)
        console.print(bars(self.rows, self.title))


def measure_size(name: str, wanted: Sequence[str], report: Report, options: argparse.Namespace, copy: float) -> None:
    device, held = torch.device(options.device), list[Run]()

    def built() -> Iterator[Row]:
        held.append(Run(name, device, options.together))
        return iter(())

    report.guarded(f"building NeoX {name}", built, device)
    for row, work in BY_SIZE.items():
        default = row in SIZES[name].bars or not SIZES[name].bars or row in ("answers", "elementwise")
        if held and (row in wanted if wanted else default):
            report.guarded(f"{row}, NeoX {name}", lambda work=work: work(held[0], copy), device)
    held.clear()
    emptied(device)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.language", description=__doc__)
    parser.add_argument("--size", nargs="+", choices=list(SIZES), default=["410m", "1.4b"])
    parser.add_argument("--only", nargs="+", choices=[*BY_SIZE, *ONCE, FIRST], default=[], help="these rows alone")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--together", action="store_true", help="rows together on a CPU too: a trial, not a benchmark")
    parser.add_argument("--out", type=FilePath, help="rows as JSON, written after each")
    options = parser.parse_args()
    device = torch.device(options.device)
    plain_float32()
    if device.type == "cpu":
        torch.set_num_threads(1)
        keep_freed()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    copy = copy_bandwidth(device)
    report = Report(
        f"aftershock, {name}, torch {torch.__version__}, float32 without TF32, batch 1 × {TOKENS}; a copy moves "
        f"{copy / 1e12:.2f} TB/s. g: one plain gradient",
        options.out,
    )
    began = time.perf_counter()
    for size in options.size:
        measure_size(size, options.only, report, options, copy)
    for row, work in ONCE.items():
        if row in options.only or not options.only:
            report.guarded(row, lambda work=work: work(device, options.together), device)
    for size in dict.fromkeys(["tiny", *options.size]) if FIRST in options.only or not options.only else ():
        report.guarded(f"first, NeoX {size}", lambda size=size: first(size, device, options.together), device)
    print(f"{time.perf_counter() - began:.0f} s in all", flush=True)
    report.table()


if __name__ == "__main__":
    main()
