"""The same code on a GPU: equal to the bit to training there, and to the CPU to rounding."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import aftershock as ak
from aftershock.core import fused
from aftershock.core.state import Cotangent, Tangent

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
        response = path.replace(pool).response(probe, scales=[0.5, 1.0])
        answers.append((response.data["response"].values, path.rank(pool, probe).data["response"].values))
    for a, b in zip(*answers):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9 * np.abs(a).max())


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
