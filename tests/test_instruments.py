"""The instruments of a spike, each against truth from outside: plain loops, dense eigenvalues, planted causes."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aftershock as ak
from aftershock.core.contributions import BentReadout, Layers
from aftershock.core.probe import own_loss
from aftershock.recorder.instruments import data, update_sizes
from aftershock.recorder.reruns import Run, run_again
from aftershock.recorder.stability import Amplification, amplification, sharpness
from aftershock.recorder.sweep import sweep

from .cases import Case, cross_entropy, make, mlp
from .oracles import StepOracle


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# --- the update against its memory


def by_hand(case: Case, batches: list[Any]) -> list[dict[str, tuple[float, int]]]:
    """Σ g²/v̂ and size of every parameter in a plain torch loop."""
    rows = []
    for batch in batches:
        case.optimizer.zero_grad()
        case.loss_fn(case.model, batch).backward()
        if case.clip is not None:
            nn.utils.clip_grad_norm_(case.model.parameters(), case.clip)
        grads = {n: p.grad.clone() for n, p in case.model.named_parameters() if p.grad is not None}
        case.optimizer.step()
        row = {}
        for name, p in case.model.named_parameters():
            if name in grads:
                state, group = case.optimizer.state[p], case.optimizer.param_groups[0]
                v_hat = state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))
                row[name] = (float((grads[name] ** 2 / v_hat.clamp(min=group["eps"] ** 2)).sum()), p.numel())
        rows.append(row)
    return rows


@pytest.mark.parametrize("memory", [None, 20_000])  # every state, and few: then steps are run again
@pytest.mark.parametrize("clip", [None, 0.05])
def test_update_sizes_are_those_of_a_plain_loop(clip: float | None, memory: int | None) -> None:
    case = make("tanh_mlp")
    case.clip = clip
    batches = case.batches(6)
    batches[4] = (30 * batches[4][0], batches[4][1])
    path = case.point().follow(batches, clip=clip, memory=memory)
    assert (path.trajectory.keep == "checkpoints") == (memory is not None)
    found = update_sizes(path.trajectory, Layers.of(path.point.loss.layout))
    rows = by_hand(case.twin(), batches)
    for i, row in enumerate(rows):
        total = math.sqrt(sum(s for s, _ in row.values()) / sum(n for _, n in row.values()))
        assert float(found.whole[i]) == pytest.approx(total, rel=1e-9)  # m is a lerp: its rounding, ten times
        for j, layer in enumerate(found.layers):
            mine = [x for name, x in row.items() if name.startswith(f"{layer}.")]
            expected = math.sqrt(sum(s for s, _ in mine) / sum(n for _, n in mine))
            assert float(found.by_layer[i, j]) == pytest.approx(expected, rel=1e-9)
    leader = found.leaders(4, 1)[0]
    best = max(rows[4], key=lambda name: rows[4][name][0] / rows[4][name][1])
    assert leader.name == best
    assert leader.share == pytest.approx(rows[4][best][0] / sum(s for s, _ in rows[4].values()), rel=1e-9)
    assert sum(x.share for x in found.leaders(4, 99)) == pytest.approx(1)


def test_a_gradient_beyond_its_memory_is_large_and_an_ordinary_one_is_not() -> None:
    torch.manual_seed(1)
    model = mlp(4, 8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    weights = torch.randn(4, 1)

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    def feed(factor: float = 1.0) -> tuple[Tensor, Tensor]:
        x = torch.randn(16, 4)
        return x, factor * x @ weights

    for _ in range(100):
        optimizer.zero_grad()
        loss_fn(model, feed()).backward()
        optimizer.step()
    path = ak.capture(model, optimizer, loss_fn).follow([feed() for _ in range(12)] + [feed(20.0)])
    found = update_sizes(path.trajectory)
    assert found.large()
    assert not any(found.large(i) for i in range(3, 12))
    usual = sorted(float(x) for x in found.by_tensor[:-1, found.tensors.index(found.leaders()[1].name)])
    second = found.leaders()[1]
    assert second.usual == usual[(len(usual) - 1) // 2]  # torch's median: the lower of two
    assert "most of all in" in found.sentence()
    assert f"{second.name} ({second.rms:.2g}, usual {second.usual:.2g})" in found.sentence()
    assert found.sentence().count(", usual ") == 3


def test_a_parameter_without_gradient_has_no_size() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "idle": nn.Linear(2, 1)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_fn(model: nn.Module, batch: tuple[Tensor, bool]) -> Tensor:
        out = model["used"](batch[0]).square().mean()
        return out + model["idle"](batch[0]).square().mean() if batch[1] else out

    batches = [(torch.randn(3, 2), both) for both in (True, False, True)]
    found = update_sizes(ak.capture(model, optimizer, loss_fn, unused="skip").follow(batches).trajectory)
    assert found.by_layer[:, found.layers.index("idle")].isnan().tolist() == [False, True, False]
    assert float(found.whole[0]) == pytest.approx(1.0, rel=1e-6)  # the first gradient is all that v knows
    assert all(leader.name.startswith("used") for leader in found.leaders(1, 2))


# --- amplification and sharpness


def ruler(path: ak.Path, states: list[Any], step: int) -> Tensor:
    """√(η/(√v̂+ε)) without padding, v̂ the larger of the states'."""
    layout, hyper = path.point.loss.layout, path.steps[step].hypers[0]
    v = torch.stack([layout.compact(s.v) / (1 - hyper.beta2 ** s.counts[0]) for s in states]).amax(0)
    return (float(hyper.lr) / (v.sqrt() + hyper.eps)).sqrt()


@pytest.mark.parametrize("clip", [None, 0.05])
def test_growth_is_the_top_singular_value_of_the_dense_propagator(clip: float | None) -> None:
    case = make("tanh_mlp")
    case.clip = clip
    for group in case.optimizer.param_groups:
        group["lr"] = 0.3  # hot: perturbations grow
    path = case.path(6)
    model = copy.deepcopy(case.model)
    phi = torch.eye(3 * path.point.loss.layout.size)
    for at in range(2, 6):
        phi = StepOracle(path, at, model, case.loss_fn).transition(smooth=True) @ phi
    d = path.point.loss.layout.size
    scale = ruler(path, [path.trajectory.state(2), path.trajectory.state(6)], 2)
    true = float(torch.linalg.svdvals(phi[:d, :d] * scale / scale[:, None])[0])
    assert true > 1.2  # it does grow
    found = amplification(path.trajectory, 6, 4, iterations=60)
    assert found.growth == pytest.approx(true, rel=1e-3)  # a gap of a few percent, to the 120th power
    assert found.per_step == pytest.approx(true**0.25, rel=1e-3)
    two = amplification(path.trajectory, 6, 4)
    assert 0.75 * true <= two.growth <= true * (1 + 1e-9)  # a lower bound, and near it
    assert two == amplification(path.trajectory, 6, 4)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_sharpness_is_the_top_eigenvalue_of_the_dense_hessian(clip: float | None) -> None:
    case = make("tanh_mlp")
    case.clip = clip
    path = case.path(4)
    oracle = StepOracle(path, 3, copy.deepcopy(case.model), case.loss_fn)
    theta = oracle.split(oracle.x)[0]
    hessian = torch.autograd.functional.jacobian(lambda x: oracle.raw(x, create_graph=True), theta.requires_grad_())
    scale = ruler(path, [path.trajectory.state(4)], 3)
    factor = 1.0 if clip is None else clip / (float(oracle.raw(theta.detach()).norm()) + 1e-6)
    assert factor < 1 or clip is None
    true = factor * float(torch.linalg.eigvalsh(scale[:, None] * hessian * scale)[-1])
    found = sharpness(path.trajectory, 3)
    assert found.threshold == pytest.approx(38)
    assert found.value == pytest.approx(true, rel=0.02)  # eight products of some forty directions
    assert not found.unstable


@pytest.mark.parametrize("beta1", [0.9, 0.5])
@pytest.mark.parametrize("factor", [0.95, 1.05])
def test_training_diverges_just_above_the_threshold_and_not_below(beta1: float, factor: float) -> None:
    """ε ≫ √v̂ makes AdamW heavy ball with a known edge: η λ / ε = 2(1+β1)/(1−β1)."""
    curvature, eps = 3.0, 1.0
    lr = factor * 2 * (1 + beta1) / (1 - beta1) * eps / curvature
    model = nn.Linear(4, 1, bias=False)
    model.weight.data *= 1e-150  # its squares never reach ε
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(beta1, 0.999), eps=eps, weight_decay=0)
    spectrum = torch.tensor([curvature, 1.0, 0.5, 0.1])

    def loss_fn(model: nn.Module, _: Any) -> Tensor:
        return 0.5 * (spectrum * model.weight**2).sum()

    def train(count: int) -> float:
        for _ in range(count):
            optimizer.zero_grad()
            loss_fn(model, None).backward()
            optimizer.step()
        return float(model.weight.detach().abs().max())

    early = train(200)
    path = ak.capture(model, optimizer, loss_fn).follow([None] * 40)
    late = train(600)
    found, grown = sharpness(path.trajectory, 39), amplification(path.trajectory, 40, 40, iterations=4)
    assert found.value == pytest.approx(lr * curvature / eps, rel=1e-6)
    assert found.unstable == (late > 10 * early) == (factor > 1)  # what the run does is what the number says
    assert (late < 0.1 * early) == (factor < 1)
    assert (grown.growth > 1.5) == (factor > 1)


def spearman(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.argsort().argsort(), b.argsort().argsort()]).double())[0, 1])


@pytest.mark.parametrize(("lr", "follows"), [(3e-3, True), (0.1, False)])
def test_where_perturbations_grow_too_fast_predictions_do_not_rank_the_steps(lr: float, follows: bool) -> None:
    model = mlp(16, 48, 48, 10, activation=nn.GELU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    weights = torch.randn(16, 10)

    def feed() -> tuple[Tensor, Tensor]:
        x = torch.randn(16, 16)
        return x, (x @ weights).argmax(1)

    for _ in range(100):
        optimizer.zero_grad()
        cross_entropy(model, feed()).backward()
        optimizer.step()
    path = ak.capture(model, optimizer, cross_entropy).follow([feed() for _ in range(25)])
    trajectory, last = path.trajectory, 24
    bent = BentReadout.of(path.watch(0, own_loss, last), directions=0)
    predicted = sweep(trajectory, last, bent, references=0).total("skip")
    runs = run_again(trajectory, [Run(i, {i: None}) for i in range(last)], last)
    true = torch.tensor([trajectory.steps[last].loss - losses[last] for losses in runs])
    found = amplification(trajectory, last)
    assert found.linear_ok == follows
    assert (spearman(predicted, true) > 0.7) == follows
    assert (spearman(predicted, true) < 0.5) != follows


def test_numbers_that_run_out_are_growth_without_bound() -> None:
    torch.set_default_dtype(torch.float32)
    model = nn.Linear(2, 1, bias=False)
    model.weight.data *= 1e-30
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e9, eps=1.0, weight_decay=0)
    path = ak.capture(model, optimizer, lambda m, x: 0.5 * (x * m.weight**2).sum())
    found = amplification(path.follow([torch.tensor([1.0, 1e-3])] * 6).trajectory, 6)
    assert found.growth > 1e30
    assert not found.linear_ok
    assert found.sentence.endswith("over the last 6 steps: contributions mean nothing here")


def test_of_a_lower_bound_nobody_says_that_nothing_grows() -> None:
    assert Amplification(3, 11, 0.977).sentence == "no growth of perturbations was found over the last 8 steps"


@pytest.mark.parametrize("lr", [1e20, 1e30])
def test_a_sharpness_whose_numbers_run_out_is_not_known(lr: float) -> None:
    torch.set_default_dtype(torch.float32)
    model = mlp(4, 6, 3, activation=nn.Tanh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    path = ak.capture(model, optimizer, cross_entropy).follow([(torch.randn(8, 4), torch.randint(0, 3, (8,)))])
    assert math.isfinite(path.trajectory.steps[0].loss)
    found = sharpness(path.trajectory, 0)
    assert math.isnan(found.value)
    assert not found.unstable
    assert found.sentence == "learning rate × sharpness is not known: the numbers on the way to it are not finite"


# --- the data


def regression(*, sigma: float = 0.3) -> tuple[nn.Module, torch.optim.AdamW, Any, Any]:
    """A trained linear model of noisy data, its loss, and a source of batches whose targets may be another domain's."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weights = torch.randn(4, 1)

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    def feed(offset: float = 0.0) -> tuple[Tensor, Tensor]:
        x = torch.randn(16, 4)
        return x, x @ weights + sigma * torch.randn(16, 1) + offset

    model.weight.data, model.bias.data = weights.mT.clone(), torch.zeros(1)
    for _ in range(60):
        optimizer.zero_grad()
        loss_fn(model, feed()).backward()
        optimizer.step()
    return model, optimizer, loss_fn, feed


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("own", "after", "rate", "kind"),
    [
        (3.0, [0.0] * 6, 1e-2, "own batch"),
        (3.0, [], 1e-2, "own batch"),
        (3.0, [3.0] + [0.0] * 5, 1e-2, "own batch"),  # another bad batch after it is no shift
        (3.0, [3.0] * 6, 1e-2, "shift"),
        (3.0, [3.0, 3.0], 1e-2, "shift"),
        (3.0, [3.0, 0.0] * 3, 1e-2, "shift"),  # from here on half of the data are others
        (3.0, [3.0] * 8 + [0.0] * 8, 1e-2, "own batch"),  # a bad shard that has ended
        (0.0, [0.0] * 6, 50.0, "weights"),  # the step before it was far too large
        (0.0, [0.0] * 6, 1e-2, "ordinary"),
        (0.0, [3.0] * 6, 1e-2, "ordinary"),
    ],
)
def test_own_batch_shift_and_weights_are_told_apart(
    seed: int, own: float, after: list[float], rate: float, kind: str
) -> None:
    torch.manual_seed(seed)
    model, optimizer, loss_fn, feed = regression()
    batches = [feed() for _ in range(24)] + [feed(own)]
    path = ak.capture(model, optimizer, loss_fn).follow(batches, lr=[1e-2] * 23 + [rate, 1e-2])
    found = data(path.trajectory, 24, batches[16:24], [feed(offset) for offset in after])
    assert found.kind == kind, found
    assert found.own == pytest.approx(path.losses[24])


@pytest.mark.parametrize("seed", range(20))
def test_of_data_of_one_kind_none_is_of_a_harder_source(seed: int) -> None:
    """A third of the batches before it have wrong targets, too; which inputs are most like its own is chance."""
    torch.manual_seed(seed)
    model, optimizer, loss_fn, feed = regression()
    batches = [feed(3.0 if i % 3 == 0 else 0.0) for i in range(24)] + [feed(3.0)]
    path = ak.capture(model, optimizer, loss_fn).follow(batches, lr=1e-4)
    found = data(path.trajectory, 24, batches[16:24])
    assert found.kind in ("own batch", "both"), found  # or nobody can tell


def test_a_batch_that_is_high_on_these_weights_alone_is_not_bad_by_itself() -> None:
    """Step 23 spoils the weight of a feature that only the batch of step 24 has as well."""
    model = nn.ModuleDict({"common": nn.Linear(3, 1), "rare": nn.Linear(1, 1, bias=False)})
    nn.init.zeros_(model["rare"].weight)
    groups = [{"params": model["common"].parameters(), "lr": 1e-3}, {"params": model["rare"].parameters(), "lr": 3.0}]

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model["common"](batch[0]) + model["rare"](batch[1]), batch[2])

    def feed(rare: float = 0.0, wrong: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
        return torch.randn(16, 3), torch.full((16, 1), rare), torch.randn(16, 1) + wrong

    batches = [feed() for _ in range(23)] + [feed(1.0, 5.0), feed(1.0)]
    path = ak.capture(model, torch.optim.AdamW(groups), loss_fn).follow(batches)
    found = data(path.trajectory, 24, batches[15:23], [feed() for _ in range(4)])
    assert found.kind == "both", found
    with torch.no_grad():
        expected = [float(loss_fn(model, batches[24]))]  # the common part hardly moves, the rare one not at all
    assert found.elsewhere == pytest.approx(expected * len(found.elsewhere), rel=0.1)
    assert "so that nobody can tell whether it is bad by itself" in found.sentence
    everywhere = data(path.trajectory, 24, batches[15:23], [feed(1.0) for _ in range(4)])
    assert everywhere.kind == "weights", everywhere  # fresh batches meet it too; on earlier weights none does
    assert "the data changed here, or the weights are bad for all that was not just trained on" in everywhere.sentence


def test_a_hard_batch_is_not_bad_where_the_weights_are_bad_for_its_kind() -> None:
    """Batches 4, 10 and 24 have a feature and targets that are never learnt; step 23 spoils the weights of it."""
    model = nn.ModuleDict({"common": nn.Linear(3, 1), "rare": nn.Linear(4, 1, bias=False)})
    nn.init.zeros_(model["rare"].weight)
    groups = [{"params": model["common"].parameters(), "lr": 1e-3}, {"params": model["rare"].parameters(), "lr": 10.0}]
    optimizer = torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: float(step == 23)])

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model["common"](batch[1]) + model["rare"](batch[0]), batch[2])

    def feed(rare: float = 0.0, wrong: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
        return rare + 0.1 * torch.randn(16, 4), torch.randn(16, 3), torch.randn(16, 1) + wrong

    torch.manual_seed(0)
    batches = [feed(1.0, 30.0) if i in (4, 10, 24) else feed() for i in range(25)]
    batches[23] = feed(-1.0, 100.0)
    path = ak.capture(model, optimizer, loss_fn).follow(batches, lr=schedule)
    found = data(path.trajectory, 24, batches[15:23], [feed() for _ in range(4)])
    there = min(found.elsewhere) - found.usual
    assert 100 * max(8 * found.sigma, found.usual) < there < 0.5 * (found.own - found.usual), "extreme, and smaller"
    assert found.kind == "both", found


def test_losses_on_the_same_weights_are_those_of_the_model_there() -> None:
    model, optimizer, loss_fn, feed = regression()
    batches, later = [feed() for _ in range(6)], [feed() for _ in range(2)]
    path = ak.capture(model, optimizer, loss_fn).follow(batches)
    for batch in batches[:5]:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    found = data(path.trajectory, 5, batches[:5], later)
    assert found.before == pytest.approx([float(loss_fn(model, b).detach()) for b in batches[:5]], rel=1e-12)
    assert found.after == pytest.approx([float(loss_fn(model, b).detach()) for b in later], rel=1e-12)
