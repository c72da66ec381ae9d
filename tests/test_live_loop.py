"""Training that is not what `follow` computes: followed to the bit, or refused by name. Never a silent number."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as rates

import aftershock as ak
from aftershock.errors import (
    AftershockError,
    InvalidInput,
    UnsupportedModel,
)

from .cases import Case, classes, cross_entropy, make, mlp
from .test_path import assert_same_bits

STEPS = 5


def follows(case: Case, steps: int = STEPS, said: dict[str, Any] | None = None, **options: Any) -> ak.Path:
    """A path, once it is seen to be equal to the bit to the live run's next steps."""
    batches = case.batches(steps)
    path = case.point(**(said or {})).follow(batches, clip=case.clip, **options)
    case.train(batches)
    assert_same_bits(case, path, path.trajectory.state(steps))
    return path


def trained(model: nn.Module, loss_fn: Any = cross_entropy, steps: int = 3, **flags: Any) -> Case:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **flags)
    case = Case("own", model, optimizer, loss_fn, classes((4,)))
    case.train(case.batches(steps))
    return case


# --- zero_grad(set_to_none=False)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(4, 5), nn.ModuleList(nn.Linear(5, 1) for _ in range(3))

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.body(x).tanh())


def head_loss(model: nn.Module, batch: tuple[Tensor, int]) -> Tensor:
    return model(*batch).square().mean() + model(*batch).sum().cos()


def head_batch(head: int) -> tuple[Tensor, int]:
    return torch.randn(6, 4), head


class Zeroing(Case):
    """The loop of a user who keeps gradients allocated."""

    def train(self, batches: list[Any]) -> list[float]:
        for batch in batches:
            self.optimizer.zero_grad(set_to_none=False)
            self.loss_fn(self.model, batch).backward()
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
        return []


def heads(kind: type[Case], first: list[int], **flags: Any) -> Case:
    torch.manual_seed(0)
    model = Heads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.3, **flags)
    case = kind("heads", model, optimizer, head_loss, lambda: None, clip=0.5)
    case.train([head_batch(head) for head in first])
    return case


@pytest.mark.parametrize("flags", [{"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("kept", ["states", "graphs"])
@pytest.mark.parametrize("said", [{}, {"unused": "zero"}])
def test_zeros_move_an_unused_head(flags: dict[str, Any], kept: Any, said: dict[str, Any]) -> None:
    case = heads(Zeroing, [0, 1, 0], **flags)
    if not said:
        case.optimizer.zero_grad(set_to_none=False)  # where the live gradients show it
    batches = [head_batch(head) for head in (1, 0, 0, 1)]
    path = case.point(**said).follow(batches, clip=case.clip, keep=kept)
    skipping = case.point(unused="skip").follow(batches, clip=case.clip)
    case.train(batches)
    assert_same_bits(case, path, path.trajectory.state(4))
    assert not torch.equal(path.trajectory.state(4).theta, skipping.trajectory.state(4).theta)
    # a change of nothing is exactly nothing, and the tangent of a small one is the small one
    assert not path.replace([batches[1]], at=1).response(batches[0]).exact.values.any()


def test_predictions_with_zeros_are_right() -> None:
    case = heads(Zeroing, [0, 1, 0])
    model = case.model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.3)
    case = Zeroing("heads", model, optimizer, head_loss, lambda: None)
    inputs = [(torch.randn(6, 4, dtype=torch.float64), head) for head in (0, 1, 2, 0, 1, 2, 0, 1)]
    case.train(inputs[:3])
    path = case.point(unused="zero").follow(inputs[3:7])
    found = path.replace([inputs[7]], at=0).response(inputs[0], scales=[1e-4]).data["response"]
    exact, tangent = found.sel(answer="exact"), found.sel(answer="tangent")
    assert float(abs(exact - tangent).max() / abs(exact).max()) < 1e-2  # linear to a few parts in a thousand


def test_dropped_gradients_are_seen_as_dropped() -> None:
    case = heads(Case, [0, 1, 0])  # head 1 has been stepped and has no gradient
    batches = [head_batch(head) for head in (1, 0, 0, 1)]
    path = case.point().follow(batches, clip=case.clip)
    case.train(batches)
    assert_same_bits(case, path, path.trajectory.state(4))


def test_an_unused_head_is_asked_about_where_nothing_tells(tmp_path: Any) -> None:
    case = heads(Zeroing, [0, 0])
    batches = [head_batch(head) for head in (0, 1, 0)]
    with pytest.raises(UnsupportedModel, match=r"does not use parameter 'heads.0.weight'.*unused=\"skip\""):
        case.point().follow(batches)
    with pytest.raises(UnsupportedModel, match="first used in the path"):
        case.point(unused="zero").follow(batches)
    case.point(unused="skip").follow(batches)
    case.train(batches)
    point = case.point(unused="zero")  # after its first use
    point.save(tmp_path / "point")
    loaded = ak.load_point(tmp_path / "point", Heads(), head_loss)
    batches = [head_batch(0), head_batch(1), head_batch(0)]
    path = loaded.follow(batches, clip=case.clip)
    case.train(batches)
    assert_same_bits(case, path, path.trajectory.state(3))


# --- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_outside_of_which_capture_was_called(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = mlp(8, 16, 3)

    class Autocast(Case):
        def train(self, batches: list[Any]) -> list[float]:
            for batch in batches:
                self.optimizer.zero_grad()
                with torch.autocast("cpu", dtype=dtype):
                    loss = self.loss_fn(self.model, batch)
                loss.backward()
                self.optimizer.step()
            return []

    case = Autocast("autocast", model, torch.optim.AdamW(model.parameters(), lr=1e-2), cross_entropy, classes((8,)))
    case.train(case.batches(2))
    with pytest.raises(InvalidInput, match=f"computed in {dtype}.*autocast={dtype}"):
        case.point().follow(case.batches(2))
    case.point(autocast=False).follow(case.batches(2))
    follows(case, said={"autocast": dtype})
    with pytest.raises(InvalidInput, match="autocast is a dtype"):
        case.point(autocast="bf16")


def test_short_gradients_by_nature_are_no_evidence_of_autocast() -> None:
    """A float32 loop whose gradients are whole numbers: the path's own are, too."""
    model = nn.Linear(6, 4, bias=False)
    batch = lambda: torch.randint(-3, 4, (5, 6)).float()  # noqa: E731
    case = Case("whole", model, torch.optim.AdamW(model.parameters()), lambda m, b: m(b).sum(), batch)
    case.train(case.batches(2))
    follows(case)


# --- ordinary loops


def test_accelerate_is_followed() -> None:
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model = mlp(4, 5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = rates.ExponentialLR(optimizer, 0.8)
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    make_batch = classes((4,))

    def train(batches: list[Any]) -> None:
        for batch in batches:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model, batch))
            optimizer.step()
            scheduler.step()

    train([make_batch() for _ in range(3)])
    batches = [make_batch() for _ in range(STEPS)]
    path = ak.capture(model, optimizer, cross_entropy).follow(batches, lr=scheduler)
    train(batches)
    assert_same_bits(types.SimpleNamespace(model=model, optimizer=optimizer), path, path.trajectory.state(STEPS))


def test_words_that_mean_nothing_are_refused() -> None:
    case = make("tanh_mlp")
    for said in ({"hooks": "keep"}, {"unused": "none"}):
        with pytest.raises(AftershockError, match="got"):
            case.point(**said)
