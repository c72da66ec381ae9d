"""Every function with a kink is counted as a gate or refused by name, never passed over.

The truth is torch's own: along a line, where the value or the gradient of the plain function jumps (found by
bisection in float64), there is a kink. On its two sides the recorded choices must differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aftershock.core.gates import Pattern, recording
from aftershock.errors import UnfrozenGate

Function = Callable[[Tensor], Tensor]
ROWS, WIDTH = 6, 12
LABELS = torch.arange(ROWS) % WIDTH
SIGNS = torch.where(torch.arange(ROWS) % 2 == 0, 1.0, -1.0).double()
TARGETS = (torch.arange(ROWS * WIDTH) % 2).view(ROWS, WIDTH).double()
OTHER = torch.linspace(-1, 1, ROWS * WIDTH).double().view(ROWS, WIDTH)


def image(pool: Function) -> Function:
    return lambda x: pool(x.view(ROWS, 1, 3, 4))


def volume(pool: Function) -> Function:
    return lambda x: pool(x.view(ROWS, 1, 2, 3, 2))


class Straight(torch.autograd.Function):
    """A kink that only the backward pass has."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad * (ctx.saved_tensors[0] > 0)


def unheeded(x: Tensor, choose: Callable[[Tensor], Tensor]) -> Tensor:
    with torch.no_grad():
        chosen = choose(x.clone())
    return x * chosen


FUNCTIONAL: dict[str, Function] = {
    "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x, 3),
    "adaptive_avg_pool2d": image(lambda x: F.adaptive_avg_pool2d(x, 2)),
    "adaptive_avg_pool3d": volume(lambda x: F.adaptive_avg_pool3d(x, 2)),
    "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x, 3),
    "adaptive_max_pool2d": image(lambda x: F.adaptive_max_pool2d(x, 2)),
    "adaptive_max_pool3d": volume(lambda x: F.adaptive_max_pool3d(x, 2)),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "avg_pool1d": lambda x: F.avg_pool1d(x, 3),
    "avg_pool2d": image(lambda x: F.avg_pool2d(x, 2)),
    "avg_pool3d": volume(lambda x: F.avg_pool3d(x, 2)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), TARGETS),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, TARGETS),
    "celu": lambda x: F.celu(x, 0.5),
    "channel_shuffle": image(lambda x: F.channel_shuffle(x.view(ROWS, 4, 3, 1), 2)),
    "cosine_embedding_loss": lambda x: F.cosine_embedding_loss(x, OTHER, SIGNS, reduction="none"),
    "cosine_similarity": lambda x: F.cosine_similarity(x, OTHER),
    "cross_entropy": lambda x: F.cross_entropy(x, LABELS, ignore_index=2, label_smoothing=0.1),
    "ctc_loss": lambda x: F.ctc_loss(
        x.view(ROWS, 3, 4).log_softmax(2), torch.ones(3, 2).long(), torch.full((3,), ROWS), torch.full((3,), 2)
    ),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout1d": lambda x: F.dropout1d(x, 0.3),
    "dropout2d": image(lambda x: F.dropout2d(x.view(ROWS, 3, 4, 1), 0.3)),
    "dropout3d": volume(lambda x: F.dropout3d(x, 0.3)),
    "elu": lambda x: F.elu(x, 0.5),
    "embedding": lambda x: F.embedding(LABELS % ROWS, x),
    "embedding_bag": lambda x: F.embedding_bag(LABELS.view(2, 3) % ROWS, x, mode="mean"),
    "embedding_bag max": lambda x: F.embedding_bag(LABELS.view(2, 3) % ROWS, x, mode="max"),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, training=True),
    "fractional_max_pool2d": image(lambda x: F.fractional_max_pool2d(x, 2, output_size=2)),
    "fractional_max_pool3d": volume(
        lambda x: F.fractional_max_pool3d(x.view(1, 1, ROWS, 4, 3), 2, output_size=(3, 2, 1))
    ),
    "gaussian_nll_loss": lambda x: F.gaussian_nll_loss(x, OTHER, x.exp()),
    "gelu": F.gelu,
    "glu": F.glu,
    "grid_sample": lambda x: F.grid_sample(
        OTHER.view(1, 1, ROWS, WIDTH), x.view(1, 4, 9, 2), align_corners=False, padding_mode="border"
    ),
    "group_norm": lambda x: F.group_norm(x, 3),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "gumbel_softmax hard": lambda x: F.gumbel_softmax(x, hard=True),
    "hardshrink": F.hardshrink,
    "hardsigmoid": lambda x: F.hardsigmoid(4 * x),
    "hardswish": lambda x: F.hardswish(4 * x),
    "hardtanh": F.hardtanh,
    "hinge_embedding_loss": lambda x: F.hinge_embedding_loss(x, 2 * TARGETS - 1),
    "huber_loss": lambda x: F.huber_loss(x, OTHER, delta=0.3),
    "instance_norm": lambda x: F.instance_norm(x.view(ROWS, 3, 4)),
    "interpolate": image(lambda x: F.interpolate(x, scale_factor=2, mode="bicubic")),
    "kl_div": lambda x: F.kl_div(x.log_softmax(1), OTHER.softmax(1)),
    "l1_loss": lambda x: F.l1_loss(x, OTHER),
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "leaky_relu": F.leaky_relu,
    "local_response_norm": image(lambda x: F.local_response_norm(x.view(ROWS, 3, 4, 1), 2)),
    "log_softmax": lambda x: F.log_softmax(x, 1),
    "logsigmoid": F.logsigmoid,
    "lp_pool1d": lambda x: F.lp_pool1d(x, 2, 3),
    "lp_pool2d": image(lambda x: F.lp_pool2d(x, 2, 2)),
    "lp_pool3d": volume(lambda x: F.lp_pool3d(x, 2, 2)),
    "margin_ranking_loss": lambda x: F.margin_ranking_loss(x, OTHER, 2 * TARGETS - 1),
    "max_pool1d": lambda x: F.max_pool1d(x, 3),
    "max_pool2d": image(lambda x: F.max_pool2d(x, 2)),
    "max_pool3d": volume(lambda x: F.max_pool3d(x, 2)),
    "max_unpool1d": lambda x: F.max_unpool1d(*F.max_pool1d(x[:, None], 2, return_indices=True), 2),
    "max_unpool2d": image(lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)),
    "max_unpool3d": volume(lambda x: F.max_unpool3d(*F.max_pool3d(x, (2, 1, 1), return_indices=True), (2, 1, 1))),
    "mish": F.mish,
    "mse_loss": lambda x: F.mse_loss(x, OTHER),
    "multi_head_attention_forward": lambda x: attention(x[:, None]),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x, LABELS),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x, torch.tensor([[3, 1] + [-1] * 10] * ROWS)),
    "multilabel_soft_margin_loss": lambda x: F.multilabel_soft_margin_loss(x, TARGETS),
    "nll_loss": lambda x: F.nll_loss(x.log_softmax(1), LABELS),
    "normalize": F.normalize,
    "normalize p=1": lambda x: F.normalize(x, p=1),
    "normalize p=inf": lambda x: F.normalize(x, p=torch.inf),
    "pad": lambda x: F.pad(x, (1, 1)),
    "pairwise_distance": lambda x: F.pairwise_distance(x, OTHER),
    "pairwise_distance p=1": lambda x: F.pairwise_distance(x, OTHER, p=1),
    "pairwise_distance p=inf": lambda x: F.pairwise_distance(x, OTHER, p=torch.inf),
    "pdist": F.pdist,
    "pdist p=1": lambda x: F.pdist(x, p=1),
    "poisson_nll_loss": lambda x: F.poisson_nll_loss(x, TARGETS, full=True),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.2]).double()),
    "relu": F.relu,
    "relu6": F.relu6,
    "rms_norm": lambda x: F.rms_norm(x, (WIDTH,)),
    "rrelu": F.rrelu,
    "rrelu training": lambda x: F.rrelu(x, training=True),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, ROWS, WIDTH)] * 3),
    "scaled_dot_product_attention masked": lambda x: F.scaled_dot_product_attention(
        *[x.view(1, 1, ROWS, WIDTH)] * 3, attn_mask=torch.ones(ROWS, ROWS).tril().bool()
    ),
    "selu": F.selu,
    "sigmoid": F.sigmoid,
    "silu": F.silu,
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, OTHER, beta=0.3),
    "smooth_l1_loss beta=0": lambda x: F.smooth_l1_loss(x, OTHER, beta=0.0),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, 2 * TARGETS - 1),
    "softmax": lambda x: F.softmax(x, 1),
    "softmin": lambda x: F.softmin(x, 1),
    "softplus": F.softplus,
    "softshrink": F.softshrink,
    "softsign": F.softsign,
    "tanh": F.tanh,
    "tanhshrink": F.tanhshrink,
    "threshold": lambda x: F.threshold(x, 0.1, -1.0),
    "triplet_margin_loss": lambda x: F.triplet_margin_loss(x, OTHER, -OTHER, margin=0.1, swap=True),
    "triplet_margin_with_distance_loss": lambda x: F.triplet_margin_with_distance_loss(x, OTHER, OTHER.flip(0)),
}
# linear in what they are given, shapes, checks, other names of the same
LINEAR = """
    affine_grid bilinear conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d fold
    linear one_hot pixel_shuffle pixel_unshuffle unfold upsample upsample_bilinear upsample_nearest
    native_channel_shuffle grouped_mm scaled_grouped_mm scaled_mm linear_cross_entropy assert_int_or_pair
    boolean_dispatch has_torch_function handle_torch_function has_torch_function_unary
    has_torch_function_variadic
"""

torch.manual_seed(0)
heads = nn.MultiheadAttention(WIDTH, 2).double()


def attention(x: Tensor) -> Tensor:
    return heads(x, x, x, need_weights=True)[0]


TORCH: dict[str, Function] = {
    "norm": lambda x: x.norm(dim=1),
    "norm p=1": lambda x: x.norm(1, dim=1),
    "norm p=inf": lambda x: torch.norm(x, p=float("inf"), dim=1),
    "vector_norm p=1": lambda x: torch.linalg.vector_norm(x, 1),
    "matrix_norm 1": lambda x: torch.linalg.matrix_norm(x, 1),
    "cdist": lambda x: torch.cdist(x, OTHER),
    "cdist p=1": lambda x: torch.cdist(x, OTHER, p=1),
    "dist p=1": lambda x: torch.dist(x, OTHER, p=1),
    "renorm": lambda x: torch.renorm(x, 2, 1, 2.5),
    "aminmax": lambda x: torch.stack(torch.aminmax(x, dim=1)),
    "median": lambda x: x.median(1).values,
    "median of all": lambda x: x.median(),
    "quantile": lambda x: torch.quantile(x, 0.3, dim=1),
    "mode": lambda x: x.mode(1).values,
    "kthvalue": lambda x: x.kthvalue(2, 1).values,
    "sort": lambda x: x.sort(1).values,
    "msort": torch.msort,
    "topk": lambda x: x.topk(2).values,
    "cummax": lambda x: x.cummax(1).values,
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "remainder": lambda x: x % 0.7,
    "fmod": lambda x: torch.fmod(x, 0.7),
    "frac": torch.frac,
    "floor_divide": lambda x: x * (x.detach() // 0.7),
    "div rounded": lambda x: torch.div(x, 0.7, rounding_mode="floor") + x,
    "floor": lambda x: x * torch.floor(x),
    "ceil": lambda x: x + torch.ceil(x),
    "round": lambda x: x + torch.round(2 * x),
    "trunc": lambda x: x + torch.trunc(2 * x),
    "sign": lambda x: x + torch.sign(x),
    "sgn": lambda x: x + torch.sgn(x),
    "heaviside": lambda x: x * torch.heaviside(x.detach(), torch.zeros(()).double()),
    "copysign": lambda x: torch.copysign(OTHER, x) * x,
    "fmax": lambda x: torch.fmax(x, OTHER),
    "logaddexp": lambda x: torch.logaddexp(x, OTHER),
    "atan2": lambda x: torch.atan2(x, OTHER),
    "hypot": lambda x: torch.hypot(x, OTHER),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "scatter_reduce": lambda x: torch.zeros(3, WIDTH).double().scatter_reduce(
        0, (LABELS % 3)[:, None].expand(ROWS, WIDTH), x, "amax", include_self=False
    ),
    "index_reduce": lambda x: torch.zeros(3, WIDTH).double().index_reduce(
        0, LABELS % 3, x, "amax", include_self=False
    ),
    "custom backward": lambda x: Straight.apply(x) + x,
    # without a gradient
    "comparison": lambda x: unheeded(x, lambda d: d > 0),
    "comparison from the left": lambda x: unheeded(x, lambda d: d > 0),
    "logical_not": lambda x: unheeded(x, lambda d: torch.logical_not(d.relu())),
    "bool": lambda x: unheeded(x, lambda d: d.relu().bool()),
    "to long": lambda x: unheeded(x, lambda d: d.mul(3).to(torch.int64)),
    "type": lambda x: unheeded(x, lambda d: d.mul(3).type(torch.IntTensor)),
    "copied into integers": lambda x: unheeded(x, lambda d: torch.zeros(ROWS, WIDTH).long().copy_(3 * d)),
    "argsort": lambda x: unheeded(x, lambda d: d.argsort(1)),
    "searchsorted": lambda x: unheeded(x, lambda d: torch.searchsorted(torch.linspace(-1, 1, 9).double(), d)),
    "bucketize": lambda x: unheeded(x, lambda d: torch.bucketize(d, torch.linspace(-1, 1, 9).double())),
    "one-hot of argmax": lambda x: unheeded(x, lambda d: F.one_hot(d.argmax(1), WIDTH)),
    "nonzero": lambda x: unheeded(x, lambda d: (len(d.relu().nonzero()) * torch.ones(1))),
    "count_nonzero": lambda x: unheeded(x, lambda d: d.relu().count_nonzero()),
    "masked": lambda x: x[x.detach() > 0].square(),
    "isclose": lambda x: unheeded(x, lambda d: torch.isclose(d, OTHER, atol=0.5)),
    "allclose": lambda x: x * torch.allclose(x.detach()[0, :2], OTHER[0, :2], atol=0.7),
    "bernoulli": lambda x: unheeded(x, lambda d: torch.bernoulli(d.sigmoid())),
    "multinomial": lambda x: unheeded(x, lambda d: torch.multinomial(d.softmax(1), 1)),
    "unique": lambda x: x * len(torch.unique(x.detach().relu())),
    "histc": lambda x: x[0] * torch.histc(x.detach(), 12),
    "item": lambda x: x if x.detach()[0, 0].item() > 0 else -x,
    "float": lambda x: x if float(x.detach()[0, 0]) > 0 else -x,
    "int": lambda x: x * int(3 * x.detach()[0, 0]),
    "tolist": lambda x: x if x.detach()[0].tolist()[0] > 0 else -x,
    "numpy": lambda x: x if x.detach().numpy()[0, 0] > 0 else -x,
    "if": lambda x: x if x[0, 0] > 0 else -x,
    "if of a float": lambda x: x if x.detach()[0, 0].relu() else -x,
    "torch.func": lambda x: torch.func.vmap(torch.relu)(x),
}  # fmt: skip

# What has to be seen as it is: no gate, no refusal. Everything above that is not here has a kink.
LEFT_ALONE = """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d alpha_dropout avg_pool1d avg_pool2d avg_pool3d
    batch_norm binary_cross_entropy binary_cross_entropy_with_logits channel_shuffle cosine_similarity
    cross_entropy ctc_loss dropout dropout1d dropout2d dropout3d embedding embedding_bag feature_alpha_dropout
    gaussian_nll_loss gelu glu group_norm gumbel_softmax instance_norm interpolate kl_div layer_norm
    local_response_norm log_softmax logsigmoid mish mse_loss multi_head_attention_forward
    multilabel_soft_margin_loss nll_loss normalize pad pairwise_distance pdist poisson_nll_loss rms_norm
    scaled_dot_product_attention sigmoid silu soft_margin_loss softmax softmin softplus tanh tanhshrink
    norm cdist logcumsumexp logsumexp logaddexp hypot
"""
SMOOTH = [*LEFT_ALONE.split(), "scaled_dot_product_attention masked"]
# kinks of the second derivative only, or that a line does not cross: what they are is known
BENT = {"softsign", "celu", "huber_loss", "smooth_l1_loss", "mode", "lp_pool1d", "lp_pool2d", "lp_pool3d", "atan2"}

FOUND = {**FUNCTIONAL, **TORCH}


def outcome(function: Function, x: Tensor) -> Tensor:
    """The value and the gradient at x, as plain torch computes them."""
    leaf = x.clone().requires_grad_()
    torch.manual_seed(0)
    out = function(1.0 * leaf).double()
    total = (out * torch.linspace(0.5, 1.5, out.numel()).double().view(out.shape)).sum()
    (grad,) = torch.autograd.grad(total, leaf, allow_unused=True) if total.requires_grad else (None,)
    return torch.cat([total.detach().view(1), (torch.zeros_like(leaf) if grad is None else grad).flatten()])


def jump(function: Function, start: Tensor, direction: Tensor) -> tuple[float, float] | None:
    """The two sides of a jump of the value or the gradient on a line, 1e-8 apart; None where there is none."""

    def at(t: float) -> tuple[float, Tensor]:
        return t, outcome(function, start + t * direction)

    def change(left: tuple[float, Tensor], right: tuple[float, Tensor]) -> float:
        """Of the gradient, or of the value beyond what the gradients say, in terms of their size."""
        (s, a), (t, b) = left, right
        told = (t - s) * float((a + b)[1:] @ direction.flatten()) / 2
        return max(abs(float(b[0] - a[0]) - told), float((b - a)[1:].abs().max())) / max(1.0, float(a.abs().max()))

    points = [at(i / 16) for i in range(17)]
    pairs = sorted(itertools.pairwise(points), key=lambda pair: -change(*pair))
    for left, right in pairs[:4]:
        while change(left, right) > 1e-5:  # a smooth function changes by 1e-7 over the last width
            if right[0] - left[0] < 1e-8:
                return left[0], right[0]
            middle = at((left[0] + right[0]) / 2)
            left, right = max((left, middle), (middle, right), key=lambda pair: change(*pair))
    return None


def choices(function: Function, x: Tensor) -> Pattern:
    pattern = Pattern()
    torch.manual_seed(0)
    with recording(pattern)(nn.Identity()):
        function(1.0 * x.clone().requires_grad_())
    return pattern


def line() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))  # type: ignore[return-value]


@pytest.mark.parametrize("name", [n for n in FOUND if n not in SMOOTH])
def test_a_kink_is_counted_or_refused(name: str) -> None:
    function, (start, direction) = FOUND[name], line()
    sides = jump(function, start, direction)
    assert (sides is not None) or name in BENT, "the table says that this has a kink"
    try:
        here = choices(function, start)
    except UnfrozenGate:
        return
    assert here.gates
    if sides is not None:
        patterns = [choices(function, start + t * direction) for t in sides]
        assert any(bool(s.any()) for s in patterns[0].switches(patterns[1])), "the choices do not see this kink"


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_functions_are_left_alone(name: str) -> None:
    function, (start, direction) = FOUND[name], line()
    assert jump(function, start, direction) is None
    assert not choices(function, start).gates


def test_the_table_holds_every_function_of_torch() -> None:
    """A function that a new version of torch adds belongs in the table."""
    named = {
        name.rstrip("_").removesuffix("_with_indices")
        for name in dir(F)
        if name[0].islower() and callable(getattr(F, name)) and not isinstance(getattr(F, name), type)
        and (getattr(getattr(F, name), "__module__", None) or "torch").split(".")[0] == "torch"
    }  # fmt: skip
    assert named - {name.split()[0] for name in FUNCTIONAL} - set(LINEAR.split()) == set()


def test_choices_of_the_batch_are_no_gates() -> None:
    """Masks of inputs, ignored labels and constants do not move with the parameters."""
    mask, labels = OTHER > 0, LABELS.clone()

    def loss(x: Tensor) -> Tensor:
        seen = torch.where(OTHER.abs() > 0.5, x, x.sin()) * mask.logical_not() + x * (labels != 2)[:, None]
        blank = torch.zeros_like(x).gt(0).double() + torch.ones_like(x.detach()).round()
        ranked = OTHER.argsort(1)[:, 0]
        if labels.max().item() > 3 and OTHER.mean().item() < 9:
            seen = seen + blank + ranked[:, None]
        return seen.gather(1, OTHER.topk(2).indices)

    assert not choices(loss, line()[0]).gates
