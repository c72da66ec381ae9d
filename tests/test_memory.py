"""Budgets: chunks, √H checkpoints, and the memory of a long adjoint."""

from __future__ import annotations

import ast
import gc
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import aftershock
from aftershock.core.host import free_of_host
from aftershock.core.memory import budget, enough, free, hand_back, in_smaller_pieces, lacking, left_on_card, readable
from aftershock.core.operators import readout
from aftershock.core.responses import ANSWERS
from aftershock.core.sweeps import adjoint_sweep
from aftershock.core.trajectory import Trajectory
from aftershock.errors import InvalidInput, OutOfMemory

from .cases import make

HOME = Path(aftershock.__file__).parent
# where it is decided what may be used, and how work is cut to fit
PLANS = {f"core/{name}.py" for name in ("host", "memory", "footprint", "path_plans", "planning", "sweep_plans")}
DECIDES = {"budget", "free", "room"}  # functions of `memory` and `footprint`
SOURCES = ("memory", "footprint")
ASKS = {"mem_get_info", "total_memory", "memory_allocated", "memory_reserved", "sysconf"}  # of torch and of the system
MEASURES = {"core/recordings.py"}  # what a recording has reserved, which decides nothing


def test_what_may_be_used_is_decided_in_the_planning_modules_alone() -> None:
    sources = {str(path.relative_to(HOME)): ast.parse(path.read_text()) for path in HOME.rglob("*.py")}
    assert {file for file, tree in sources.items() if any(_memory_asked(tree))} == PLANS | MEASURES


@pytest.mark.parametrize(
    "line",
    ["from ..core.memory import budget, readable", "from .footprint import room as left", "memory.budget(None, device)",
     "torch.cuda.mem_get_info()", "torch.cuda.get_device_properties(0).total_memory"],
)  # fmt: skip
def test_a_question_for_memory_is_seen(line: str) -> None:
    assert list(_memory_asked(ast.parse(line)))
    assert not list(_memory_asked(ast.parse("from .memory import readable\nroom = plan.spare\nplans.room = free")))


def _memory_asked(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (a.name for a in node.names if a.name in DECIDES and (node.module or "").endswith(SOURCES))
        elif isinstance(node, ast.Attribute) and node.attr in ASKS:
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in DECIDES:
            yield node.func.attr


@pytest.mark.parametrize(
    ("group", "files", "left"),
    [
        ("0::/job/step", {}, 7 * 2**30),  # nothing is limited
        ("0::/job/step", {"job/memory.max": "max", "job/step/memory.max": "max"}, 7 * 2**30),
        ("0::/job/step", {"job/memory.max": "3221225472", "job/step/memory.max": "max"}, 2 * 2**30 + 2**20),
        ("0::/../outside", {"memory.max": "2147483648"}, 2**30 + 2**20),  # a container, whose root is its group's
        ("4:cpu,memory:/docker/1", {"memory/memory.limit_in_bytes": "2147483648"}, 2**30 + 2**20),
        ("4:memory:/job", {"memory/job/memory.limit_in_bytes": str(2**63 - 4096)}, 7 * 2**30),
        ("5:cpu:/job", {"cpu/job/memory.limit_in_bytes": "2147483648"}, 7 * 2**30),
        ("0::/job", {"job/memory.max": "1000"}, 0),  # what is over its limit has nothing
    ],
)
def test_what_a_container_or_a_job_may_use_is_what_is_free(
    tmp_path: Path, group: str, files: dict[str, str], left: int
) -> None:
    """Of a machine with 7 GiB free; a group uses 1 GiB, of which 1 MiB are cached files, most of them read again."""
    first = not group.startswith("0::")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemFree: 9 kB\nMemAvailable: 7340032 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(f"9:name=systemd:/\n{group}\n")
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
        path.with_name("memory.usage_in_bytes" if first else "memory.current").write_text(f"{2**30}\n")
        prefix, cached = "total_" * first, {"inactive_file": 2**18, "active_file": 3 * 2**18}
        numbers = "".join(f"{prefix}{name} {size}\n" for name, size in cached.items())
        path.with_name("memory.stat").write_text(f"anon 5\nactive_anon 7\n{numbers}")
    assert free_of_host(tmp_path) == left


def test_a_host_that_tells_nothing_has_half_of_its_memory(tmp_path: Path) -> None:
    assert free_of_host(tmp_path) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    assert 0 < free(torch.device("cpu")) <= 2 * free_of_host(tmp_path)


def test_budgets() -> None:
    cpu = torch.device("cpu")
    assert budget("8GiB", cpu) == 8 * 2**30
    assert budget("1.5 kb", cpu) == 1500
    assert budget(123, cpu) == 123
    assert 0 < budget(None, cpu) < free(cpu)
    for bad in ("8 parsecs", "", "-1", 0, "1.2.3GiB", ".GiB"):
        with pytest.raises(InvalidInput):
            budget(bad, cpu)
    assert readable(1536) == "1.5 KiB"


def test_advice_is_enough_and_what_is_lacking_is_seen() -> None:
    """Of needs whose digits would be rounded down, and of those that are a byte more than may be used."""
    cpu = torch.device("cpu")
    for need in (7, 999, 1_079_000, 2**20 - 1, 5 * 2**20 + 1, 123_456_789_012):
        advised = budget(enough(need).removeprefix('memory="').removesuffix('"'), cpu)
        assert need <= advised <= 1.02 * need * 1.1 + 1, need
        needed, limit = re.findall(r"[\d.]+ \w+(?= beside| may)", lacking(need, need - 1))
        assert needed != limit
    assert lacking(3 * 2**20, 2**20) == "needs 3.0 MiB beside the model and the path, and 1.0 MiB may be used"


def test_what_is_left_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    card, gib = torch.device("cuda", 0), 2**30
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10 * gib)
    for total, limit, left in ((80, 75, 75 - 1 - 8), (40, 75, 38 - 1 - 8)):  # 95 % of a card that is smaller
        found = SimpleNamespace(total_memory=total * gib)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=found: found)
        assert left_on_card(card, limit * gib, ours=2 * gib) == left * gib
    assert left_on_card(torch.device("cpu"), gib, ours=0) is None


CPU_ERROR = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no memory"), OutOfMemory("one row"), MemoryError(), RuntimeError(CPU_ERROR)]
)
def test_smaller_pieces_are_tried_whoever_says_that_memory_ran_out(error: Exception) -> None:
    def work(size: int) -> int:
        if size > 2:
            raise error
        return size

    assert in_smaller_pieces(8, work, lambda size: size // 2 or None, "rows") == 2


def test_another_error_is_no_lack_of_memory() -> None:
    def work(size: int) -> int:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        in_smaller_pieces(8, work, lambda size: size // 2 or None, "rows")


def test_whether_memory_ran_out_is_asked_of_one_function() -> None:
    """torch's own class is that of a GPU alone."""
    named = {str(path.relative_to(HOME)) for path in HOME.rglob("*.py") if "torch.OutOfMemoryError" in path.read_text()}
    assert named == {"core/memory.py", "core/playback.py", "recorder/snapshot.py"}  # the last two: of a GPU


LITTLE = """
import resource

import torch
from torch import nn

import aftershock as ak

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 10))
optimizer = torch.optim.AdamW(model.parameters())
point = ak.capture(model, optimizer, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]))
draw = lambda: (torch.randn(64, 256), torch.randint(10, (64,)))
path, pool, probe = point.follow([draw() for _ in range(3)]), [draw() for _ in range(8)], draw()
change, exact = path.replace(pool), {"answers": ("exact",)}
whole = change.estimate(probe, **exact).memory
one = path.replace(pool[:1]).estimate(probe, **exact).memory
expected = change.response(probe, **exact, memory=2 * one).exact
held = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (held + (one + whole) // 2,) * 2)
print(bool((abs(change.response(probe, **exact).exact - expected) < 1e-6).all()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the address space is capped as Linux does it")
def test_memory_that_runs_out_on_a_cpu_halves_the_chunks() -> None:
    """The planned peak of eight changes does not fit, that of a few does: found by a failing allocation, no plan."""
    done = subprocess.run([sys.executable, "-c", LITTLE], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("name", ["tanh_mlp", "dropout", "two_groups"])
def test_chunks_change_nothing(name: str) -> None:
    case = make(name)
    path = case.path(4)
    pool, probe, scales = case.batches(5), case.batch(), [0.5, 1.0]
    change, one = path.replace(pool), path.replace(pool[:1])
    whole = change.response(probe, scales=scales).data["response"]
    assert change.estimate(probe, scales=scales).chunks == 1
    for answer in ANSWERS:
        limit = one.estimate(probe, scales=scales, answers=(answer,)).memory
        assert change.estimate(probe, scales=scales, answers=(answer,), memory=limit).chunks == 5 + (answer == "exact")
        one_at_a_time = change.response(probe, scales=scales, answers=(answer,), memory=limit).data["response"]
        np.testing.assert_array_equal(one_at_a_time.values[0], whole.sel({"answer": answer}).values)


@pytest.mark.parametrize("name", ["tanh_mlp", "dropout", "batch_norm", "accumulated"])
@pytest.mark.parametrize("keep", ["checkpoints", "graphs"])
def test_what_is_kept_does_not_change_the_answers(name: str, keep: str) -> None:
    case = make(name)
    batches, probe, pool = case.batches(9), case.batch(), case.batches(2)
    answers = []
    for kept in ("states", keep):
        path = case.point().follow(batches, clip=case.clip, keep=kept)
        response = path.replace(pool, at=2).response(probe)
        answers.append((response.data["response"].values, path.rank(pool, probe, at=2).data["response"].values))
    for states, other in zip(*answers):
        np.testing.assert_allclose(states, other, rtol=1e-9, atol=1e-14)


def live_bytes(size: int) -> int:
    """Bytes of all live tensors that own at least `size` elements' storage."""
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        fake = isinstance(item, FakeTensor)  # left by torch.compile, without storage
        if isinstance(item, torch.Tensor) and not fake and item.device.type == "cpu" and item.layout == torch.strided:
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(n for n in storages.values() if n >= size)


def test_a_thousand_step_adjoint_in_the_memory_of_64_states() -> None:
    """√1000 checkpoints and one segment of √1000 states: never more than about 64 of the 1,000."""
    case = make("quadratic")
    steps = 1000
    batch = case.batch()
    layout = case.point().loss.layout
    state_bytes = 3 * layout.padded_size * 8
    before = live_bytes(layout.padded_size * 8)
    path = case.point().follow([batch] * steps, keep="checkpoints")
    peak = 0

    def visit(*_: object) -> None:
        nonlocal peak
        if visit.calls % 97 == 0:  # type: ignore[attr-defined]
            peak = max(peak, live_bytes(layout.padded_size * 8) - before)
        visit.calls += 1  # type: ignore[attr-defined]

    visit.calls = 0  # type: ignore[attr-defined]
    gradient = path.trajectory.state(steps).theta.clone()
    c = adjoint_sweep(path.trajectory, steps, 0, readout(gradient[None].clone()), visit=visit)
    assert torch.isfinite(c.theta).all()
    # 64 states, and the vectors of the step that is being linearized
    assert peak <= (64 + 8) * state_bytes, f"{peak / state_bytes:.0f} states"
    assert peak >= 40 * state_bytes, "the count misses the states it should see"
    kept = case.point().follow([batch] * steps, keep="states")
    d = adjoint_sweep(kept.trajectory, steps, 0, readout(gradient[None].clone()))
    torch.testing.assert_close(c.theta, d.theta, rtol=1e-9, atol=1e-300)


def test_a_path_that_does_not_fit_keeps_checkpoints() -> None:
    case = make("tanh_mlp")
    batches = case.batches(30)
    small = case.point().follow(batches, memory="40kB")
    assert small.trajectory.keep == "checkpoints"
    assert case.point().follow(batches).trajectory.keep == "states"
    assert len(small.trajectory._states) < 10


def test_a_kept_path_replays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make("tanh_mlp")
    path = case.path(6)
    path.check()
    calls = []
    advance = type(path.trajectory.dynamics).advance
    monkeypatch.setattr(
        type(path.trajectory.dynamics), "advance", lambda self, *a: calls.append(1) or advance(self, *a)
    )
    path.explain(case.batch())
    path.rank(case.batches(2), case.batch())
    assert not calls
    assert isinstance(path.trajectory, Trajectory)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what is freed is handed back to glibc alone")
def test_freed_memory_below_what_is_there_goes_back() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    pieces = [torch.ones(2**14) for _ in range(2000)]  # of 64 KiB: small enough to lie on the heap
    above, full = pieces.pop(), resident()
    pieces.clear()
    hand_back()
    assert resident() < full - 2**26
    assert above.sum() == 2**14
