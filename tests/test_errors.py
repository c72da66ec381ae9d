"""Bad input gets a clear error of the family AftershockError, and nothing of the user's changes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import aftershock as ak
from aftershock.errors import (
    AftershockError,
    InvalidInput,
    InvalidLoss,
    MixedDevices,
    NotFinite,
    UnsupportedClipping,
)

from .cases import Case, make
from .test_capture import assert_same, fingerprint


@pytest.fixture
def case() -> Case:
    return make("tanh_mlp")


def nan_batch(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = case.batch()
    return x * math.nan, y


CALLS = {
    "empty path": (lambda c: c.point().follow([]), InvalidInput, "path is empty"),
    "batch the loss rejects": (
        lambda c: c.point().follow([c.batch(), (torch.randn(6, 9).double(), c.batch()[1])]),
        InvalidLoss,
        "loss_fn failed at step 1 .*mat1 and mat2",
    ),
    "not a batch": (lambda c: c.point().follow([None]), InvalidLoss, "loss_fn failed at step 0"),
    "NaN in a batch": (
        lambda c: c.point().follow([c.batch(), nan_batch(c)]),
        NotFinite,
        "loss at step 1 .* is nan",
    ),
    "NaN in a replacement": (
        lambda c: c.path(3).replace([nan_batch(c)], 1).response(c.batch()),
        NotFinite,
        "replaces step 1",
    ),
    "NaN in the probe": (lambda c: c.path(3).skip(0).response(nan_batch(c)), NotFinite, "the probe is nan"),
    "NaN in the pool": (
        lambda c: c.path(3).rank([c.batch(), nan_batch(c)], c.batch()),
        NotFinite,
        "batch 1 of the pool",
    ),
    "horizon past the end": (
        lambda c: c.path(3).skip(1).response(c.batch(), horizon=3),
        InvalidInput,
        "past the end",
    ),
    "no horizon left for own loss": (
        lambda c: c.path(3).skip(2).response(ak.own_loss),
        InvalidInput,
        "no state after",
    ),
    "step not on the path": (lambda c: c.path(3).skip(3), InvalidInput, "step 3 is not on this path of 3"),
    "propagate outside": (lambda c: c.path(3).propagate(1, 5), InvalidInput, "leaves this path"),
    "wrong vector": (
        lambda c: c.path(2).perturb(torch.zeros(4)),
        InvalidInput,
        r"43 coordinates; got shape \(4,\)",
    ),
    "wrong tensor": (
        lambda c: c.path(2).perturb({"0.weight": torch.zeros(2, 2)}),
        InvalidInput,
        r"'0.weight' has shape \(5, 4\)",
    ),
    "unknown parameter": (
        lambda c: c.path(2).perturb({"nope": torch.zeros(2)}),
        InvalidInput,
        "not a trainable",
    ),
    "not a vector": (lambda c: c.path(2).perturb("xi"), InvalidInput, "a perturbation is"),
    "no replacement": (lambda c: c.path(2).replace([]), InvalidInput, "at least one batch"),
    "unknown hyperparameter": (lambda c: c.path(2).set(0, momentum=0.1), InvalidInput, "'momentum' is not"),
    "no hyperparameter": (lambda c: c.path(2).set(0), InvalidInput, "needs a hyperparameter"),
    "lists of two lengths": (
        lambda c: c.path(2).set(0, lr=[1, 2], eps=[1, 2, 3]),
        InvalidInput,
        "same length",
    ),
    "no values": (lambda c: c.path(2).set(0, lr=[]), InvalidInput, "of one or more"),
    "a rate in words": (lambda c: c.path(2).set(0, lr="0.1"), InvalidInput, "lr is '0.1'"),
    "a list of words": (lambda c: c.path(2).set(0, lr=["0.1"]), InvalidInput, "expected numbers"),
    "a negative rate": (lambda c: c.path(2).set(0, lr=-0.1), InvalidInput, "must be zero or positive"),
    "a rate that is no number": (lambda c: c.path(2).set(0, lr=[0.1, math.nan]), InvalidInput, "zero or positive"),
    "a decay of 1": (lambda c: c.path(2).set(0, beta2=1.0), InvalidInput, "beta2 is 1.0; it must be at least 0 and"),
    "unknown moment": (lambda c: c.path(2).reset(0, "w"), InvalidInput, '"m", "v" or "mv"'),
    "scale of a skip": (
        lambda c: c.path(2).skip(0).response(c.batch(), scales=[0.5]),
        InvalidInput,
        "no scale",
    ),
    "zero scale": (lambda c: c.path(2).zero(0).response(c.batch(), scales=[0.0]), InvalidInput, "nonzero"),
    "unknown answer": (
        lambda c: c.path(2).skip(0).response(c.batch(), answers=("magic",)),
        InvalidInput,
        "answers are",
    ),
    "labels": (
        lambda c: c.path(2).skip(0).response(c.batch(), labels=["a", "b"]),
        InvalidInput,
        "different labels",
    ),
    "too few rates": (
        lambda c: c.point().follow(c.batches(3), lr=[0.1]),
        InvalidInput,
        "1 values of lr for 3",
    ),
    "negative rate": (lambda c: c.point().follow(c.batches(1), lr=-1.0), InvalidInput, "zero or positive"),
    "rates per group": (lambda c: c.point().follow(c.batches(1), lr=[[1, 2]]), InvalidInput, "has 1 groups"),
    "plateau": (
        lambda c: c.point().follow(c.batches(1), lr=torch.optim.lr_scheduler.ReduceLROnPlateau(c.optimizer)),
        InvalidInput,
        "as a list",
    ),
    "clipping by value": (
        lambda c: c.point().follow(c.batches(1), clip={"value": 1}),
        UnsupportedClipping,
        "by value",
    ),
    "clipping per group": (
        lambda c: c.point().follow(c.batches(1), clip=[1.0, 2.0]),
        UnsupportedClipping,
        "per group",
    ),
    "clipping by zero": (lambda c: c.point().follow(c.batches(1), clip=0.0), UnsupportedClipping, "positive"),
    "memory": (lambda c: c.point().follow(c.batches(1), memory="lots"), InvalidInput, "8GiB"),
    "keep": (lambda c: c.point().follow(c.batches(1), keep="all"), InvalidInput, "keep is"),
    "random states": (lambda c: c.point().follow(c.batches(2), random=[]), InvalidInput, "0 random states"),
    "empty accumulation": (lambda c: ak.accumulate([]), InvalidInput, "at least one"),
    "short sampler": (
        lambda c: ak.accumulate(c.batches(2), draws=3),
        InvalidInput,
        "needs 3 batches; the source gave 2",
    ),
    "weights": (lambda c: ak.accumulate(c.batches(2), weights=[1.0]), InvalidInput, "1 weights for 2"),
}


@pytest.mark.parametrize("name", CALLS)
def test_bad_input(case: Case, name: str) -> None:
    call, error, words = CALLS[name]
    before = fingerprint(case)
    random = torch.get_rng_state()
    with pytest.raises(error, match=words) as caught:
        call(case)
    assert isinstance(caught.value, AftershockError)
    torch.set_rng_state(random)  # the case itself draws batches
    assert_same(before, fingerprint(case))


LOSSES = {
    "vector": (
        lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"),
        InvalidLoss,
        r"returned shape \(6,\)",
    ),
    "number": (lambda m, b: 1.0, InvalidLoss, "returned float"),
    "integer": (lambda m, b: m(b[0]).argmax(), InvalidLoss, "one floating-point number"),
    "detached": (lambda m, b: m(b[0]).sum().detach(), InvalidLoss, "has no gradient"),
    "infinite": (lambda m, b: m(b[0]).sum() / 0.0, NotFinite, "is (-)?inf"),
    "raises": (lambda m, b: [][1], InvalidLoss, "IndexError"),
    "wrong device": (lambda m, b: m(b[0].to("meta")).sum(), InvalidLoss, "loss_fn failed|has no"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_bad_losses(case: Case, name: str) -> None:
    loss_fn, error, words = LOSSES[name]
    point = ak.capture(case.model, case.optimizer, loss_fn)
    with pytest.raises(
        (error, MixedDevices) if name == "wrong device" else error,
        match=None if name == "wrong device" else words,
    ):
        point.follow(case.batches(2))


def test_a_loss_that_uses_another_model(case: Case) -> None:
    """A closure over the live model would silently ignore the captured parameters."""
    live = case.model
    with pytest.raises(InvalidLoss, match="uses the live model through `live`"):
        ak.capture(case.model, case.optimizer, lambda m, b: F.cross_entropy(live(b[0]), b[1]))
    point = ak.capture(case.model, case.optimizer, lambda m, b: torch.ones((), requires_grad=True) * 2)
    with pytest.raises(InvalidLoss, match="does not depend on any parameter of the model it was given"):
        point.follow(case.batches(1))


def test_a_gradient_that_is_not_finite_names_the_parameter() -> None:
    model = nn.Linear(3, 1, bias=False)
    point = ak.capture(model, torch.optim.AdamW(model.parameters()), lambda m, b: (m(b).sum() * 0.0).abs().sqrt())
    with pytest.raises(NotFinite, match="gradient of weight at step 0"):
        point.follow([torch.randn(2, 3)])


def test_a_shocked_run_that_diverges_names_the_change_and_the_step(case: Case) -> None:
    path = case.path(3)

    def exploding(m: nn.Module, b: tuple) -> torch.Tensor:
        return F.cross_entropy(m(b[0]), b[1]) + torch.exp(m[0].weight.abs().max() * 100 - 600)

    point = ak.capture(case.model, case.optimizer, exploding)
    path = point.follow(case.batches(3))
    response = path.set(0, lr=1e4).response(lambda m: m[0].weight.sum(), answers=("exact",))
    assert np.isinf(response.exact.values[0, 0]).any()
    assert "left the finite numbers" in str(response) or "diverge" in str(response)
