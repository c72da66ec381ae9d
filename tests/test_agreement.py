"""`path.matches`: plain torch loops are equal to the bit, and every trick in a loop is named where it first shows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import aftershock as ak
from aftershock.core.agreement import Match
from aftershock.errors import InvalidInput, Nondeterministic

Batch = tuple[Tensor, Tensor]
STEPS = 5


def squares(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 2))


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


class Heads(nn.Module):
    """The second head is used by batches with a wide input only, and there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.used, self.unused = nn.Linear(6, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return (self.used if len(x) < 100 else self.unused)(torch.tanh(self.body(x)))


class Target(nn.Module):
    """A frozen twin, as target networks have it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 2)
        self.twin = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + 0.1 * self.twin(x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))[:, :2]


class Double(nn.Module):
    """Trains in float64 on batches of float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inside = model.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x.double()).float()


@dataclass
class Run:
    """A live run in the middle of training, and the batches that come."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[Batch]
    kept: dict[str, Any] = field(default_factory=dict)  # what a loop remembers from step to step

    def backward(self, batch: Batch, scale: float = 1.0) -> Tensor:
        self.optimizer.zero_grad()
        loss = squares(self.model, batch)
        (scale * loss).backward()
        return loss

    @property
    def grads(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]


def running(make: Callable[[], nn.Module] = plain, **options: Any) -> Run:
    torch.manual_seed(0)
    model = make()
    trained = [p for p in model.parameters() if p.requires_grad]
    options = {"lr": 1e-2, "weight_decay": 0.1} | options
    optimizer = options.pop("optimizer", torch.optim.AdamW)(trained, **options)
    batches = [(torch.randn(12, 6), torch.randn(12, 2)) for _ in range(STEPS + 3)]
    run = Run(model, optimizer, batches[3:])
    for batch in batches[:3]:
        run.backward(batch)
        optimizer.step()
    return run


Loop = Callable[[Run, int, Batch], None]


def first_parting(run: Run, loop: Loop, **told: Any) -> Match:
    """Follow the path, run the loop, and compare after every step."""
    path = ak.capture(run.model, run.optimizer, squares).follow(run.batches, **told)
    for i, batch in enumerate(run.batches):
        loop(run, i, batch)
        found = path.matches(run.model, run.optimizer)
        if not found:
            return found
    return found


# --- loops that are what they say


def usual(run: Run, i: int, batch: Batch) -> None:
    run.backward(batch)
    run.optimizer.step()


def clipping(run: Run, i: int, batch: Batch) -> None:
    run.backward(batch)
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)
    run.optimizer.step()


def frozen() -> nn.Module:
    model = plain()
    model[0].requires_grad_(False)
    return model


LOOPS: dict[str, tuple[Callable[[], nn.Module], Loop, dict[str, Any], dict[str, Any]]] = {
    "plain": (plain, usual, {}, {}),
    "dropout": (dropout, usual, {}, {}),
    "batchnorm": (normalized, usual, {}, {}),
    "clip told": (plain, clipping, {}, {"clip": 0.05}),
    "fused": (plain, usual, {"fused": True}, {}),
    "foreach": (plain, usual, {"foreach": True}, {}),
    "tied": (Tied, usual, {}, {}),
    "frozen": (frozen, usual, {}, {}),
    "unused head": (Heads, usual, {}, {}),
    "frozen twin": (Target, usual, {}, {}),
    "coupled decay": (plain, usual, {"optimizer": torch.optim.Adam}, {}),
    "maximize": (plain, usual, {"maximize": True, "lr": 1e-3}, {}),
    "float64": (lambda: Double(plain()), usual, {}, {}),
}


@pytest.mark.parametrize("name", LOOPS)
def test_plain_loops_are_equal_to_the_bit(name: str) -> None:
    make, loop, options, told = LOOPS[name]
    found = first_parting(running(make, **options), loop, **told)
    assert found, str(found)
    assert found.steps == STEPS
    assert "equal to the bit after 5 step" in str(found)


@pytest.mark.parametrize("late", [False, True])
def test_a_told_schedule_is_equal_wherever_the_scheduler_is_stepped(late: bool) -> None:
    run = running()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, 0.1, total_steps=20)

    def loop(run: Run, i: int, batch: Batch) -> None:
        if i and not late:
            scheduler.step()
        usual(run, i, batch)
        if late:
            scheduler.step()

    assert first_parting(run, loop, lr=scheduler)


def test_told_accumulation_is_equal() -> None:
    run = running()
    told = [ak.accumulate(run.batches[i : i + 2]) for i in range(3)]
    path = ak.capture(run.model, run.optimizer, squares).follow(told)
    for whole in told:
        run.optimizer.zero_grad()
        for micro in whole.batches:
            (squares(run.model, micro) / 2).backward()
        run.optimizer.step()
        assert path.matches(run.model, run.optimizer)


# --- tricks


def by_value(run: Run, i: int, batch: Batch) -> None:
    run.backward(batch)
    nn.utils.clip_grad_value_(run.model.parameters(), 0.02)
    run.optimizer.step()


def one_edited(run: Run, i: int, batch: Batch) -> None:
    run.backward(batch)
    if i == 1:
        run.model[2].weight.grad.mul_(0.5)
    run.optimizer.step()


def noise(run: Run, i: int, batch: Batch) -> None:
    run.backward(batch)
    for grad in run.grads:
        grad.add_(0.01 * torch.randn(grad.shape, generator=torch.Generator().manual_seed(i)))
    run.optimizer.step()


def divided(run: Run, i: int, batch: Batch) -> None:
    run.backward(batch, 1 / 4)
    run.optimizer.step()


def unscaled(run: Run, i: int, batch: Batch) -> None:
    run.backward(batch, 1024.0)
    run.optimizer.step()


def not_cleared(run: Run, i: int, batch: Batch) -> None:
    if i == 0:
        run.optimizer.zero_grad()
    squares(run.model, batch).backward()
    run.optimizer.step()


def cleared_early(run: Run, i: int, batch: Batch) -> None:
    run.backward(batch)
    if i == 1:
        run.optimizer.zero_grad(set_to_none=False)
    run.optimizer.step()


def lowered(run: Run, i: int, batch: Batch) -> None:
    run.optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=i >= 2):
        loss = squares(run.model, batch)
    loss.backward()
    run.optimizer.step()


def left_in_eval(run: Run, i: int, batch: Batch) -> None:
    if i == 2:
        run.model.eval()
    usual(run, i, batch)


def logged(run: Run, i: int, batch: Batch) -> None:
    usual(run, i, batch)
    if i == 3:
        with torch.no_grad():
            run.model(batch[0])


def lookahead(run: Run, i: int, batch: Batch) -> None:
    slow = run.kept.setdefault("slow", [p.detach().clone() for p in run.model.parameters()])
    usual(run, i, batch)
    if i == 2:
        with torch.no_grad():
            for p, old in zip(run.model.parameters(), slow):
                p.copy_(old + 0.5 * (p - old))


def moving_average(run: Run, i: int, batch: Batch) -> None:
    average = run.kept.setdefault("average", [p.detach().clone() for p in run.model.parameters()])
    usual(run, i, batch)
    with torch.no_grad():
        for p, kept in zip(run.model.parameters(), average):
            kept.lerp_(p, 0.3)
            if i == 3:
                p.copy_(kept)


def moved_decay(run: Run, i: int, batch: Batch) -> None:
    if i == 1:
        run.optimizer.param_groups[0]["weight_decay"] = 0.3
    usual(run, i, batch)


def decay_by_hand(run: Run, i: int, batch: Batch) -> None:
    usual(run, i, batch)
    with torch.no_grad():
        for p in run.model.parameters():
            p.mul_(1 - 1e-3)


def rate_by_hand(run: Run, i: int, batch: Batch) -> None:
    """Warm-up written into the loop: the rate is put back before anyone looks."""
    run.optimizer.param_groups[0]["lr"] = 5e-3 if i == 2 else 1e-2
    usual(run, i, batch)
    run.optimizer.param_groups[0]["lr"] = 1e-2


def scheduled(run: Run, i: int, batch: Batch) -> None:
    usual(run, i, batch)
    run.optimizer.param_groups[0]["lr"] *= 0.9


def moved_betas(run: Run, i: int, batch: Batch) -> None:
    run.optimizer.param_groups[0]["betas"] = (0.8, 0.999) if i == 1 else (0.9, 0.999)
    usual(run, i, batch)
    run.optimizer.param_groups[0]["betas"] = (0.9, 0.999)


def moved_eps(run: Run, i: int, batch: Batch) -> None:
    run.optimizer.param_groups[0]["eps"] = 1e-4
    usual(run, i, batch)


def clamping(run: Run, i: int, batch: Batch) -> None:
    usual(run, i, batch)
    with torch.no_grad():
        for p in run.model.parameters():
            p.clamp_(-0.2, 0.2)


def zero_kept(run: Run, i: int, batch: Batch) -> None:
    if i == 0:
        for p in run.model.unused.parameters():
            p.grad = torch.zeros_like(p)
    run.optimizer.zero_grad(set_to_none=False)
    squares(run.model, batch).backward()
    run.optimizer.step()


def skipping(run: Run, i: int, batch: Batch) -> None:
    run.backward(batch)
    if i != 1:
        run.optimizer.step()


def resetting(run: Run, i: int, batch: Batch) -> None:
    if i == 2:
        for state in run.optimizer.state.values():
            state["exp_avg"].zero_()
    usual(run, i, batch)


def penalty(run: Run, i: int, batch: Batch) -> None:
    run.optimizer.zero_grad()
    (squares(run.model, batch) + 0.05 * sum(p.square().sum() for p in run.model.parameters())).backward()
    run.optimizer.step()


def shuffled(run: Run, i: int, batch: Batch) -> None:
    usual(run, i, run.batches[(0, 3, 2, 1, 4)[i]])


def part_clipped(run: Run, i: int, batch: Batch) -> None:
    run.backward(batch)
    nn.utils.clip_grad_norm_(run.model[0].parameters(), 0.01)
    run.optimizer.step()


def target_update(run: Run, i: int, batch: Batch) -> None:
    usual(run, i, batch)
    with torch.no_grad():
        for twin, p in zip(run.model.twin.parameters(), run.model.net.parameters()):
            twin.lerp_(p, 0.1)


def drawing_after(run: Run, i: int, batch: Batch) -> None:
    usual(run, i, batch)
    if i == 1:
        torch.rand(())


def drawing_before(run: Run, i: int, batch: Batch) -> None:
    if i == 2:
        torch.rand(())
    usual(run, i, batch)


def writing_v(run: Run, i: int, batch: Batch) -> None:
    usual(run, i, batch)
    if i == 1:
        for state in run.optimizer.state.values():
            state["exp_avg_sq"].mul_(1.5)


TRICKS: dict[str, tuple[Callable[[], nn.Module], Loop, int, str, str]] = {
    "clip": (plain, clipping, 0, "gradient", "a missing clip=0.05"),
    "by value": (plain, by_value, 0, "gradient", "by value"),
    "one gradient edited": (plain, one_edited, 1, "gradient", "edited in place (0.5 times"),
    "noise": (plain, noise, 0, "gradient", "edits gradients in place"),
    "cleared too early": (plain, cleared_early, 1, "gradient", "zero_grad() stands between"),
    "loss divided": (plain, divided, 0, "gradient", "divides the loss by 4"),
    "loss multiplied": (plain, unscaled, 0, "gradient", "multiplied by 1024"),
    "no zero_grad": (plain, not_cleared, 1, "gradient", "zero_grad() is missing"),
    "autocast": (plain, lowered, 2, "gradient", "autocast to bfloat16"),
    "eval": (dropout, left_in_eval, 2, "gradient", "eval mode"),
    "eval with running statistics": (normalized, left_in_eval, 2, "gradient", "eval mode"),
    "forward for a log": (normalized, logged, 3, "buffer", "1 more time"),
    "lookahead": (plain, lookahead, 2, "weights", "Lookahead"),
    "average swapped in": (plain, moving_average, 3, "weights", "average"),
    "decay moved": (plain, moved_decay, 1, "decay", "weight_decay of group 0 is 0.3, not the path's 0.1"),
    "decay by hand": (plain, decay_by_hand, 0, "decay", "weight decay"),
    "rate by hand": (plain, rate_by_hand, 2, "hyperparameter", "lr of group 0 was 0.005"),
    "schedule not told": (plain, scheduled, 1, "hyperparameter", "lr of group 0 is 0.009"),
    "betas": (plain, moved_betas, 1, "hyperparameter", "beta1 was 0.8"),
    "eps": (plain, moved_eps, 0, "hyperparameter", "eps of group 0 is 0.0001"),
    "clamped": (plain, clamping, 0, "weights", "clamped at 0.2"),
    "zeros for None": (Heads, zero_kept, 0, "count", "set_to_none"),
    "a step skipped": (plain, skipping, 1, "gradient", "skipped"),
    "reset": (plain, resetting, 2, "moments", "resets m"),
    "v written": (plain, writing_v, 1, "moments", "wrapper"),
    "penalty": (plain, penalty, 0, "gradient", "L2"),
    "batches out of order": (plain, shuffled, 1, "gradient", "batch of step 3"),
    "a part clipped": (plain, part_clipped, 0, "gradient", "clipping of a part"),
    "target network": (Target, target_update, 0, "weights", "target network"),
    "draws after": (dropout, drawing_after, 2, "random", "draws"),
    "draws before": (dropout, drawing_before, 2, "gradient", "random numbers"),
}


@pytest.mark.parametrize("name", TRICKS)
def test_a_trick_is_named_at_its_first_step(name: str) -> None:
    make, loop, step, quantity, word = TRICKS[name]
    found = first_parting(running(make), loop)
    assert not found
    assert (found.step, found.quantity) == (step, quantity), str(found)
    assert word in found.cause, str(found)
    assert f"at step {step}" in str(found)


def test_one_comparison_at_the_end_says_what_it_cannot_know() -> None:
    run = running()
    path = ak.capture(run.model, run.optimizer, squares).follow(run.batches)
    for i, batch in enumerate(run.batches):
        divided(run, i, batch)
    found = path.matches(run.model, run.optimizer)
    assert not found
    assert (found.step, found.since, found.quantity) == (4, 0, "gradient")
    assert "between step 0 and 4" in str(found)
    assert "Call matches() after every step" in str(found)


def test_rounding_is_told_from_everything_else() -> None:
    def permuted(run: Run, i: int, batch: Batch) -> None:
        usual(run, i, (batch[0].flip(0), batch[1].flip(0)))

    found = first_parting(running(), permuted)
    assert not found
    assert found.rounding
    assert found.difference < 1e-5
    assert "rounding" in found.cause
    assert not first_parting(running(), divided).rounding


def test_a_generator_of_loss_fns_own_is_named() -> None:
    run, drawn = running(), np.random.default_rng(0)

    def noisy(model: nn.Module, batch: Batch) -> Tensor:
        return squares(model, (batch[0] + 0.1 * float(drawn.normal()), batch[1]))

    with pytest.raises(Nondeterministic, match="`drawn`"):
        ak.capture(run.model, run.optimizer, noisy).follow(run.batches)


def test_an_untold_clip_is_told_from_a_path_that_clips_alone() -> None:
    found = first_parting(running(), usual, clip=0.05)
    assert (found.step, found.quantity) == (0, "gradient")
    assert "the loop does not clip, and the path does" in found.cause
    found = first_parting(running(), clipping, clip=0.1)
    assert "clip=0.1, where the loop clips at 0.05" in found.cause


def test_a_scheduler_that_the_loop_does_not_step_is_named() -> None:
    run = running()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
    found = first_parting(run, usual, lr=scheduler)
    assert (found.step, found.quantity) == (1, "hyperparameter")
    assert "lr of group 0 is 0.01, not the path's 0.005" in found.cause


def test_nothing_of_the_live_run_is_touched() -> None:
    run = running(dropout)
    path = ak.capture(run.model, run.optimizer, squares).follow(run.batches)
    left_in_eval(run, 2, run.batches[0])
    before = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict(), run.grads))
    random = torch.get_rng_state()
    assert not path.matches(run.model, run.optimizer)
    after = (run.model.state_dict(), run.optimizer.state_dict(), run.grads)
    leaves = torch.utils._pytree.tree_leaves
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(leaves(before), leaves(after)))
    assert torch.equal(random, torch.get_rng_state())
    assert not run.model.training


def test_what_cannot_be_compared_is_refused() -> None:
    run = running()
    path = ak.capture(run.model, run.optimizer, squares).follow(run.batches[:1])
    with pytest.raises(InvalidInput, match="has made no step"):
        path.matches(run.model, run.optimizer)
    for i in range(2):
        usual(run, i, run.batches[i])
    with pytest.raises(InvalidInput, match="has made 2 steps"):
        path.matches(run.model, run.optimizer)
    with pytest.raises(InvalidInput, match="the captured model"):
        path.matches(nn.Linear(6, 2), run.optimizer)


class Lookahead:
    """A wrapper as they are published: every second step goes half way back to where the first of the two began."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.made = optimizer, 0
        self.slow = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]

    def step(self) -> None:
        self.optimizer.step()
        self.made += 1
        if self.made % 2 == 0:
            for p, slow in zip(self.optimizer.param_groups[0]["params"], self.slow):
                p.data.copy_(slow.lerp_(p.data, 0.5))


def test_a_wrapper_around_the_optimizer_is_named() -> None:
    run = running()
    path = ak.capture(run.model, run.optimizer, squares).follow(run.batches)
    wrapper = Lookahead(run.optimizer)
    for i in range(2):
        run.backward(run.batches[i])
        wrapper.step()
        found = path.matches(run.model, wrapper)  # type: ignore[arg-type]
        assert bool(found) == (i == 0)
    assert (found.step, found.quantity) == (1, "weights")
    assert "Lookahead" in found.cause
