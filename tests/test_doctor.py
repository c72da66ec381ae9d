"""`doctor`: what it says of models whose answer is known, and that it leaves them alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import aftershock as ak
from aftershock.commands.building import Built, build
from aftershock.commands.doctor import Finding, examine
from aftershock.commands.loop import prove_loop
from aftershock.errors import ExamplesCouple, InvalidInput
from aftershock.recorder.records import decode, encode

from .cases import TinyTransformer
from .test_cli import call, failed


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def built(model: nn.Module, loss_fn: Callable[..., Tensor] = squares, batch: Any = None, **options: Any) -> Built:
    optimizer = options.pop("optimizer", torch.optim.AdamW)(model.parameters(), **options)
    batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)) if batch is None else batch
    return Built(model, loss_fn, optimizer, batch)


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.subject: finding.level for finding in findings}


def text(findings: list[Finding], subject: str) -> str:
    return next(finding.text for finding in findings if finding.subject == subject)


class Everything(nn.Module):
    """Tied weights, batch normalization, dropout, ReLU, attention, and rows that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm, self.drop, self.table = nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Embedding(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(torch.relu(self.norm(self.second(self.first(x))))) + self.table.weight[0]
        return F.scaled_dot_product_attention(y[None, None], y[None, None], y[None, None])


def test_what_a_model_is_made_of_is_named() -> None:
    torch.manual_seed(0)
    found = examine(built(Everything(), lr=1e-2))
    expected = {
        "optimizer": "supported", "clipping": "note", "tied weights": "supported", "attention": "approximated",
        "dropout": "supported", "batch normalization": "supported", "kinks": "approximated",
        "Hessian products": "supported", "recording": "supported", "replay": "supported", "v = 0": "approximated",
    }  # fmt: skip
    assert levels(found) == expected
    assert "flash" in text(found, "attention")
    assert "relu ×1" in text(found, "kinks")
    assert "to the bit" in text(found, "replay")
    # rows 1–4 of the table; the weights of what was zeroed by ReLU for all examples may come on top
    assert int(text(found, "v = 0").split(" of ")[0]) >= 16
    # θ, m and v of 16 + 4 + 4 + 4 + 4 + 20 float32 numbers at least, and a batch of 24
    assert "On disk 96 B per batch" in text(found, "recording")


@pytest.mark.parametrize(
    ("layer", "subject"), [(nn.Dropout(0.2), "dropout"), (nn.BatchNorm1d(4), "batch normalization")]
)
def test_what_is_said_of_single_examples_is_what_happens(layer: nn.Module, subject: str) -> None:
    """ "Ranked one by one" it said, where they are refused."""
    torch.manual_seed(0)
    run = built(nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 1)), lr=1e-2)
    assert "rank_examples refuses" in text(examine(run), subject)
    path = ak.capture(run.model, run.optimizer, squares).follow([run.batch] * 3)
    with pytest.raises(ExamplesCouple):
        path.rank_examples([run.batch], run.batch)


def test_a_loop_that_draws_is_told_where_it_may() -> None:
    """In loss_fn from torch's generator, outside of it from another one: it was told to draw in loss_fn from another
    one, which is refused."""

    def mixing(generator: torch.Generator | None) -> Callable[..., Tensor]:
        def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
            torch.rand((), generator=generator)  # for the next batch
            optimizer.zero_grad()
            loss = squares(model, batch)
            loss.backward()
            optimizer.step()
            return loss

        return train_step

    found = []
    for generator in (None, torch.Generator()):
        torch.manual_seed(0)
        run = built(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 1)), lr=1e-2)
        run = replace(run, batches=[run.batch] * 3, train_step=mixing(generator))
        found += prove_loop(run)
    assert (found[0].level, found[1].level) == ("refused", "supported")
    assert "in loss_fn from torch's generator, outside of it from one of your own" in found[0].text


def test_a_batch_lies_in_memory_as_it_was_fed() -> None:
    """Kernels choose by stride and alignment, and round differently: a file's bytes have neither."""
    batch = torch.randn(5, 3, 9, 9).to(memory_format=torch.channels_last)
    structure, (kept,) = encode(batch)
    read = torch.empty(kept.numel() + 1)[1:].view(kept.shape).copy_(kept)  # as from a file: plain, off by four bytes
    again = decode(structure, [read], torch.device("cpu"))
    assert torch.equal(again, batch)
    assert again.stride() == batch.stride()
    assert read.data_ptr() % 64 != 0
    assert again.data_ptr() % 64 == 0


def test_a_plain_model_has_nothing_approximated() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    options = {"optimizer": torch.optim.Adam, "weight_decay": 0.1, "fused": True}
    found = examine(built(model, batch=torch.randn(6, 4, dtype=torch.float64), **options))
    assert set(levels(found).values()) == {"supported", "note"}
    assert "Adam with coupled decay" in text(found, "optimizer")
    assert "fused" in text(found, "optimizer")


def test_numbers_drawn_before_the_model_is_called_are_told_and_replayed() -> None:
    found = examine(built(nn.Linear(4, 1), lambda m, b: m(b + torch.randn_like(b)).square().mean()))
    assert "recorder.before_forward()" in text(found, "random numbers")
    assert levels(found)["replay"] == "supported"
    assert "random numbers" not in levels(examine(built(nn.Linear(4, 1))))


def test_math_attention_and_eval_mode_are_seen() -> None:
    model = TinyTransformer()
    ids = torch.randint(0, 5, (2, 4))
    found = levels(examine(built(model, lambda m, b: m(b).square().mean(), ids)))
    assert "refused" not in found.values()
    found = levels(examine(built(Everything().eval())))
    assert found["mode"] == "note"
    assert "dropout" not in found
    assert "batch normalization" not in found


def test_low_precision_is_seen() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch).float().square().mean()

    assert "bfloat16" in text(examine(built(nn.Linear(4, 2), loss)), "precision")


def test_a_model_and_everything_around_it_stay_as_they_are() -> None:
    made = built(Everything(), lr=1e-2)
    assert made.optimizer is not None
    squares(made.model, made.batch).backward()
    made.optimizer.step()
    before = copy.deepcopy((made.model.state_dict(), made.optimizer.state_dict(), made.batch))
    grads = [p.grad.clone() for p in made.model.parameters() if p.grad is not None]
    random = torch.get_rng_state()
    examine(made)
    after = (made.model.state_dict(), made.optimizer.state_dict(), made.batch)
    for a, b in zip(torch.utils._pytree.tree_leaves(before), torch.utils._pytree.tree_leaves(after), strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
    kept = [p.grad for p in made.model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(grads, kept, strict=True))
    assert torch.equal(random, torch.get_rng_state())
    assert not made.model._forward_pre_hooks


class Private(nn.Module):
    """Draws from a generator of its own: no replay repeats it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seed = nn.Linear(4, 2), 0

    def forward(self, x: Tensor) -> Tensor:
        self.seed += 1
        return self.layer(x) * torch.rand((), generator=torch.Generator().manual_seed(self.seed))


class Straight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y + (y.sin() - y).detach()


def test_what_cannot_be_trusted_is_refused() -> None:
    found = examine(built(nn.Linear(4, 2), optimizer=torch.optim.SGD))
    assert (found[0].level, "SGD" in found[0].text) == ("refused", True)
    assert levels(found)["replay"] == "supported"  # the rest is looked at with AdamW
    found = examine(built(Straight(), optimizer=torch.optim.SGD))
    assert [f.subject for f in found if f.level == "refused"] == ["optimizer", "Hessian products"]
    found = examine(built(Private()))
    assert ["`seed`" in f.text for f in found if f.level == "refused"] == [True]  # said once
    assert levels(examine(built(Straight())))["Hessian products"] == "refused"
    assert "boom" in examine(built(nn.Linear(4, 2), lambda m, b: 1 / 0 if b is None else _boom()))[-1].text


def _boom() -> Tensor:
    raise RuntimeError("boom")


SCRIPT = """
import torch
from torch import nn


def build():
    model = nn.Linear(3, 1)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "batch": torch.ones(2, 3),
            "loss_fn": lambda model, batch: model(batch).square().mean()}


def sgd():
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters()), lambda model, batch: model(batch).mean(), torch.ones(2, 3)


def unfinished():
    model = nn.Linear(3, 1)
    return model, torch.optim.AdamW(model.parameters()), lambda model, batch: model(batch).mean()
"""


def test_a_loss_that_is_not_finite_is_not_blamed_on_the_loop() -> None:
    found = examine(built(nn.Linear(4, 2), lambda m, b: (-m(b).square().mean()).log()))
    assert "the loss at the batch is nan" in [finding.text for finding in found if finding.level == "refused"]
    assert not [finding for finding in found if finding.subject in ("replay", "recording")]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_project.py").write_text(SCRIPT)
    (tmp_path / "unwell.py").write_text("import absent_package\n")
    monkeypatch.chdir(tmp_path)
    result = call("doctor", "a_project:build")
    assert result.exit_code == 0, result.stderr
    assert "supported" in result.stdout
    assert "to the bit" in " ".join(result.stdout.split())
    result = call("doctor", "a_project:sgd")
    assert result.exit_code == 1
    assert "refused" in result.stdout
    assert "Traceback" not in result.stderr
    assert "does not return batch" in failed(call("doctor", "a_project:unfinished"))
    assert "importing 'unwell' failed: No module named 'absent_package'" in failed(call("doctor", "unwell:build"))


def test_a_file_alone_stands_for_its_function_build(tmp_path: Path) -> None:
    script = "import torch\ndef {}():\n    m = torch.nn.Linear(3, 1)\n    return m, lambda m, b: m(b).mean()\n"
    (tmp_path / "train_alone.py").write_text(script.format("build"))
    assert build(str(tmp_path / "train_alone.py")).model.in_features == 3
    (tmp_path / "train_other.py").write_text(script.format("make"))
    assert build(str(tmp_path / "train_other.py:make")).model.in_features == 3
    with pytest.raises(InvalidInput, match="has no function 'build'"):
        build(str(tmp_path / "train_other.py"))
