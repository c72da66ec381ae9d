"""Schedules of every hyperparameter, equal to the bit to the loop that steps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as rates

import aftershock as ak
from aftershock.errors import (
    InvalidInput,
)

from .cases import make
from .test_path import assert_same_bits

STEPS = 5


# --- schedules of every hyperparameter


class MovesEverything(rates.LRScheduler):
    """What users write to anneal weight decay: lr, weight decay and eps move."""

    def get_lr(self) -> list[float]:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.3 / (1 + self.last_epoch)
            group["eps"] = 1e-3 / (1 + self.last_epoch)
        return [base * 0.9**self.last_epoch for base in self.base_lrs]


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one cycle": lambda o: rates.OneCycleLR(o, 0.1, total_steps=12, cycle_momentum=True),
    "cyclic": lambda o: rates.CyclicLR(o, 1e-3, 1e-1, step_size_up=3, cycle_momentum=True),
    "everything": MovesEverything,
    "lambda": lambda o: rates.LambdaLR(o, [lambda i: 0.8**i, lambda i: 1 / (1 + i)]),
    "restarts": lambda o: rates.CosineAnnealingWarmRestarts(o, 3),
    "sequential": lambda o: rates.SequentialLR(o, [rates.ConstantLR(o, 0.2, 3), rates.ExponentialLR(o, 0.8)], [3]),
    "chained": lambda o: rates.ChainedScheduler([rates.ConstantLR(o, 0.2, 3), rates.ExponentialLR(o, 0.8)]),
    "two of them": lambda o: [rates.ExponentialLR(o, 0.8), MovesEverything(o)],
}
FOLLOWED = ("lr", "betas", "weight_decay", "eps")


@pytest.mark.filterwarnings("ignore:.*epoch parameter.*")
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_is_followed_in_all_it_moves(kind: str) -> None:
    case = make("two_groups")
    scheduler = SCHEDULERS[kind](case.optimizer)
    each = scheduler if isinstance(scheduler, list) else [scheduler]

    def train(batches: list[Any]) -> list[tuple[Any, ...]]:
        seen = []
        for batch in batches:
            seen.append(tuple(case.optimizer.param_groups[0][name] for name in FOLLOWED))
            case.train([batch])
            for one in each:
                one.step()
        return seen

    train(case.batches(2))
    batches = case.batches(STEPS)
    with pytest.raises(InvalidInput, match=r"a scheduler is attached.*lr=scheduler"):
        case.point().follow(batches)
    path = case.point().follow(batches, clip=case.clip, lr=scheduler)
    constant = case.point().follow(batches, clip=case.clip, lr="constant")
    seen = train(batches)
    assert len(set(seen)) > 2, "nothing moves: the test would prove nothing"
    assert_same_bits(case, path, path.trajectory.state(STEPS))
    assert path.losses != constant.losses


VALUES: dict[str, list[Any]] = {
    "weight_decay": [0.5, 0.1, 0.0, 0.3, 0.2],
    "eps": [1e-2, 1e-3, 1e-4, 1e-8, 1e-1],
    "betas": [(0.5, 0.9), (0.9, 0.99), (0.0, 0.5), (0.95, 0.999), (0.8, 0.9)],
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("form", ["one", "list", "function", "per group"])
def test_other_hyperparameters_by_hand(name: str, form: str) -> None:
    case = make("two_groups")
    values = [VALUES[name][0]] * STEPS if form == "one" else VALUES[name]
    second = list(reversed(values)) if form == "per group" else values
    given = {
        "one": values[0],
        "list": values,
        "function": lambda i: values[i],
        "per group": [list(pair) for pair in zip(values, second)],
    }[form]
    batches = case.batches(STEPS)
    path = case.point().follow(batches, clip=case.clip, **{name: given})
    for batch, *each in zip(batches, values, second):
        for group, value in zip(case.optimizer.param_groups, each):
            group[name] = value
        case.train([batch])
    assert_same_bits(case, path, path.trajectory.state(STEPS))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "plateau": ({"lr": "plateau"}, "needs a metric"),
    "word": ({"lr": "cosine"}, "lr is 'cosine'.*\"constant\""),
    "mixture": ({"lr": "mixture"}, "schedulers and a float"),
    "betas": ({"betas": 0.9}, "betas is 0.9"),
    "beta": ({"betas": (0.9, 1.0)}, "below 1"),
    "negative": ({"weight_decay": -0.1}, "zero or positive"),
    "too few": ({"eps": [1e-8]}, "1 values of eps for 2"),
    "groups": ({"weight_decay": [[0.1], [0.1]]}, "the optimizer has 2 groups"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_schedules_that_do_not_fit(kind: str) -> None:
    case = make("two_groups")
    options, words = WRONG[kind]
    if kind == "plateau":
        options = {"lr": rates.ReduceLROnPlateau(case.optimizer)}
    elif kind == "mixture":
        options = {"lr": [rates.ExponentialLR(case.optimizer, 0.9), 0.1]}
    with pytest.raises(InvalidInput, match=words):
        case.point().follow(case.batches(2), **options)


def test_a_checkpoint_remembers_its_scheduler() -> None:
    case = make("tanh_mlp")
    rates.ExponentialLR(case.optimizer, 0.9)
    saved = case.model.state_dict(), case.optimizer.state_dict()
    fresh = make("tanh_mlp")
    point = ak.from_checkpoint(fresh.model, fresh.optimizer, fresh.loss_fn, *saved)
    with pytest.raises(InvalidInput, match="a scheduler is attached"):
        point.follow(case.batches(1))
