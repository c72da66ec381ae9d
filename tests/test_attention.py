"""Attention with a second derivative on a CPU: against torch's math kernel, and against training's bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import aftershock as ak
from aftershock.core.attention import FusedAttention
from aftershock.core.graphs import GradientGraph

SHAPES = [(2, 3, 7, 7, 4), (1, 1, 5, 9, 8), (2, 2, 40, 40, 16)]  # batch, heads, queries, keys, size


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_the_math_kernels(shape: tuple[int, ...], scale: float | None, causal: bool) -> None:
    batch, heads, n, m, size = shape
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> Tensor:  # as a projection leaves it: not contiguous
        x = torch.randn(batch, length, heads, size, generator=generator, dtype=torch.float64)
        return x.transpose(1, 2).requires_grad_()

    inputs, along, weights = [draw(n), draw(m), draw(m)], [draw(n), draw(m), draw(m)], draw(n)

    def gradients() -> tuple[Tensor, ...]:
        out = F.scaled_dot_product_attention(*inputs, is_causal=causal, scale=scale)
        return torch.autograd.grad((weights * out.sin()).sum(), inputs, create_graph=True)

    with sdpa_kernel(SDPBackend.MATH):
        truth = torch.autograd.grad(gradients(), inputs, along)
        with FusedAttention() as attention:
            found = gradients()
            products = torch.autograd.grad(found, inputs, along)
    plain = gradients()
    assert not attention.replaced
    for ours, theirs in zip(found, plain):
        assert torch.equal(ours, theirs)  # the very kernel
    for ours, theirs in zip(products, truth):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13 * float(theirs.norm()))  # float64, sums of ≤ 40


class Mixer(nn.Module):
    """One attention over a short sequence, by the call that is asked for."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.qkv = kind, nn.Linear(8, 24)
        self.whole = nn.MultiheadAttention(8, 2, batch_first=True) if kind == "module" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.whole is not None:
            return self.whole(x, x, x, need_weights=False)[0]
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        masked = self.kind == "masked" or (self.kind == "sometimes masked" and bool(x[0, 0, 0] > 100))
        mask = torch.ones(x.shape[1], x.shape[1]).tril().log() if masked else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


@pytest.mark.parametrize("kind", ["plain", "masked", "sometimes masked", "module"])
def test_a_path_with_graphs_is_training(kind: str) -> None:
    """Whatever kernel a graph takes, the control's steps have the bits of a plain loop."""
    torch.manual_seed(0)
    model = Mixer(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def loss_fn(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).square().sum(-1).mean()

    batches = [torch.randn(3, 33, 8) for _ in range(4)]
    batches[2][0, 0, 0] = 101.0
    point = ak.capture(model, optimizer, loss_fn, unused="skip")
    path = point.follow(batches, keep="graphs")
    if kind in ("plain", "sometimes masked"):
        assert point.loss.graph_is_plain
    for step, batch in zip(path.steps, batches):
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        assert step.loss == loss.item()
    trained = dict(model.named_parameters())
    for name, values in point.loss.layout.by_name(path.trajectory.state(4).theta).items():
        assert torch.equal(values, trained[name])


def test_autocast_keeps_to_the_math_kernel() -> None:
    """Training's attention is then in bfloat16, which the closed form does not imitate."""
    model = Mixer("plain")
    point = ak.capture(
        model, torch.optim.AdamW(model.parameters()), lambda m, x: m(x).float().square().mean(), autocast=torch.bfloat16
    )
    state = point.captured.state
    graph = GradientGraph(point.loss, state.theta, state.buffers, torch.randn(3, 6, 8), point.captured.random, "here")
    assert graph.replaced
    assert graph.products(graph.raw[None]).isfinite().all()
