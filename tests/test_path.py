"""Following a path is training on: equal to the bit to the user's own loop."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import aftershock as ak
from aftershock import theory
from aftershock.core.calls import Calls
from aftershock.core.state import JointState

from .cases import CASES, Case, classes, cross_entropy, make, mlp

STEPS = 5


def live_state(case: Case, path: ak.Path) -> dict[str, list[torch.Tensor]]:
    """θ, m, v and buffers of the live run, in the point's order."""
    named = dict(case.model.named_parameters())
    parameters = [named[name] for name in path.point.loss.layout.names]
    state = case.optimizer.state
    return {
        "theta": [p.detach() for p in parameters],
        "m": [state[p].get("exp_avg", torch.zeros_like(p)) for p in parameters],
        "v": [state[p].get("exp_avg_sq", torch.zeros_like(p)) for p in parameters],
    }


def assert_same_bits(case: Case, path: ak.Path, state: JointState) -> None:
    layout = path.point.loss.layout
    for channel, tensors in live_state(case, path).items():
        for name, view, tensor in zip(layout.names, layout.views(getattr(state, channel)), tensors):
            assert torch.equal(view.to(tensor.dtype), tensor), f"{channel} of {name} differs"
    for name, buffer in case.model.named_buffers():
        assert torch.equal(state.buffers[name], buffer), f"buffer {name} differs"
    counts = [
        int(case.optimizer.state[p].get("step", 0)) for p in map(dict(case.model.named_parameters()).get, layout.names)
    ]
    assert list(state.counts) == counts


def check_follow_equals_training(case: Case, **options: object) -> ak.Path:
    """Follow from a captured point, then train the live run on with the same random state, and compare."""
    batches = case.batches(STEPS)
    torch.manual_seed(123)
    point = case.point()
    random = torch.get_rng_state()
    path = point.follow(batches, clip=case.clip, **options)
    assert torch.equal(torch.get_rng_state(), random), "following moved the global random state"
    losses = case.train(batches)
    assert_same_bits(case, path, path.trajectory.state(STEPS))
    assert path.losses == pytest.approx(losses, rel=1e-6)
    return path


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_follow_equals_training_to_the_bit(name: str, dtype: torch.dtype) -> None:
    check_follow_equals_training(make(name, dtype))


FLAGS = [{"foreach": True}, {"foreach": False}, {"fused": True}]
CLASSES = [torch.optim.AdamW, torch.optim.Adam]


@pytest.mark.parametrize(("flags", "cls"), list(itertools.product(FLAGS, CLASSES)))
@pytest.mark.parametrize("warm", [0, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_implementation_of_the_step(flags: dict, cls: type, warm: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = mlp(4, 6, 3).to(dtype)
    optimizer = cls(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4, **flags)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(6, 4).to(dtype), torch.randint(0, 3, (6,))

    case = Case("flags", model, optimizer, cross_entropy, batch, clip=0.3)
    case.train(case.batches(warm))
    check_follow_equals_training(case)


@pytest.mark.parametrize("flags", FLAGS)
def test_gradients_whose_memory_is_transposed(flags: dict) -> None:
    """autograd may return a gradient with other strides than its parameter's; fused kernels read memory as it lies."""
    torch.manual_seed(0)
    model = mlp(4, 6, 3)

    def loss_fn(m: nn.Module, b: tuple) -> torch.Tensor:
        x = b[0][None]
        for layer in (m[0], m[2]):
            x = torch.baddbmm(layer.bias[None, None], x, layer.weight[None].mT).tanh()
        return F.cross_entropy(x[0], b[1])

    case = Case("transposed", model, torch.optim.AdamW(model.parameters(), lr=1e-2, **flags), loss_fn, classes((4,)))
    found = torch.autograd.grad(loss_fn(model, case.batches(1)[0]), list(model.parameters()))
    assert found[0].stride() != model[0].weight.stride()
    case.train(case.batches(3))
    check_follow_equals_training(case)


def test_mixed_dtypes() -> None:
    torch.manual_seed(0)
    model = mlp(4, 6, 3)
    model[2].to(torch.bfloat16)

    def loss_fn(m: nn.Module, b: tuple) -> torch.Tensor:
        return F.cross_entropy(m[2](m[1](m[0](b[0])).to(torch.bfloat16)).float(), b[1])

    case = Case("mixed", model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn, classes((4,)))
    case.train(case.batches(3))
    path = check_follow_equals_training(case)
    assert path.point.loss.layout.dtype == torch.float32


def test_channels_last_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 3))
    model = model.to(memory_format=torch.channels_last)
    case = Case("channels_last", model, torch.optim.AdamW(model.parameters()), cross_entropy, classes((3, 6, 6)))
    check_follow_equals_training(case)


def test_a_million_steps_in() -> None:
    case = make("tanh_mlp")
    for state in case.optimizer.state.values():
        state["step"] += 1_000_000
    path = check_follow_equals_training(case)
    assert path.point.step == 1_000_005


def test_tensor_learning_rate() -> None:
    torch.manual_seed(0)
    model = mlp(4, 5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), foreach=False)
    case = Case("tensor_lr", model, optimizer, cross_entropy, classes((4,)))
    case.train(case.batches(2))
    check_follow_equals_training(case)


def test_autocast() -> None:
    torch.manual_seed(0)
    model = mlp(8, 16, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def inside(m: nn.Module, b: tuple) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(m(b[0]), b[1])

    case = Case("autocast", model, optimizer, inside, classes((8,)))
    check_follow_equals_training(case)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # the autocast in force at capture is kept
        point = ak.capture(model, optimizer, cross_entropy)
    batches = case.batches(STEPS)
    plain = case.point()
    path = point.follow(batches)
    assert path.losses == plain.follow(batches).losses
    assert path.losses != ak.capture(model, optimizer, cross_entropy, autocast=False).follow(batches).losses
    case.train(batches)
    assert_same_bits(case, path, path.trajectory.state(STEPS))


def scheduled(kind: str, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    rates = torch.optim.lr_scheduler
    if kind == "warmup then cosine":
        warm = rates.LinearLR(optimizer, 0.1, total_iters=3)
        return rates.SequentialLR(optimizer, [warm, rates.CosineAnnealingLR(optimizer, 10)], [3])
    if kind == "one cycle":
        return rates.OneCycleLR(optimizer, 0.1, total_steps=20)
    return rates.LambdaLR(optimizer, lambda step: 0.9**step)


@pytest.mark.filterwarnings("ignore:.*epoch parameter.*")
@pytest.mark.parametrize("kind", ["warmup then cosine", "one cycle", "lambda"])
def test_scheduler_is_copied_not_advanced(kind: str) -> None:
    case = make("two_groups")
    scheduler = scheduled(kind, case.optimizer)
    for batch in case.batches(2):
        case.train([batch])
        scheduler.step()
    batches = case.batches(STEPS)
    before = dict(scheduler.state_dict())
    path = case.point().follow(batches, clip=case.clip, lr=scheduler)
    assert scheduler.state_dict()["last_epoch"] == before["last_epoch"]
    rates = set()
    for batch in batches:
        rates.add(case.optimizer.param_groups[0]["lr"])
        case.train([batch])
        scheduler.step()
    assert len(rates) > 2, "the schedule does not move: the test would prove nothing"
    assert_same_bits(case, path, path.trajectory.state(STEPS))


@pytest.mark.parametrize("form", ["number", "list", "callable", "per group"])
def test_learning_rate_forms(form: str) -> None:
    case = make("two_groups")
    rates = [0.01 * (i + 1) for i in range(STEPS)]
    values = {
        "number": (0.02, [[0.02, 0.02]] * STEPS),
        "list": (rates, [[r, r] for r in rates]),
        "callable": (lambda i: rates[i], [[r, r] for r in rates]),
        "per group": ([[r, 2 * r] for r in rates], [[r, 2 * r] for r in rates]),
    }
    given, expected = values[form]
    batches = case.batches(STEPS)
    path = case.point().follow(batches, clip=case.clip, lr=given)
    for batch, rate in zip(batches, expected):
        for group, r in zip(case.optimizer.param_groups, rate):
            group["lr"] = r
        case.train([batch])
    assert_same_bits(case, path, path.trajectory.state(STEPS))


@pytest.mark.parametrize("keep", ["states", "checkpoints", "graphs"])
@pytest.mark.parametrize("name", ["dropout", "batch_norm", "accumulated"])
def test_what_is_kept_changes_nothing(name: str, keep: str) -> None:
    case = make(name)
    batches = case.batches(10)
    path = case.point().follow(batches, clip=case.clip, keep=keep)
    reference = case.point().follow(batches, clip=case.clip, keep="states")
    for time in range(11):
        a, b = path.trajectory.state(time), reference.trajectory.state(time)
        assert torch.equal(a.theta, b.theta)
        assert torch.equal(a.v, b.v)
    forward = [(time, state.theta.sum()) for time, state in path.trajectory.states(2, 8)]
    backward = [(s.index, state.theta.sum()) for s, state in path.trajectory.backward(2, 9)]
    assert forward == backward[::-1]
    assert [i for i, _ in forward] == list(range(2, 9))


def test_end_of_a_path_is_a_point_to_go_on_from() -> None:
    case = make("dropout")
    batches = case.batches(6)
    whole = case.point().follow(batches, clip=case.clip)
    second = case.point().follow(batches[:3], clip=case.clip).end.follow(batches[3:], clip=case.clip)
    assert torch.equal(whole.trajectory.state(6).theta, second.trajectory.state(3).theta)


def test_graphs_that_change_the_gradient_are_not_used_for_the_control() -> None:
    """SiLU's gradient differs by an ulp under create_graph; the control must stay the plain one."""
    torch.manual_seed(0)
    model = mlp(8, 32, 32, 3, activation=nn.SiLU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    case = Case("silu", model, optimizer, cross_entropy, classes((8,), size=64))
    check_follow_equals_training(case, keep="graphs")


def test_graphs_that_are_kept_cost_no_pass_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass a step, one to see that a gradient repeats itself, and one that a graph's is the plain one."""
    case, steps, seen, raw = make("tanh_mlp", torch.float32), 4, list[str](), Calls.raw
    point = case.point()
    monkeypatch.setattr(
        Calls, "raw", lambda self, model, batch, where: seen.append(where) or raw(self, model, batch, where)
    )
    point.follow(case.batches(steps), keep="graphs")
    assert len(seen) == steps + 2


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fused", [None, True])
def test_step_counts_are_torchs_under_any_default_type(default: torch.dtype, fused: bool | None) -> None:
    """bfloat16 knows no count between 256 and 258."""
    case, before = make("tanh_mlp", torch.float32), torch.get_default_dtype()
    case.optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-2, betas=(0.9, 0.9999), fused=fused)
    batches = case.batches(260)
    try:
        torch.set_default_dtype(default)
        case.train(batches[:255])
        path = case.point().follow(batches[255:])
        case.train(batches[255:])
        assert_same_bits(case, path, path.trajectory.state(5))
    finally:
        torch.set_default_dtype(before)


def test_at_is_the_changed_step_another_is_step_and_what_comes_out_is_an_outcome_or_a_horizon() -> None:
    homes = (ak.Path, ak.Change, theory.FrozenMemory, theory)
    public = {name: getattr(home, name) for home in homes for name in dir(home) if name[0] != "_"}
    named = {name: list(inspect.signature(f).parameters) for name, f in public.items() if inspect.isroutine(f)}
    assert not [name for name, parameters in named.items() if {"time", "horizons"} & set(parameters)]
    assert all(named[name] == ["self", "step"] for name in ("transition", "control", "index"))
    assert "at" not in vars(theory.FrozenMemory)
