"""Capture copies a live run and touches nothing; what is not modelled is refused by name."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn
from torch.utils.checkpoint import checkpoint

import aftershock as ak
from aftershock.errors import (
    InvalidFile,
    MixedDevices,
    UnsupportedModel,
    UnsupportedOptimizer,
)

from .cases import CASES, Case, classes, cross_entropy, make, mlp


def fingerprint(case: Case) -> dict[str, object]:
    """Everything of the user's that must not move."""
    return {
        "parameters": {n: p.detach().clone() for n, p in case.model.named_parameters()},
        "pointers": {n: (p.data_ptr(), p._version) for n, p in case.model.named_parameters()},
        "grads": {n: None if p.grad is None else p.grad.clone() for n, p in case.model.named_parameters()},
        "buffers": {n: b.clone() for n, b in case.model.named_buffers()},
        "modes": {n: m.training for n, m in case.model.named_modules()},
        "hooks": {n: len(m._forward_hooks) for n, m in case.model.named_modules()},
        "optimizer": copy.deepcopy(case.optimizer.state_dict()),
        "states": len(case.optimizer.state),
        "random": torch.get_rng_state(),
        "grad mode": torch.is_grad_enabled(),
    }


def assert_same(a: object, b: object) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_same(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("name", CASES)
def test_nothing_of_the_users_moves(name: str) -> None:
    case = make(name)
    batches, probe = case.batches(3), case.batch()
    before = fingerprint(case)
    point = case.point()
    path = point.follow(batches, clip=case.clip)
    path.replace([batches[1]]).response(probe)
    path.rank(batches, probe)
    path.explain(probe)
    assert_same(before, fingerprint(case))


def test_a_point_does_not_see_the_live_run_move_on() -> None:
    case = make("batch_norm")
    batches = case.batches(3)
    point = case.point()
    first = point.follow(batches).losses
    case.train(case.batches(5))
    case.model.eval()
    case.model[1].eps = 10.0
    assert point.follow(batches).losses == first


def test_before_the_first_step() -> None:
    torch.manual_seed(0)
    model = mlp(4, 5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    point = ak.capture(model, optimizer, cross_entropy)
    assert point.step == 0
    assert len(optimizer.state) == 0
    assert not point.captured.state.m.any()


def test_frozen_parameters_are_constants() -> None:
    case = make("lora")
    point = case.point()
    assert point.loss.layout.names == ("down", "up")
    assert set(point.loss.constants) == {"base.weight", "base.bias"}
    model = mlp(4, 5, 3)
    model[0].requires_grad_(False)
    everything = torch.optim.AdamW(model.parameters())  # frozen ones may be in the optimizer
    assert ak.capture(model, everything, cross_entropy).loss.layout.names == ("2.weight", "2.bias")


def test_tied_weights_are_one_parameter() -> None:
    case = make("tied")
    assert case.point().loss.layout.names == ("embed.weight", "mix.weight", "mix.bias")


class Everything(nn.Module):
    """Attributes that make models hard to copy."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.lstm = nn.LSTM(3, 3, batch_first=True)
        self.normed = nn.utils.parametrizations.orthogonal(nn.Linear(3, 3), use_trivialization=False)
        self.register_buffer("constant", torch.ones(3))
        self.generator = torch.Generator()
        self.scale = torch.tensor(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.scale
        self.last = y  # a tensor with a graph, which deepcopy refuses
        out, _ = self.lstm(y[:, None])
        return self.normed(out[:, 0]) * self.constant


def test_awkward_models() -> None:
    torch.manual_seed(0)
    model = Everything().double()

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    case = Case("everything", model, optimizer, cross_entropy, batch)
    case.train(case.batches(3))
    seen: list[int] = []
    model.linear.register_forward_hook(lambda *_: seen.append(1))
    batches = case.batches(4)
    path = case.point().follow(batches)
    path.replace([case.batch()]).response(case.batch())
    assert not seen
    losses = case.train(batches)
    assert path.losses == losses


@pytest.mark.parametrize("how", ["whole", "part", "in place"])
def test_compiled_models_are_unwrapped(how: str) -> None:
    case = make("tanh_mlp")
    plain = case.point()
    model = case.model
    if how == "whole":
        model = torch.compile(case.model, backend="eager")
    elif how == "part":
        case.model[0] = torch.compile(case.model[0], backend="eager")
    else:
        case.model.compile(backend="eager")
    batches = case.batches(3)
    point = ak.capture(model, case.optimizer, cross_entropy)
    assert point.loss.layout.names == plain.loss.layout.names
    assert point.follow(batches).losses == plain.follow(batches).losses
    point.follow(batches).skip(0).response(case.batch())


# --- files


def test_save_and_load(tmp_path) -> None:  # type: ignore[no-untyped-def]
    for name in ("two_groups", "batch_norm", "tied", "dropout", "lora"):
        case = make(name)
        point = case.point()
        batches = case.batches(3)
        point.save(tmp_path / "deep" / f"{name}.point")
        fresh = make(name, seed=9).model.eval()
        loaded = ak.load_point(tmp_path / "deep" / f"{name}.point", fresh, case.loss_fn)
        a, b = (p.follow(batches, clip=case.clip) for p in (point, loaded))
        assert a.losses == b.losses
        assert torch.equal(a.trajectory.state(3).v, b.trajectory.state(3).v)
    assert not list((tmp_path / "deep").glob(".*"))
    with safe_open(tmp_path / "deep" / "tied.point", framework="pt") as file:
        assert json.loads(file.metadata()["aftershock"])["format"] == "aftershock-point-2"


def test_files_that_do_not_fit_are_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    case = make("tanh_mlp")
    target = tmp_path / "p"
    case.point().save(target)
    with pytest.raises(InvalidFile, match="another model"):
        ak.load_point(target, mlp(4, 5, 5, 3), cross_entropy)
    with pytest.raises(InvalidFile, match="in the file"):
        ak.load_point(target, mlp(4, 6, 3), cross_entropy)
    with pytest.raises(InvalidFile, match="no saved point"):
        ak.load_point(tmp_path / "none", case.model, cross_entropy)
    whole = target.read_bytes()
    for cut in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        target.write_bytes(whole[:cut])
        with pytest.raises(InvalidFile):
            ak.load_point(target, case.model, cross_entropy)
    torch.save({"x": 1}, target)
    with pytest.raises(InvalidFile, match="damaged or not"):
        ak.load_point(target, case.model, cross_entropy)


@pytest.mark.parametrize("name", ["two_groups", "batch_norm", "tied", "lora", "unused_parameters"])
def test_from_a_checkpoint(name: str) -> None:
    case = make(name)
    batches = case.batches(3)
    expected = case.point().follow(batches, clip=case.clip).losses
    model_state = copy.deepcopy(case.model.state_dict())
    optimizer_state = copy.deepcopy(case.optimizer.state_dict())
    fresh = make(name, seed=5)
    before = fingerprint(fresh)
    torch.manual_seed(0)
    point = ak.from_checkpoint(fresh.model, fresh.optimizer, case.loss_fn, model_state, optimizer_state)
    assert point.follow(batches, clip=case.clip).losses == expected
    after = fingerprint(fresh)
    before.pop("random"), after.pop("random")
    assert_same(before, after)


def test_checkpoints_that_do_not_fit_are_refused() -> None:
    case, other = make("two_groups"), make("tanh_mlp")
    states = case.model.state_dict(), case.optimizer.state_dict()
    with pytest.raises(InvalidFile, match="parameter groups"):
        ak.from_checkpoint(other.model, other.optimizer, cross_entropy, *states)
    big = mlp(4, 6, 3).double()
    with pytest.raises(InvalidFile, match="checkpoint's"):
        ak.from_checkpoint(case.model, case.optimizer, cross_entropy, big.state_dict(), states[1])
    with pytest.raises(InvalidFile, match="no tensor for"):
        ak.from_checkpoint(case.model, case.optimizer, cross_entropy, {}, states[1])


# --- refusals


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Own(torch.optim.AdamW):
    def step(self, closure=None):  # type: ignore[no-untyped-def,override]
        return super().step(closure)


def part(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model[0].parameters())


def stranger(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.zeros(7))])


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (sgd, UnsupportedOptimizer, "the optimizer is SGD"),
        (lambda m: torch.optim.NAdam(m.parameters()), UnsupportedOptimizer, "NAdam"),
        (lambda m: Own(m.parameters()), UnsupportedOptimizer, "Own"),
        (lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True), UnsupportedOptimizer, "amsgrad=False"),
        (part, UnsupportedModel, r"'2.weight' needs a gradient but is in no group"),
        (stranger, UnsupportedOptimizer, r"shape \(7,\) that the model does not have"),
        (lambda m: None, UnsupportedOptimizer, "NoneType"),
    ],
)
def test_optimizers_that_are_not_modelled(build, error, words) -> None:  # type: ignore[no-untyped-def]
    model = mlp(4, 5, 3)
    with pytest.raises(error, match=words):
        ak.capture(model, build(model), cross_entropy)


def test_models_that_are_not_modelled() -> None:
    sparse = nn.Embedding(5, 3, sparse=True)
    with pytest.raises(UnsupportedModel, match="sparse=False"):
        ak.capture(sparse, torch.optim.AdamW(sparse.parameters()), cross_entropy)
    hooked = mlp(4, 5, 3)
    hooked[0].weight.register_hook(lambda g: g.clamp(-1, 1))
    with pytest.raises(UnsupportedModel, match="gradient hook"):
        ak.capture(hooked, torch.optim.AdamW(hooked.parameters()), cross_entropy)
    empty = mlp(4, 5, 3).to("meta")
    with pytest.raises(UnsupportedModel, match="meta device"):
        ak.capture(empty, torch.optim.AdamW(empty.parameters()), cross_entropy)
    split = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    with pytest.raises((MixedDevices, UnsupportedModel)):
        ak.capture(split, torch.optim.AdamW(split.parameters()), cross_entropy)
    locked = mlp(4, 5, 3)
    locked.lock = __import__("threading").Lock()
    with pytest.raises(UnsupportedModel, match="cannot be copied"):
        ak.capture(locked, torch.optim.AdamW(locked.parameters()), cross_entropy)
    with pytest.raises(UnsupportedModel, match=r"torch.nn.Module"):
        ak.capture(lambda x: x, None, cross_entropy)


def test_lazy_modules_are_refused() -> None:
    lazy = nn.LazyLinear(3)
    with pytest.raises(UnsupportedModel, match="run one forward pass first"):
        ak.capture(lazy, torch.optim.AdamW(nn.Linear(1, 1).parameters()), cross_entropy)


def test_dtensor_and_fsdp_are_refused() -> None:
    class FullyShardedDataParallel(nn.Sequential):
        """Named as torch's own, which needs a process group."""

    sharded = FullyShardedDataParallel(nn.Linear(4, 3))
    with pytest.raises(UnsupportedModel, match="FSDP"):
        ak.capture(sharded, torch.optim.AdamW(sharded.parameters()), cross_entropy)

    class Distributed(torch.Tensor):
        pass

    model = mlp(4, 5, 3)
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Distributed))
    with pytest.raises(UnsupportedModel, match="ordinary tensors"):
        ak.capture(model, torch.optim.AdamW(model.parameters()), cross_entropy)


def test_reentrant_checkpointing_names_the_remedy() -> None:
    """It hides the inner parameters from autograd.grad: they would look unused."""

    class Reentrant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(4, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.inner, x.requires_grad_(), use_reentrant=True))

    model = Reentrant()
    point = ak.capture(model, torch.optim.AdamW(model.parameters()), cross_entropy)
    with pytest.raises(UnsupportedModel, match="use_reentrant=False"):
        point.follow([classes((4,))()])


def test_moved_points() -> None:
    case = make("batch_norm", torch.float32)
    batches, probe = case.batches(4), case.batch()
    single = case.point().follow(batches).replace([batches[3]]).response(probe)
    point = case.point().to(dtype=torch.float64)
    assert point.loss.layout.dtype == torch.float64
    double = point.follow(batches).replace([batches[3]]).response(probe)
    assert float(abs(single.exact - double.exact).max()) < 1e-4 * float(abs(double.exact).max()) + 1e-6
    assert point.to("cpu").follow(batches).losses == point.follow(batches).losses


def test_loss_written_with_functional_pieces_only() -> None:
    """A loss that never calls the model's forward still sees the captured parameters."""
    case = make("tanh_mlp")

    def loss_fn(m: nn.Module, b: tuple) -> torch.Tensor:
        hidden = torch.tanh(F.linear(b[0], m[0].weight, m[0].bias))
        return F.cross_entropy(F.linear(hidden, m[2].weight, m[2].bias), b[1])

    batches = case.batches(3)
    assert ak.capture(case.model, case.optimizer, loss_fn).follow(batches).losses == case.point().follow(batches).losses
