"""Exact answers wherever training works: each equal to the bit to a second training run, written by hand."""

from __future__ import annotations

import copy
from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import aftershock as ak
from aftershock.core.batches import Accumulated, example_count, merged_examples, take_examples
from aftershock.errors import InvalidInput, InvalidLoss, UnsupportedModel, WrongHessian
from aftershock.recorder.records import decode, encode

Batch = Any


def data(size: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3), torch.randint(0, 3, (size,))


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def network(*middle: nn.Module, first: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(first or nn.Linear(3, 8), *middle, nn.Tanh(), nn.Linear(8, 3))


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        return network(first=nn.utils.weight_norm(nn.Linear(3, 8)))


class Quantized(nn.Module):
    """Vector quantization with a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(3, 4), nn.Linear(4, 3)
        self.book = nn.Parameter(torch.randn(5, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.encode(x)
        q = self.book[torch.cdist(h, self.book).argmin(1)]
        drift = (q - h.detach()).square().mean() + 0.25 * (q.detach() - h).square().mean()
        return self.decode(h + (q - h).detach()), drift


def quantized_loss(model: nn.Module, batch: Batch) -> Tensor:
    out, drift = model(batch[0])
    return F.cross_entropy(out, batch[1]) + drift


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last(h / h.detach().norm(dim=1, keepdim=True))


def penalized(model: nn.Module, batch: Batch) -> Tensor:
    """A gradient penalty: the loss differentiates inside."""
    x = batch[0].clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.cross_entropy(out, batch[1]) + slope.square().sum(1).mean()


def decayed(model: nn.Module, batch: Batch) -> Tensor:
    """A decay of what is trainable: parameters look as they do in training wherever the loss is computed."""
    return cross_entropy(model, batch) + 0.1 * sum(p.square().sum() for p in model.parameters() if p.requires_grad)


def margins(model: nn.Module, batch: Batch) -> Tensor:
    """A loss of torch's that has no second derivative."""
    return F.multi_margin_loss(model(batch[0]), batch[1])


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Batch], Tensor]]] = {
    "plain": (network, cross_entropy),
    "weight_norm": (lambda: network(first=parametrizations.weight_norm(nn.Linear(3, 8))), cross_entropy),
    "old weight_norm": (old_weight_norm, cross_entropy),
    "spectral_norm": (lambda: network(first=parametrizations.spectral_norm(nn.Linear(3, 8))), cross_entropy),
    "old spectral_norm": (lambda: network(first=nn.utils.spectral_norm(nn.Linear(3, 8))), cross_entropy),
    "vector quantization": (Quantized, quantized_loss),
    "detach": (Detached, cross_entropy),
    "gradient penalty": (network, penalized),
    "decay of what is trainable": (network, decayed),
    "batch norm": (lambda: network(nn.BatchNorm1d(8)), cross_entropy),
    "margins": (network, margins),
}
BAD_HESSIAN = {"weight_norm", "old weight_norm", "old spectral_norm", "vector quantization", "detach"}


class Run:
    """A live run with warm moments, and a plain training loop."""

    def __init__(self, name: str, clip: float | None = None) -> None:
        torch.manual_seed(0)
        self.build, self.loss_fn = MODELS[name]
        self.model, self.clip = self.build(), clip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.train([data() for _ in range(3)])

    def twin(self) -> Run:
        """A second run at the same state, as a checkpoint restores it."""
        other = copy.copy(self)
        other.model = self.build()
        other.model.load_state_dict(self.model.state_dict())
        other.optimizer = torch.optim.AdamW(other.model.parameters(), lr=0.02)
        other.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        return other

    def train(self, batches: list[Batch]) -> None:
        for batch in batches:
            self.optimizer.zero_grad()
            parts = batch.batches if isinstance(batch, Accumulated) else [batch]
            for part in parts:
                loss = self.loss_fn(self.model, part)
                (loss / len(parts) if isinstance(batch, Accumulated) else loss).backward()
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()

    def path(self, batches: list[Batch]) -> ak.Path:
        return ak.capture(self.model, self.optimizer, self.loss_fn).follow(batches, clip=self.clip)

    def watched(self, batches: list[Batch], probe: Callable[[nn.Module], float]) -> list[float]:
        """The probe after every step of a copy of this run; it is given a copy too."""
        run, found = self.twin(), []
        for batch in batches:
            run.train([batch])
            found.append(probe(run.twin().model))
        return found


def plain_response(run: Run, batches: list[Batch], other: Batch, probe: Callable[[nn.Module], float]) -> list[float]:
    control, changed = (run.watched([first, *batches[1:]], probe) for first in (batches[0], other))
    return [b - a for a, b in zip(control, changed)]


@pytest.mark.parametrize("clip", [None, 0.4])
@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_exact_answers_are_a_second_training_run(name: str, accumulated: bool, clip: float | None) -> None:
    run = Run(name, clip)
    batches = [ak.accumulate([data(), data()]) if accumulated else data() for _ in range(3)]
    other, held_out = data(), data(8)
    response = run.path(batches).replace(other).response(held_out, answers=("exact",))
    expected = plain_response(run, batches, other, lambda m: float(run.loss_fn(m, held_out)))
    assert max(map(abs, expected)) > 1e-4
    assert response.exact.values[0, 0].tolist() == expected
    if name in {*BAD_HESSIAN, "margins"} and not accumulated:
        with pytest.raises(UnsupportedModel if name == "margins" else WrongHessian, match=r"answers=\('exact',\)"):
            run.path(batches).replace(other).response(held_out)


def test_a_batch_is_whole_after_loss_fn_took_things_out_of_it() -> None:
    """`batch.pop("labels")` does no harm in a loop, which uses a batch once."""
    run = Run("plain")

    def taking(model: nn.Module, batch: Batch) -> Tensor:
        labels = batch["more"].pop()
        return F.cross_entropy(model(batch.pop("x")), labels)

    def packed(batch: Batch) -> Batch:
        return {"x": batch[0], "more": [batch[1]]}

    batches, other, held_out = [data() for _ in range(3)], data(), data(8)
    given = list(map(packed, batches))
    path = ak.capture(run.model, run.optimizer, taking).follow(given)
    response = path.replace(packed(other)).response(packed(held_out))
    expected = plain_response(run, batches, other, lambda m: float(run.loss_fn(m, held_out)))
    assert response.exact.values[0, 0].tolist() == expected
    assert all(batch.keys() == {"x", "more"} and len(batch["more"]) == 1 for batch in given)


HELD_OUT = (torch.randn(64, 3, generator=torch.Generator().manual_seed(5)), torch.arange(64) % 3)


def accuracy(model: nn.Module) -> Tensor:
    return (model(HELD_OUT[0]).argmax(1) == HELD_OUT[1]).float().mean()


def correct(model: nn.Module) -> Tensor:
    return (model(HELD_OUT[0]).argmax(1) == HELD_OUT[1]).sum()


def correct_number(model: nn.Module) -> int:
    return int(correct(model))


def unheeded(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return cross_entropy(model, HELD_OUT)


@pytest.mark.parametrize("probe", [accuracy, correct, correct_number, unheeded])
def test_probes_without_a_derivative_have_exact_answers(probe: Callable[[nn.Module], Any]) -> None:
    run = Run("plain", clip=0.4)
    batches, other = [data() for _ in range(4)], (10 * torch.randn(6, 3), torch.zeros(6).long())
    change = run.path(batches).replace(other)
    expected = plain_response(run, batches, other, lambda m: float(probe(m)))
    assert any(expected)
    for answers in (("exact",), None):
        response = change.response(probe, answers=answers)
        assert response.exact.values[0, 0].tolist() == expected
        assert response.data["answer"].values.tolist() == ["exact"]
    assert "no derivative" in str(response.data["refused"].values)
    with pytest.raises(InvalidLoss, match=r"answers=\('exact',\)"):
        change.response(probe, answers=("exact", "tangent"))


def gradient_norm(model: nn.Module) -> Tensor:
    grads = torch.autograd.grad(cross_entropy(model, HELD_OUT), list(model.parameters()), create_graph=True)
    return torch.stack([grad.norm() for grad in grads]).norm()


def test_a_probe_may_differentiate() -> None:
    """The norm of a gradient: to the bit as a second run has it, and predicted besides."""
    run = Run("plain", clip=0.4)
    batches, other = [data() for _ in range(3)], data()
    response = run.path(batches).replace(other).response(gradient_norm)
    expected = plain_response(run, batches, other, lambda m: float(gradient_norm(m)))
    assert response.exact.values[0, 0].tolist() == expected
    assert response.data["answer"].values.tolist() == ["exact", "semilinear", "tangent"]


def test_running_statistics_are_state_of_an_eval_mode_probe() -> None:
    run = Run("batch norm", clip=0.4)
    batches, other, held_out = [data() for _ in range(3)], data(), data(8)
    response = run.path(batches).replace(other).response(ak.Probe(batch=held_out, evaluating=True))
    expected = plain_response(run, batches, other, lambda m: float(run.loss_fn(m.eval(), held_out)))
    assert response.exact.values[0, 0].tolist() == expected
    assert response.data["answer"].values.tolist() == ["exact"]


# --- what is refused by name


class Words(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4, **options), nn.Linear(4, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def next_word(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch), batch)


def test_max_norm_is_named() -> None:
    model = Words(max_norm=1.0)
    with pytest.raises(UnsupportedModel, match=r"'embed' has max_norm=1"):
        ak.capture(model, torch.optim.AdamW(model.parameters()), next_word)


def test_a_forward_pass_that_writes_to_parameters_is_named() -> None:
    """Also where no module says so."""

    def functional(model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model.head(F.embedding(batch, model.embed.weight, max_norm=1.0)), batch)

    def clamped(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.no_grad():
            model.head.weight.clamp_(-0.1, 0.1)
        return next_word(model, batch)

    for loss_fn in (functional, clamped):
        model = Words()
        point = ak.capture(model, torch.optim.AdamW(model.parameters()), loss_fn)
        with pytest.raises(UnsupportedModel, match="writes into parameters while the loss is computed"):
            point.follow([torch.arange(5)])


# --- batches with fields


class Encoding(UserDict):
    """As transformers' BatchEncoding: a mapping with attributes, no dict, unknown to pytrees."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True)
class Fielded:
    x: Tensor
    y: Tensor


Named = namedtuple("Named", "x y")
HOLDERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "UserDict": lambda x, y: Encoding(x=x, y=y),
    "dataclass": Fielded,
    "named tuple": Named,
    "inside others": lambda x, y: Encoding(x=[x][0], y=y, more={"deep": [Fielded(x, y)]}),
}


def by_attribute(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch.x), batch.y)


@pytest.mark.parametrize("holder", HOLDERS)
def test_batches_with_fields_give_the_same_numbers_everywhere(holder: str) -> None:
    make = HOLDERS[holder]
    torch.manual_seed(0)
    model = network()
    pairs, probe = [data() for _ in range(4)], data()
    results = []
    for loss_fn, wrap in ((cross_entropy, lambda *pair: pair), (by_attribute, make)):
        point = ak.capture(model, torch.optim.AdamW(model.parameters(), lr=0.02), loss_fn)
        batches = [wrap(*pair) for pair in pairs]
        path = point.follow(batches[:2])
        response = path.replace(batches[2:]).response(wrap(*probe))
        ranking = path.rank(batches[2:], wrap(*probe), verify=1)
        examples = path.rank_examples(batches[2:], wrap(*probe), verify=1)
        double = point.to(dtype=torch.float64).follow(batches)
        results.append(
            [
                response.data["response"].values.tolist(),
                str(ranking),
                str(examples),
                double.losses,
            ]
        )
    assert results[0] == results[1]


@pytest.mark.parametrize("holder", HOLDERS)
def test_batches_with_fields_are_cut_joined_and_recorded(holder: str) -> None:
    x, y = data()
    batch = HOLDERS[holder](x, y)
    assert example_count(batch) == 6
    halves = [take_examples(batch, slice(0, 3)), take_examples(batch, slice(3, 6))]
    ((whole, counts),) = merged_examples(halves, 6)
    assert counts == [3, 3]
    assert type(whole) is type(batch)
    assert torch.equal(whole.x, x)
    assert torch.equal(halves[1].y, y[3:])
    assert torch.equal(batch.x, x), "the user's batch is as it was"
    structure, tensors = encode(batch)
    again = decode(structure, tensors, torch.device("cpu"))
    assert torch.equal(again.x, x)
    assert torch.equal(again.y, y)


def test_what_is_not_known_of_a_batch_is_named() -> None:
    class Opaque:
        pass

    with pytest.raises(InvalidInput, match="Opaque"):
        example_count(Opaque())


def test_transformers_batches() -> None:
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"x": torch.ones(2, 3), "y": torch.zeros(2).long()})
    assert example_count(batch) == 2
    part = take_examples(batch, slice(1))
    assert isinstance(part, transformers.BatchEncoding)
    assert part.x.shape == (1, 3)
    again = decode(*encode(batch), torch.device("cpu"))
    assert torch.equal(again.x, batch.x)
    assert torch.equal(again["y"], batch["y"])


# --- the recorder


class Parts(nn.Module):
    """A model that is never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3))
        self.head = nn.Linear(8, 3)


def through_parts(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model.head(torch.tanh(model.body(batch[0]))), batch[1])


def record(loss_fn: Callable[[nn.Module, Batch], Tensor], wrap: Callable[..., Batch], directory: Path) -> Any:
    torch.manual_seed(0)
    model = Parts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    with ak.FlightRecorder(model, optimizer, loss_fn, directory, window=8) as recorder:
        for i in range(8):
            torch.rand(i)  # as a loader's shuffling moves the random state between steps
            optimizer.zero_grad()
            batch = wrap(*data())
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            recorder.step(batch, loss)
    assert not any(part._forward_pre_hooks for part in model.modules())
    return ak.explain(recorder, step=7, verify=0, references=0, window=5)


def test_the_recorder_follows_a_loss_that_calls_parts(tmp_path: Path) -> None:
    """With dropout, so that the replay is right only from the right random state."""
    found = record(through_parts, lambda *pair: pair, tmp_path)
    assert "to the bit" in str(found.certificate)


def test_the_recorder_leaves_the_parts_of_a_model_that_is_called(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    with ak.FlightRecorder(model, optimizer, cross_entropy, tmp_path):
        assert all(part._forward_pre_hooks for part in model.modules())
        cross_entropy(model, data())
        assert [bool(part._forward_pre_hooks) for part in model.modules()] == [True, False, False, False]


@pytest.mark.parametrize("holder", HOLDERS)
def test_recorded_fields_are_replayed_by_attribute(holder: str, tmp_path: Path) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return through_parts(model, (batch.x, batch.y))

    found = record(loss_fn, HOLDERS[holder], tmp_path)
    assert "to the bit" in str(found.certificate)
