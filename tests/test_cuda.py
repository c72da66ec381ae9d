"""The same code on a GPU: equal to the bit to training there, and to the CPU to rounding."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aftershock as ak
from aftershock.core import fused
from aftershock.core.reductions import TotalNorm
from aftershock.core.state import Cotangent, Tangent
from aftershock.recorder.store import open_flight
from aftershock.recorder.triggers import AtStep

from .cases import CASES, Case, cross_entropy, make, mlp
from .test_path import assert_same_bits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")


def on_gpu(case: Case) -> Case:
    """The live run moved to the GPU, moments included."""
    memo: dict[int, object] = {}
    model = copy.deepcopy(case.model, memo)
    optimizer = copy.deepcopy(case.optimizer, memo)
    model.cuda()
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].cuda()

    def batch() -> object:
        return torch.utils._pytree.tree_map(lambda x: x.cuda() if isinstance(x, torch.Tensor) else x, case.batch())

    return Case(case.name, model, optimizer, case.loss_fn, batch, case.clip)


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("dropout", "accumulated")])
def test_gpu_agrees_with_cpu_to_rounding(name: str) -> None:
    case = make(name)
    batches, pool, probe = case.batches(5), case.batches(3), case.batch()
    cpu = case.point()
    answers = []
    for point in (cpu, cpu.to("cuda")):
        path = point.follow(batches, clip=case.clip)
        response, ranking = path.replace(pool).response(probe, scales=[0.5, 1.0]), path.rank(pool, probe)
        answers.append((response.data["response"].values, ranking.data["response"].values))
    # a bias before BatchNorm has a gradient of rounding alone, which decides on what is a typical curve, and so which
    # other coordinates have one: rankings then differ by as much as curves do from exact kicks
    curves = 2 * float(ranking.data["curve_error"]) if name == "batch_norm" else 1e-9
    for a, b, tolerance in zip(*answers, (1e-9, curves)):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=tolerance * np.abs(a).max())


@pytest.mark.parametrize("name", [n for n in CASES if n != "accumulated"])
def test_follow_equals_training_on_the_gpu_to_the_bit(name: str) -> None:
    case = on_gpu(make(name, torch.float32))
    batches = case.batches(5)
    torch.manual_seed(3)
    path = case.point().follow(batches, clip=case.clip)
    losses = case.train(batches)
    assert path.losses == losses
    assert_same_bits(case, path, path.trajectory.state(5))


@pytest.mark.parametrize("flags", [{"foreach": True}, {"foreach": False}, {"fused": True}, {"capturable": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_implementation_on_the_gpu(flags: dict, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = mlp(8, 16, 3).to("cuda", dtype)
    lr = torch.tensor(1e-2, device="cuda") if "capturable" in flags else 1e-2
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, **flags)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(6, 8, device="cuda", dtype=dtype), torch.randint(0, 3, (6,), device="cuda")

    case = Case("flags", model, optimizer, cross_entropy, batch, clip=0.3)
    case.train(case.batches(4))
    batches = case.batches(5)
    path = case.point().follow(batches, clip=0.3)
    case.train(batches)
    assert_same_bits(case, path, path.trajectory.state(5))


def test_a_cpu_batch_for_a_gpu_model_is_named() -> None:
    case = on_gpu(make("tanh_mlp"))
    with pytest.raises(ak.errors.MixedDevices, match="Move the batch to cuda"):
        case.point().follow([make("tanh_mlp").batch()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("rows", [None, 3])
def test_fused_steps_are_the_plain_arithmetic(
    dtype: torch.dtype, optimizer: type[torch.optim.Optimizer], rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel against the same formulas in torch's own operations, with v = 0, a maximized group and clipping."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3)).to("cuda", dtype)
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "maximize": True, "lr": 3e-3}]
    live = optimizer(groups, lr=1e-3, weight_decay=0.1)  # type: ignore[call-arg]
    batches = [(torch.randn(9, 300, device="cuda", dtype=dtype), torch.arange(9, device="cuda") % 3) for _ in range(6)]
    for batch in batches:
        live.zero_grad()
        cross_entropy(model, batch).backward()
        live.step()
    linear = ak.capture(model, live, cross_entropy).follow(batches[:3], clip=0.1).control(1).linear
    assert linear.clip.binds
    assert fused.available(linear.raw)
    linear.before.v[:90], linear.before.m[:60], linear.raw[:30] = 0, 0, 0
    shape = (linear.raw.numel(),) if rows is None else (rows, linear.raw.numel())

    def after(step: str) -> list[torch.Tensor]:
        draw = torch.Generator("cuda").manual_seed(1)
        theta, m, v, u = (torch.randn(shape, device="cuda", dtype=dtype, generator=draw) * 1e-3 for _ in range(4))
        if step == "adjoint":
            return [linear.absorb_transposed_(Cotangent(theta, m, v)), theta, m, v]
        dx = Tangent(theta, m, v.mul_(1e-3))
        linear.absorb_(dx, u) if step == "tangent" else linear.absorb_exactly_(dx, u, 0.1)
        return [theta, m, v]

    for step in ("tangent", "adjoint") if rows is None else ("tangent", "semilinear", "adjoint"):
        quick = after(step)
        with monkeypatch.context() as plain:
            plain.setattr(fused, "available", lambda rows: False)
            slow = after(step)
        for a, b in zip(quick, slow):
            assert (a - b).abs().max() <= 8 * torch.finfo(dtype).eps * b.abs().max()


# --- the flight recorder


def gpu_loop(
    directory: Path | None,
    steps: int = 24,
    scaled: bool = False,
    half: bool = False,
    clip: float | None = None,
    **adamw: Any,
) -> tuple[torch.nn.Module, list[torch.Tensor], ak.FlightRecorder | None]:
    """Training whose batches lie in one buffer that every step overwrites, and which never reads a number."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 3))
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **adamw)
    scale = torch.amp.GradScaler("cuda", init_scale=2.0**10, enabled=scaled)
    data = [torch.randn(32, 8) for _ in range(steps)]
    x, y = torch.empty(32, 8, device="cuda"), (torch.arange(32) % 3).cuda()
    recorder = None

    def loss_fn(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cuda", torch.float16, enabled=half):
            loss = cross_entropy(model, batch)
        return 1e-3 * loss if half else loss  # so small that float16 loses gradients which are not scaled

    if directory is not None:
        options: dict[str, Any] = {"window": 8, "every": 4, "clip": clip, "triggers": [AtStep(18)], "after": 2}
        recorder = ak.FlightRecorder(model, optimizer, loss_fn, directory, **options)
        recorder.__enter__()
    losses = []
    for step in range(steps):
        x.copy_(data[step])
        loss = loss_fn(model, (x, y))
        scale.scale(loss * float("inf") if scaled and step == 5 else loss).backward()
        scale.unscale_(optimizer) if scaled else None
        norm = None if clip is None else torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad()
        if recorder is not None:
            recorder.step((x, y), loss, norm=norm)
        losses.append(loss.detach())
    if recorder is not None:
        recorder.__exit__(None, None, None)
        assert [torch.equal(r.fed[0].tensors[0], data[r.fed[0].index]) for r in recorder.recent] == [True] * 8
    return model, losses, recorder


GPU_LOOPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
    "clipped": {"clip": 0.1},
    "scaler, fused": {"scaled": True, "fused": True},
    "scaler": {"scaled": True},
    "scaler, float16": {"scaled": True, "half": True, "clip": 1e-5},
}


@pytest.mark.parametrize("name", list(GPU_LOOPS))
def test_recording_on_the_gpu_is_equal_to_the_bit(name: str, tmp_path: Path) -> None:
    plain, losses, _ = gpu_loop(None, **GPU_LOOPS[name])
    model, seen, recorder = gpu_loop(tmp_path, **GPU_LOOPS[name])
    assert all(torch.equal(a, b) for a, b in zip(losses, seen))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters()))
    assert recorder is not None
    flight = open_flight(tmp_path)
    assert (flight.trigger, flight.after, flight.missing) == (18, 2, ())
    found = ak.explain(recorder, verify=0, references=0)
    assert "to the bit" in str(found.certificate)


def test_a_recorded_step_does_not_wait_for_the_gpu(tmp_path: Path) -> None:
    """torch's own alarm for calls that wait, around the loop; a wait would stop the recorder."""
    model = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def loss_fn(m: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return m(x).square().mean()

    with ak.FlightRecorder(model, optimizer, loss_fn, tmp_path, window=4) as recorder:
        recorder.wait()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(7):  # fewer than may be late; a state is taken among them
                x = torch.ones(16, 64, device="cuda")
                loss = loss_fn(model, x)
                loss.backward()
                optimizer.step()
                recorder.step(x, loss)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert recorder.recording
    assert open_flight(tmp_path).last == 6


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.bfloat16,), (torch.float32, torch.bfloat16)])
def test_the_norm_of_a_gradient_has_the_bits_of_torchs(dtypes: tuple[torch.dtype, ...]) -> None:
    """From memory that is kept: an earlier norm stays what it was, and fewer gradients may come."""
    total = TotalNorm()
    torch.manual_seed(0)
    found, expected = [], []
    for count in (300, 300, 299, 1):
        grads = [torch.randn(5 + i, device="cuda").to(dtypes[i % len(dtypes)]) for i in range(count)]
        found.append(total(grads))
        expected.append(torch.nn.utils.get_total_norm(grads))
    assert [x.tolist() for x in found] == [x.tolist() for x in expected]
    assert len({x.item() for x in found}) == 4


def test_micro_batches_of_one_buffer_are_recorded_on_the_gpu(tmp_path: Path) -> None:
    """Batch and loss lie in buffers that are overwritten before the GPU has come that far; their dtypes differ."""
    model = torch.nn.Linear(8, 1).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x, held = torch.empty(4, 8, device="cuda"), torch.empty((), device="cuda", dtype=torch.float64)

    def loss_fn(m: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return m(batch).square().mean()

    losses, norms = [], []
    with ak.FlightRecorder(model, optimizer, loss_fn, tmp_path, window=4) as recorder:
        for step in range(6):
            total = torch.zeros((), device="cuda", dtype=torch.float64)
            for micro in range(3):
                x.fill_(3.0 * step + micro)
                loss = loss_fn(model, x) / 3
                loss.backward()
                held.copy_(loss.detach())
                total += held
                recorder.micro(x, held) if micro < 2 else None
            norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(x, held)
            losses.append(total)
    for record in recorder.recent:
        assert [fed.tensors[0].unique().tolist() for fed in record.fed] == [[3.0 * record.step + i] for i in range(3)]
        assert (record.loss, record.norm) == (losses[record.step].item(), norms[record.step].item())
    assert [record.step for record in recorder.recent] == [2, 3, 4, 5]


@pytest.mark.parametrize("there", ["cuda", "cpu"])
def test_a_run_is_replayed_where_it_was_recorded(there: str, tmp_path: Path) -> None:
    """With dropout, and the model moved elsewhere since, as Lightning does when a training ends."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)).to(there)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_fn(m: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (m(x) - x.sum(1, keepdim=True)).square().mean()

    with ak.FlightRecorder(model, optimizer, loss_fn, tmp_path, window=8, triggers=()) as recorder:
        for _ in range(12):
            x = torch.randn(16, 8, device=there)
            loss = loss_fn(model, x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.step(x, loss)
    model.to("cpu" if there == "cuda" else "cuda")
    found = ak.explain(recorder, step=11, verify=0, placebos=0, treatments=False)
    assert "to the bit" in str(found.certificate)
    assert {p.device.type for p in model.parameters()} == {"cpu" if there == "cuda" else "cuda"}


def test_a_state_takes_its_own_size_of_gpu_memory_and_no_more(tmp_path: Path) -> None:
    model = torch.nn.Linear(4096, 4096, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    size = 3 * sum(p.numel() * p.element_size() for p in model.parameters())

    def loss_fn(m: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return m(x).square().mean()

    def peak(recorder: ak.FlightRecorder | None) -> int:
        torch.cuda.reset_peak_memory_stats()
        for _ in range(12):
            x = torch.ones(2, 4096, device="cuda")
            loss = loss_fn(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if recorder is not None:
                recorder.step(x, loss)
        return torch.cuda.max_memory_allocated()

    plain = peak(None)
    with ak.FlightRecorder(model, optimizer, loss_fn, tmp_path, window=4, every=2, triggers=()) as recorder:
        recorder.wait()
        recorded = peak(recorder)
        assert recorder.recording
    assert recorded - plain < 1.1 * size  # a tenth for batches and norms


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU])
@pytest.mark.parametrize("frozen", [False, True])
def test_recurrent_networks_have_every_answer(kind: Any, frozen: bool) -> None:
    """cuDNN's have no second derivative, and torch moves their weights, frozen ones too, into one piece."""
    torch.manual_seed(0)
    cells, head = kind(6, 8, num_layers=2, batch_first=True), torch.nn.Linear(8, 3)
    model = torch.nn.ModuleList([cells, head]).cuda()
    if frozen:
        cells.bias_ih_l0.requires_grad_(False)

    def loss_fn(m: Any, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(m[1](m[0](batch[0])[0][:, -1]), batch[1])

    data = [(torch.randn(8, 5, 6).cuda(), torch.randint(3, (8,)).cuda()) for _ in range(12)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(batches: Any) -> None:
        for batch in batches:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()

    train(data[:3])
    places = [p.data_ptr() for p in model.parameters()]
    path = ak.capture(model, optimizer, loss_fn).follow(data[3:8])
    response = path.replace(data[8:10]).response(data[10])
    assert places == [p.data_ptr() for p in model.parameters()]
    assert list(response.data["answer"].values) == ["exact", "semilinear", "tangent"]
    exact, semilinear = response.exact.values, response.semilinear.values
    np.testing.assert_allclose(semilinear, exact, atol=0.1 * np.abs(exact).max())
    train(data[3:8])
    assert path.matches(model, optimizer)
    names, after = path.point.loss.layout.names, path.trajectory.state(5).theta
    views, live = path.point.loss.layout.by_name(after), dict(model.named_parameters())
    assert all(torch.equal(views[name], live[name]) for name in names)
