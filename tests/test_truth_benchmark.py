"""The benchmark of truth, on a model small enough for a test: its figures are what their names say."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from benchmarks.timing import quiet
from benchmarks.truth import FIGURES, Judged, Size, judge, rho, table, verdict
from benchmarks.truth_models import LETTERS, Batch, Data, Recipe, synthetic_images, synthetic_text, trained
from torch import Tensor, nn

TINY = Size(pool=5, horizon=4, rows=2, explained=4, longest=8, thinner=4)
CPU = torch.device("cpu")


def table_of_letters() -> nn.Module:
    return nn.Embedding(LETTERS, 4)


def squared(model: nn.Module, batch: Batch) -> Tensor:
    """Quadratic in the parameters, so that only AdamW is not linear."""
    letters, targets = batch
    wanted = torch.stack([torch.sin((k + 1.0) * targets) for k in range(4)], -1)
    return (model(letters) - wanted).square().mean()


RECIPE = Recipe("quadratic", table_of_letters, squared, Data.letters, 20, lr=1e-2)


@pytest.fixture(scope="module")
def judged() -> Judged:
    with quiet():
        return judge(RECIPE, Data(thinner=TINY.thinner), TINY, CPU, None)


def test_the_semilinear_answer_is_the_truth_of_a_quadratic(judged: Judged) -> None:
    assert abs(judged.raw["exact"]).max() > 1e-4
    assert judged.figures["semilinear"] < 1e-2  # float32
    assert judged.figures["tangent"] > judged.figures["semilinear"]


def test_every_figure_is_there_and_size_says_how_much_was_done(judged: Judged) -> None:
    assert set(judged.figures) == {figure.name for figure in FIGURES}
    assert judged.steps == TINY.longest
    assert judged.raw["exact"].shape == judged.raw["rank"].shape == (TINY.pool, TINY.horizon)
    assert len(judged.raw["left out"]) == TINY.explained
    assert judged.figures["signed"] == rho(judged.raw["rank"][:, -1], judged.raw["exact"][:, -1])


def test_the_verdict_counts_what_is_not_a_number_as_missed(judged: Judged) -> None:
    lost = Judged("lost", 1, 1, dict.fromkeys(judged.figures, math.nan), {})
    assert "0 of 1 models (all: missed)" in verdict([lost])
    assert ": met" not in verdict([lost])
    assert table([judged, lost], "").row_count == 4


def test_a_kept_point_is_the_trained_one(tmp_path: Path) -> None:
    data = Data(thinner=TINY.thinner)
    plain, first, again = (trained(RECIPE, data, CPU, folder) for folder in (None, tmp_path, tmp_path))
    assert len(list(tmp_path.iterdir())) == 1
    for name, value in plain.parameters.items():
        assert torch.equal(value, first.parameters[name])
        assert torch.equal(value, again.parameters[name])


def test_synthetic_data_can_be_learned() -> None:
    tokens = synthetic_text(LETTERS)
    after = tokens[1:][tokens[:-1] == tokens.mode().values]
    assert after.bincount().topk(4).values.sum() > 0.5 * len(after)
    images = synthetic_images()
    pixels, labels = images.train.batch(torch.arange(len(images.train)), CPU)
    means = torch.stack([pixels[labels == c].mean(0).flatten() for c in range(10)])
    seen, truth = images.test.batch(torch.arange(len(images.test)), CPU)
    nearest = torch.cdist(seen.flatten(1), means).argmin(1)
    assert 0.3 < (nearest == truth).double().mean() < 0.99
