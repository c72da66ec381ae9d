"""Hooks of the user's and steps that are not torch's: run to the bit where the user says so, else refused by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.optim import lr_scheduler as rates

import aftershock as ak
from aftershock.errors import (
    InvalidLoss,
    UnsupportedModel,
    UnsupportedOptimizer,
    WrongHessian,
)

from .cases import Case, classes, cross_entropy, make, mlp
from .test_live_loop import STEPS, follows, trained

# --- hooks of modules


def halve_output(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 0.5


def shift_input(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0] + 0.25,)


def scale_gradient(module: nn.Module, grad_input: tuple[Tensor | None, ...], grad_output: Any) -> Any:
    return tuple(None if g is None else g * 0.25 for g in grad_input)


def clamp_gradient(module: nn.Module, grad_output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(g.clamp(-0.02, 0.02) for g in grad_output)


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward hook, halve_output": lambda m: m[0].register_forward_hook(halve_output),
    "forward pre-hook, shift_input": lambda m: m[2].register_forward_pre_hook(shift_input),
    "full backward hook, scale_gradient": lambda m: m[2].register_full_backward_hook(scale_gradient),
    "full backward pre-hook, clamp_gradient": lambda m: m[2].register_full_backward_pre_hook(clamp_gradient),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_is_refused_by_name_or_runs_to_the_bit(kind: str) -> None:
    case = make("tanh_mlp")
    plain = case.point()
    batches = case.batches(1)
    HOOKS[kind](case.model)
    with pytest.raises(UnsupportedModel, match=kind) as refusal:
        case.point()
    assert 'hooks="run"' in str(refusal.value)
    assert 'hooks="ignore"' in str(refusal.value)
    run, ignored = (case.point(hooks=word).follow(batches) for word in ("run", "ignore"))
    without = plain.follow(batches)
    assert ignored.losses == without.losses
    moved = [p.trajectory.state(1).theta for p in (run, without)]
    assert not torch.equal(*moved), "the hook does nothing here: the test would prove nothing"
    follows(case, said={"hooks": "run"})


@pytest.mark.parametrize("kind", HOOKS)
def test_predictions_through_hooks_are_right_or_refused(kind: str) -> None:
    case = make("tanh_mlp")
    HOOKS[kind](case.model)
    change = case.point(hooks="run").follow(case.batches(3)).replace([case.batch()])
    change.response(case.batch(), answers=("exact",))
    if "backward" in kind:
        with pytest.raises(WrongHessian, match=kind):
            change.response(case.batch())
    else:
        found = change.response(case.batch(), scales=[1e-4])
        exact, tangent = found.data["response"].sel(answer="exact"), found.data["response"].sel(answer="tangent")
        # float64; a change of 1e-4 of a batch's gradient is linear to a few parts in a thousand
        assert float(abs(exact - tangent).max() / abs(exact).max()) < 1e-2


@pytest.fixture
def everywhere() -> Iterator[None]:
    handle = modules.register_module_forward_hook(lambda m, _, out: out * 0.9 if isinstance(m, nn.Linear) else None)
    yield
    handle.remove()


def test_global_hooks(everywhere: None) -> None:
    case = make("tanh_mlp")
    for said in ({}, {"hooks": "ignore"}):
        with pytest.raises(UnsupportedModel, match="every module has a forward hook, everywhere"):
            case.point(**said)
    follows(case, said={"hooks": "run"})


class Gated(nn.Module):
    """Its hook is a method of a part of the model: the copy's must use the copy's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.first.register_forward_hook(self.gated)

    def gated(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * self.gate(output).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def test_a_method_as_a_hook_belongs_to_the_copy() -> None:
    torch.manual_seed(0)
    follows(trained(Gated()), said={"hooks": "run"})


def test_a_hook_or_forward_that_holds_the_live_model_is_refused() -> None:
    torch.manual_seed(0)
    case = trained(mlp(4, 5, 3))
    model = case.model
    handle = model[0].register_forward_hook(lambda m, _, out: out + model[0].bias)
    with pytest.raises(InvalidLoss, match="live model through `model`"):
        case.point(hooks="run")
    handle.remove()
    whole = model.forward
    model.forward = lambda x: whole(x) * 2
    with pytest.raises(InvalidLoss, match="live model through `whole`"):
        case.point()


def test_torchs_own_and_known_hooks_need_no_word(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))
    case = trained(model)
    with ak.FlightRecorder(model, case.optimizer, cross_entropy, tmp_path / "flight", triggers=()):
        follows(case)


def test_what_is_said_reaches_the_recorder_and_its_replay(tmp_path: Any) -> None:
    torch.manual_seed(0)
    case = trained(mlp(4, 5, 3))
    case.model[0].register_forward_hook(halve_output)
    with (
        pytest.raises(UnsupportedModel, match="halve_output"),
        ak.FlightRecorder(case.model, case.optimizer, cross_entropy, tmp_path / "none"),
    ):
        pass
    said = {"hooks": "run", "window": 8, "triggers": ()}
    with ak.FlightRecorder(case.model, case.optimizer, cross_entropy, tmp_path / "flight", **said) as recorder:
        for batch in case.batches(8):
            (loss,) = case.train([batch])
            recorder.step(batch, loss)
    found = ak.explain(tmp_path / "flight", step=10, verify=0, references=0)
    assert "replayed" in str(found.certificate)


# --- the optimizer


class Decaying(torch.optim.AdamW):
    """A step of its own, hidden by functools.wraps."""

    @functools.wraps(torch.optim.AdamW.step)
    def step(self, closure: Any = None) -> Any:
        out = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                torch._foreach_mul_(group["params"], 0.99)
        return out


class Lookahead:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups, self.state = optimizer.param_groups, optimizer.state


class WrappedAdamW(torch.optim.AdamW):
    """A wrapper that is an optimizer itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups)
        self.optimizer = optimizer


class Renamed(torch.optim.AdamW):
    """Nothing of its own."""


def patched(optimizer: torch.optim.Optimizer, wraps: bool) -> torch.optim.Optimizer:
    before = optimizer.step

    def shrinking(*arguments: Any) -> Any:
        return before(*arguments)

    optimizer.step = functools.wraps(before)(shrinking) if wraps else shrinking  # type: ignore[method-assign]
    return optimizer


def noisy(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Changes gradients just before they are used."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad.mul_(0.5)


def hooked(optimizer: torch.optim.Optimizer, when: str) -> torch.optim.Optimizer:
    getattr(optimizer, f"register_step_{when}_hook")(noisy)
    return optimizer


STEPPERS: dict[str, tuple[Callable[[torch.optim.Optimizer], Any], str]] = {
    "pre-hook": (lambda o: hooked(o, "pre"), "step pre-hook, noisy"),
    "post-hook": (lambda o: hooked(o, "post"), "step post-hook, noisy"),
    "patched": (lambda o: patched(o, False), "the optimizer object is patched.<locals>.shrinking"),
    "patched and wrapped": (lambda o: patched(o, True), "the optimizer object is .*step of tests"),
    "scheduled, then patched": (lambda o: patched(rates.StepLR(o, 3).optimizer, False), "shrinking"),
    "subclass": (lambda o: Decaying(o.param_groups), "class Decaying is .*step of tests"),
    "wrapper": (Lookahead, "a Lookahead around a AdamW"),
    "wrapper of a kind": (WrappedAdamW, "a WrappedAdamW around a AdamW"),
}


@pytest.mark.parametrize("kind", STEPPERS)
def test_a_step_that_is_not_torchs_is_refused_by_name(kind: str) -> None:
    case = make("tanh_mlp")
    change, words = STEPPERS[kind]
    other = change(case.optimizer)
    with pytest.raises(UnsupportedOptimizer, match=words):
        ak.capture(case.model, other, case.loss_fn)
    with pytest.raises(UnsupportedOptimizer, match=words):
        ak.FlightRecorder(case.model, other, case.loss_fn)


def test_optimizers_that_only_look_different_are_followed() -> None:
    torch.manual_seed(0)
    model = mlp(4, 5, 3)
    optimizer = Renamed(model.parameters(), lr=1e-2)
    seen: list[int] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    case = Case("renamed", model, optimizer, cross_entropy, classes((4,)))
    case.train(case.batches(2))
    with pytest.raises(UnsupportedOptimizer, match="<lambda>"):
        case.point(hooks="run")
    follows(case, said={"hooks": "ignore"})
    assert len(seen) == 2 + STEPS
