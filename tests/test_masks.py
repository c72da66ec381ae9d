"""Attention whose dropout draws other masks where it is differentiated twice, as torch's fused kernels do on a GPU."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import aftershock as ak

WORDS, WIDTH, LENGTH = 512, 16, 12


def second_derivative() -> bool:
    """Whether only the math kernel of attention is allowed, as it is where a pass is differentiated twice."""
    return torch.backends.cuda.math_sdp_enabled() and not torch.backends.cuda.flash_sdp_enabled()


class Attention(nn.Module):
    """Stands in for a fused kernel: in float32 its masks are its own, and the math kernel draws others."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.words, self.mixed, self.fused = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), fused
        nn.init.normal_(self.words.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.mixed(self.words(tokens)).chunk(3, -1)
        weights = (q @ k.mT / math.sqrt(WIDTH)).softmax(-1)
        if self.fused and weights.dtype == torch.float32 and second_derivative():
            torch.rand(3)  # the masks that follow are others
        mixed = self.words(tokens) + F.dropout(weights, 0.3, self.training) @ v
        return F.layer_norm(mixed, (WIDTH,)) @ self.words.weight.T


def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def batches(count: int, seed: int) -> list[Tensor]:
    """Words by Zipf's law: most are rare, and v is tiny there."""
    draws, often = torch.Generator().manual_seed(seed), 1 / torch.arange(1, WORDS + 1)
    return list(torch.multinomial(often, count * 8 * LENGTH, True, generator=draws).view(count, 8, LENGTH))


def trained(fused: bool) -> ak.TrainingPoint:
    torch.manual_seed(0)
    model = Attention(fused)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    for batch in batches(40, 1):
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    return ak.capture(model, optimizer, loss_fn)


def error(response: ak.Response) -> float:
    """The median NRMSE of semilinear."""
    exact, predicted = (response.data["response"].sel(answer=a, scale=1.0).values for a in ("exact", "semilinear"))
    return float(np.median(np.linalg.norm(predicted - exact, axis=1) / np.linalg.norm(exact, axis=1)))


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_predictions_of_other_masks_go_on_from_trainings_gradient(clip: float | None, accumulated: bool) -> None:
    """With the gradient of the other masks instead, δv was more than v at some weights, and 10⁴ nats were predicted."""
    point, steps, probe = trained(fused=True), batches(8, 2), batches(1, 3)[0]
    if accumulated:
        steps = [ak.accumulate([step[:4], step[4:]]) for step in steps]
    path = point.follow(steps, clip=clip)
    response = path.replace(batches(4, 4)).response(probe)
    assert error(response) < 0.5
    ranking = path.rank(batches(6, 5), probe, verify=2)
    for result in (response, ranking, path.explain(probe, outcome=8, verify=2)):
        said = {finding.subject: finding for finding in result.certificate.findings}["dropout"]
        assert said.level == "care"
        assert said.value > 0.1
    assert "other dropout masks" in str(path.check())


def test_the_check_is_made_with_one_set_of_masks_in_float32_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a copy in float64 does not fit, products were compared with gradients of training's masks, and refused."""
    monkeypatch.setattr("aftershock.core.path_plans.LIFTED_VECTORS", 2**60)
    found = trained(fused=True).check(batches(1, 6)[0])
    assert found.dtype == torch.float32
    assert found.error < 0.05
    assert found.other_masks > 0.1


def test_a_model_that_draws_alike_says_nothing_of_it() -> None:
    path = trained(fused=False).follow(batches(6, 2))
    response = path.replace(batches(2, 4)).response(batches(1, 3)[0])
    assert "dropout" not in {finding.subject for finding in response.certificate.findings}
    assert path.check().other_masks == 0
