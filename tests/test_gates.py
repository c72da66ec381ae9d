"""Gates against plain torch: equal to the bit where nothing switches, the control's smooth piece where it does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import aftershock as ak
from aftershock.core.gates import Pattern, recording, replaying
from aftershock.core.graphs import GradientGraph
from aftershock.core.kinks import PIECEWISE, WINDOWS
from aftershock.core.reductions import same_bits
from aftershock.errors import UnfrozenGate
from aftershock.theory.switching import switch_fraction

from .cases import CASES, make


class Net(nn.Module):
    """Linear, an operation, linear: the operation sees 5 × 12 numbers (as images where it asks for them)."""

    def __init__(self, operation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 12), nn.LazyLinear(2)
        if isinstance(operation, nn.Module):
            self.operation = operation
        else:
            self.call = operation

    def forward(self, x: Tensor) -> Tensor:
        hidden = 2 * self.first(x)  # an operation may work in place on this
        out = self.operation(hidden) if hasattr(self, "operation") else self.call(hidden)
        return self.last(out.reshape(len(x), -1))


def images(pool: Callable) -> Callable[[Tensor], Tensor]:
    return lambda x: pool(x.view(len(x), 1, 3, 4))


def mask_of(x: Tensor) -> Tensor:
    with torch.no_grad():
        return (x.view(-1).view(x.shape) > 0).to(x.dtype)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "nn.ReLU": nn.ReLU(),
    "nn.ReLU in place": nn.ReLU(inplace=True),
    "F.relu": F.relu,
    "F.relu in place": lambda x: F.relu(x, inplace=True),
    "torch.relu_": lambda x: torch.relu_(x),
    "Tensor.relu": lambda x: x.relu(),
    "nn.ReLU6": nn.ReLU6(),
    "relu6": lambda x: F.relu6(4 * x),
    "leaky_relu in place": nn.LeakyReLU(0.1, inplace=True),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "prelu": nn.PReLU(12),
    "threshold": nn.Threshold(0.3, -0.1),
    "threshold in place": nn.Threshold(0.3, -0.1, inplace=True),
    "hardtanh": nn.Hardtanh(-0.5, 0.7),
    "hardtanh in place": nn.Hardtanh(inplace=True),
    "hardsigmoid": lambda x: F.hardsigmoid(4 * x),
    "hardswish": lambda x: F.hardswish(4 * x),
    "hardswish in place": lambda x: F.hardswish(4 * x, inplace=True),
    "elu": nn.ELU(0.7),
    "celu": nn.CELU(0.7),
    "selu": nn.SELU(),
    "hardshrink": nn.Hardshrink(),
    "softshrink": nn.Softshrink(),
    "clamp": lambda x: x.clamp(-0.2, 0.3),
    "clamp_": lambda x: x.clamp_(min=0.1),
    "clip": lambda x: torch.clip(x, max=0.2),
    "clamp by tensor": lambda x: torch.clamp(x, min=torch.linspace(-1, 1, 12, dtype=x.dtype)),
    "clamp_min": lambda x: x.clamp_min(0.0),
    "clamp_max_": lambda x: torch.clamp_max_(x, 0.4),
    "abs": torch.abs,
    "abs()": abs,
    "maximum": lambda x: torch.maximum(x, 0.5 * x.flip(1)),
    "max of two": lambda x: torch.max(x, x.roll(1, 1)),
    "minimum": lambda x: torch.minimum(x, x.cos()),
    "l1_loss": lambda x: F.l1_loss(x, x.cos(), reduction="none"),
    "huber_loss": lambda x: F.huber_loss(x, torch.zeros_like(x), reduction="none", delta=0.4),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, torch.zeros_like(x), reduction="none", beta=0.4),
    "max_pool2d": images(nn.MaxPool2d(2, stride=1)),
    "max_pool2d builtin": images(lambda x: torch.max_pool2d(x, 2)),
    "max_pool2d with indices": images(lambda x: F.max_pool2d(x, 2, return_indices=True)[0]),
    "max_pool1d": lambda x: F.max_pool1d(x, 3, padding=1),
    "max_pool3d": lambda x: F.max_pool3d(x.view(len(x), 1, 2, 3, 2), 2, stride=1),
    "adaptive_max_pool2d": images(nn.AdaptiveMaxPool2d(2)),
    "max along": lambda x: x.view(len(x), 3, 4).max(1).values,
    "min along, kept": lambda x: torch.min(x.view(len(x), 3, 4), dim=2, keepdim=True)[0],
    "max of all": lambda x: x * x.max(),
    "amax": lambda x: x.view(len(x), 3, 4).amax((1, 2)),
    "amin": lambda x: torch.amin(x, 1, keepdim=True),
    "amax with ties": lambda x: x.relu().view(len(x), 6, 2).amax(1),
    "topk": lambda x: x.topk(3).values,
    "sort": lambda x: x.sort(dim=1, descending=True)[0] * torch.arange(12, dtype=x.dtype),
    "kthvalue": lambda x: x.kthvalue(3)[0],
    "where": lambda x: torch.where(x > 0.1, x.sin(), x.square()),
    "mask": lambda x: x * (x.gt(0)).to(x.dtype),
    "argmax": lambda x: x.gather(1, x.argmax(1, keepdim=True)),
    "where detached": lambda x: torch.where(x.detach() > 0, x, -x),
    "where of data": lambda x: torch.where(x.data.sin() > 0, x, -x),
    "mask without gradients": lambda x: x * mask_of(x),
    "mask written in place": lambda x: x * torch.zeros_like(x).copy_(x.detach()).gt(0),
    "detached argmax": lambda x: x.gather(1, x.detach().mul(2).argmax(1, keepdim=True)),
    "detached topk": lambda x: x.gather(1, x.detach().topk(3).indices),
    "straight-through sign": lambda x: x + (x.sign() - x).detach() + x.square(),
    "straight-through round": lambda x: x + (torch.round(2 * x) - x).detach() + x.square(),
    "rounded": lambda x: x.square() + torch.floor(3 * x),
    "cast": lambda x: x * x.detach().mul(3).long(),
    "branch": lambda x: torch.stack([c.square() if c.detach()[0] > 0 else c.sin() for c in x.unbind(1)]),
    "sampled": lambda x: x * torch.bernoulli(x.detach().sigmoid(), generator=torch.Generator().manual_seed(0)),
}
# what follows its piece exactly by Taylor's formula of order 2: every operation above but these
# what torch cannot differentiate twice: the gradient is held all the same
FIRST_ORDER = {"hardsigmoid"}
ONE_GATE = {"max of all", "amin", "branch"}  # too few to switch within a small step
NO_TRUE_SLOPE = {"straight-through sign", "straight-through round"}  # theirs is another function's
NO_FORWARD_MODE = {"hardsigmoid", "huber_loss", "smooth_l1_loss"}
NOT_QUADRATIC = {"branch", "elu", "celu", "selu", "where", "minimum", "l1_loss", "max of all"}


class Pass:
    """A loss at two parameter vectors, with and without gates."""

    def __init__(self, operation: Callable[[Tensor], Tensor], seed: int = 0, rows: int = 5) -> None:
        torch.manual_seed(seed)
        model = Net(operation).double()
        model(torch.randn(5, 3).double())
        self.model = model
        optimizer = torch.optim.AdamW(model.parameters())
        point = ak.capture(model, optimizer, lambda m, b: m(b).square().mean() + m(b).mean().exp())
        self.loss, self.batch = point.loss, torch.randn(rows, 3).double()
        self.state, self.random = point.captured.state, point.captured.random
        self.theta = self.state.theta
        size = self.loss.layout.size
        self.direction = self.loss.layout.expand(torch.randn(size).double())
        self.other = self.theta + self.direction

    def gradient(self, theta: Tensor, surroundings: object = None):  # type: ignore[no-untyped-def]
        loss = self.loss if surroundings is None else self.loss.within(surroundings)
        return loss.gradient(theta, self.state.buffers, self.batch, self.random, "here")

    def products(self, theta: Tensor, u: Tensor, surroundings: object = None) -> Tensor:
        loss = self.loss if surroundings is None else self.loss.within(surroundings)
        return GradientGraph(loss, theta, self.state.buffers, self.batch, self.random, "here").products(u)

    def pattern(self, theta: Tensor) -> Pattern:
        pattern = Pattern()
        self.gradient(theta, recording(pattern))
        return pattern


@pytest.mark.parametrize("form", FORMS)
def test_recording_and_replaying_change_no_bit_at_the_control(form: str) -> None:
    case = Pass(FORMS[form])
    pattern = Pattern()
    plain, recorded = case.gradient(case.theta), case.gradient(case.theta, recording(pattern))
    replayed = case.gradient(case.theta, replaying(pattern))
    assert pattern.gates
    for found in (recorded, replayed):
        assert torch.equal(found.loss, plain.loss)
        assert same_bits(found.grads, plain.grads)
    if form in FIRST_ORDER:
        return
    u = torch.stack([case.direction, case.direction.flip(0) * (case.direction != 0)])
    expected = case.products(case.theta, u)
    assert torch.equal(case.products(case.theta, u, replaying(pattern)), expected)


@pytest.mark.parametrize("form", FORMS)
def test_another_passs_own_pattern_is_that_pass(form: str) -> None:
    """With the choices that the pass makes anyway, but given piece by piece, the value is the plain one."""
    case = Pass(FORMS[form])
    control, shocked = case.pattern(case.theta), case.pattern(case.other)
    assert any(bool(s.any()) for s in control.switches(shocked)), "the draw must switch a gate"
    own = case.gradient(case.other, replaying(control.with_choices([gate.pattern for gate in shocked.gates])))
    assert same_bits(own.grads, case.gradient(case.other).grads)
    held = case.gradient(case.other, replaying(control))
    assert not same_bits(held.grads, own.grads)


@pytest.mark.parametrize("form", [form for form in FORMS if form not in FIRST_ORDER | NO_TRUE_SLOPE])
def test_held_gates_are_smooth_across_kinks(form: str) -> None:
    """The held gradient's remainder falls quadratically along a line on which gates switch."""
    case = Pass(FORMS[form], rows=60)
    control = case.pattern(case.theta)
    here = case.loss.layout.join(case.gradient(case.theta).grads)
    slope = case.products(case.theta, case.direction[None])[0]
    scales, errors, switched = [2.0**-k for k in range(7, 12)], [], 0
    for scale in scales:
        theta = case.theta + scale * case.direction
        switched += sum(int(s.sum()) for s in control.switches(case.pattern(theta)))
        found = case.loss.layout.join(case.gradient(theta, replaying(control)).grads)
        errors.append(float((found - here - scale * slope).norm()))
    assert switched > 0 or form in ONE_GATE
    x, y = torch.tensor(scales).log().double(), torch.tensor(errors).log().double()
    fitted = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    assert abs(fitted - 2) < 0.03, fitted


@pytest.mark.parametrize(
    "form", [form for form in FORMS if form not in NOT_QUADRATIC | NO_FORWARD_MODE | NO_TRUE_SLOPE]
)
def test_held_operation_is_taylors_continuation(form: str) -> None:
    """Outside oracle: a piece that is a polynomial of degree 2 is its own expansion about the control."""
    operation = FORMS[form]
    torch.manual_seed(3)
    operation = operation.double() if isinstance(operation, nn.Module) else operation
    x, dx = torch.randn(5, 12).double(), torch.randn(5, 12).double()

    def plain(t: Tensor) -> Tensor:
        return operation(1.0 * (x + t * dx))

    zero = torch.zeros((), dtype=torch.float64)
    value, first = torch.func.jvp(plain, (zero,), (zero + 1,))
    second = torch.func.jvp(lambda t: torch.func.jvp(plain, (t,), (zero + 1,))[1], (zero,), (zero + 1,))[1]
    pattern = Pattern()
    with recording(pattern)(nn.Identity()):
        operation(1.0 * x.clone().requires_grad_())
    with replaying(pattern)(nn.Identity()):
        held = operation(1.0 * (x + dx).requires_grad_())
    expected = value + first + second / 2
    assert (plain(zero + 1) - expected).abs().max() > 1e-3  # something switched
    torch.testing.assert_close(held.detach(), expected.detach(), rtol=1e-12, atol=1e-12)


def test_smooth_exponential_pieces_are_continued() -> None:
    x = torch.tensor([-1.0, 0.5, 0.5]).double()
    moved = torch.tensor([0.7, 800.0, -0.4]).double()  # exp(800) overflows on the piece that is not taken
    for name, below, above in (
        ("elu", lambda z: 0.7 * torch.expm1(z), lambda z: z),
        ("celu", lambda z: 0.7 * torch.expm1(z / 0.7), lambda z: z),
    ):
        function, pattern = getattr(F, name), Pattern()
        with recording(pattern)(nn.Identity()):
            function(x.clone().requires_grad_(), 0.7)
        leaf = moved.clone().requires_grad_()
        with replaying(pattern)(nn.Identity()):
            held = function(leaf, 0.7)
        torch.testing.assert_close(held[0].detach(), below(moved[0]))
        torch.testing.assert_close(held[2].detach(), above(moved[2]))
        assert torch.isfinite(torch.autograd.grad(held.sum(), leaf)[0]).all()


def test_pooling_replays_by_the_recorded_indices() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 2, 6, 6).double(), torch.randn(2, 2, 6, 6).double()
    _, index = F.max_pool2d(x, 3, 2, 1, return_indices=True)
    pattern = Pattern()
    with recording(pattern)(nn.Identity()):
        F.max_pool2d(x.clone().requires_grad_(), 3, 2, 1)
    with replaying(pattern)(nn.Identity()):
        held = F.max_pool2d(y.clone().requires_grad_(), 3, 2, 1)
    for n, c, i, j in torch.cartesian_prod(*(torch.arange(s) for s in index.shape)).tolist():
        place = int(index[n, c, i, j])
        assert held[n, c, i, j] == y[n, c, place // 6, place % 6]


@pytest.mark.parametrize("name", [n for n in CASES if n != "checkpointed"])
def test_every_case_is_equal_to_the_bit(name: str) -> None:
    """Whole models: dropout, accumulation, batch normalization, attention; gates or none."""
    case = make(name)
    path = case.path(2)
    loss, state, step = path.point.loss, path.trajectory.state(1), path.steps[1]
    arguments = (state.theta, state.buffers, step.batch, step.random, "here")
    pattern = Pattern()
    plain, recorded = loss.gradient(*arguments), loss.within(recording(pattern)).gradient(*arguments)
    replayed = loss.within(replaying(pattern)).gradient(*arguments)
    assert same_bits(plain.grads, recorded.grads)
    assert same_bits(plain.grads, replayed.grads)
    assert torch.equal(plain.loss, replayed.loss)
    assert all(torch.equal(plain.buffers[n], replayed.buffers[n]) for n in plain.buffers)
    assert bool(pattern.gates) == (name == "relu_cnn")


def test_micro_batches_keep_their_own_gates_and_products_replay_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1)).double()
    batch = ak.accumulate([torch.randn(4, 3).double() for _ in range(3)])
    point = ak.capture(model, torch.optim.AdamW(model.parameters()), lambda m, b: m(b).square().mean())
    state, random = point.captured.state, point.captured.random
    arguments = (state.theta, state.buffers, batch, random, "here")
    pattern = Pattern()
    plain = point.loss.within(recording(pattern)).gradient(*arguments)
    assert [len(call) for call in pattern.calls] == [1, 1, 1]
    graph = GradientGraph(point.loss.within(replaying(pattern)), *arguments)
    assert same_bits(plain.grads, graph.gradient.grads)
    u = torch.randn(2, point.loss.layout.padded_size).double()
    u = point.loss.layout.expand(point.loss.layout.compact(u))
    twice = [graph.products(u) for _ in range(2)]
    assert torch.equal(twice[0], twice[1])
    assert torch.equal(twice[0], GradientGraph(point.loss, *arguments).products(u))


def test_layers_are_named_and_switches_counted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Sequential(nn.Linear(6, 4), nn.ReLU6()), nn.Linear(4, 1))
    model = model.double()
    batch = torch.randn(7, 3).double()
    point = ak.capture(
        model, torch.optim.AdamW(model.parameters()), lambda m, b: F.relu(m(b)).mean() + abs(m(b)).mean()
    )
    state, random = point.captured.state, point.captured.random
    other = state.theta + 0.3 * point.loss.layout.expand(torch.randn(point.loss.layout.size).double())
    patterns = []
    for theta in (state.theta, other):
        patterns.append(Pattern())
        point.loss.within(recording(patterns[-1], values=True)).gradient(theta, state.buffers, batch, random, "here")
    assert patterns[0].labels == [
        "1 relu",
        "2.1 hardtanh",
        "(loss_fn) relu",
        "1 relu 2",
        "2.1 hardtanh 2",
        "(loss_fn) abs",
    ]
    weights = [point.loss.layout.by_name(theta) for theta in (state.theta, other)]
    hidden = [batch @ w["0.weight"].mT + w["0.bias"] for w in weights]
    expected = int(((hidden[0] > 0) != (hidden[1] > 0)).sum())
    assert expected > 0
    assert int(patterns[0].switches(patterns[1])[0].sum()) == expected
    torch.testing.assert_close(patterns[0].gates[0].margin, hidden[0].abs())
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks


def failing(module: nn.Module, loss_fn: Callable | None = None) -> str:
    """The message of a model whose gates cannot be held."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), module).double()
    batch = torch.randn(5, 3).double()
    point = ak.capture(model, torch.optim.AdamW(model.parameters()), loss_fn or (lambda m, b: m(b).square().mean()))
    state, random = point.captured.state, point.captured.random
    point.loss.gradient(state.theta, state.buffers, batch, random, "here")  # without gates it works
    with pytest.raises(UnfrozenGate) as error:
        point.loss.within(recording(Pattern())).gradient(state.theta, state.buffers, batch, random, "here")
    assert not torch.nn.modules.module._global_forward_hooks
    return str(error.value)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(4, 2, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x[None])[0]


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return torch.relu(x)


def test_gates_below_python_are_refused_by_name() -> None:
    assert "relu in '1.rnn'" in failing(Recurrent())
    assert "relu in '1'" in failing(Apply(lambda x: scripted(x)))


def test_kinks_that_are_not_known_are_refused_by_name() -> None:
    assert "frac in '1'" in failing(Apply(lambda x: x + torch.frac(x)))
    assert "linalg_vector_norm in '1'" in failing(Apply(lambda x: x.norm(1)))
    assert "median in '1'" in failing(Apply(lambda x: x.median()))
    assert "fmod in '(loss_fn)'" in failing(nn.Identity(), lambda m, b: (m(b) + m(b).fmod(1)).square().mean())


def test_activation_checkpointing_is_refused() -> None:
    message = failing(Apply(lambda x: checkpoint(torch.relu, x, use_reentrant=False)))
    assert "relu in '1'" in message
    assert "checkpointing off" in message


def test_guards_and_constants_are_no_gates() -> None:
    """Division guards, and kinks in what the parameters do not move, are left alone."""
    case = Pass(lambda x: F.normalize(x) + F.cosine_similarity(x, x.sin())[:, None] + torch.ones(5, 1).relu().double())
    assert not case.pattern(case.theta).gates


def test_another_way_through_the_code_is_refused() -> None:
    case = Pass(lambda x: x.relu())
    pattern = case.pattern(case.theta)
    more = Pass(lambda x: x.relu().abs())
    fewer = Pass(lambda x: x.sin())
    for other, words in ((more, "has abs of shape"), (fewer, "has no gate")):
        with pytest.raises(UnfrozenGate, match=words):
            other.gradient(other.theta, replaying(pattern))
    with pytest.raises(UnfrozenGate, match="gates and the other pass"):
        pattern.switches(Pattern())
    wider = Pass(lambda x: torch.cat([x, x]).relu().view(5, -1))
    with pytest.raises(UnfrozenGate, match="of shape"):
        wider.gradient(wider.theta, replaying(pattern))


def test_the_tables_are_covered() -> None:
    """Every elementwise kind and pooling in the tables is met by a form above."""
    seen = set()
    for form in FORMS.values():
        case = Pass(form)
        seen |= {gate.kind for gate in case.pattern(case.theta).gates}
    assert set(PIECEWISE) - seen == {"absolute"}
    assert {name for name in WINDOWS if name in ("max_pool1d", "max_pool2d", "max_pool3d")} <= seen


def test_a_detached_choice_switches_as_its_twin_with_a_gradient() -> None:
    """The share of switched gates of |h|, and of the same written with a mask that has no gradient."""
    shares = []
    for form in (torch.abs, lambda h: torch.where(h.detach() > 0, h, -h)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), Apply(form), nn.Linear(8, 1)).double()
        batches = [torch.randn(6, 3).double() for _ in range(4)]
        point = ak.capture(model, torch.optim.AdamW(model.parameters(), lr=0.3), lambda m, b: m(b).square().mean())
        change = point.follow(batches).replace(torch.randn(6, 3).double())
        shares.append(switch_fraction(change).values)
    assert shares[0][..., 0].item() > 0
    assert (shares[0][..., :-1] == shares[1][..., :-1]).all()
