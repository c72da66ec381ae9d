"""Attention on a CPU, with a second derivative, in the kernel that training runs.

The fused kernel has no second derivative. The math kernel has one and rounds otherwise, so that the control would need
a plain gradient beside every graph. Here the fused kernel computes value and gradient, and a closed form the gradient's
derivative: a gradient with its graph has training's bits. The n × n weights are made anew, not kept.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

PRECISE = (torch.float32, torch.float64)  # in shorter types the math kernel sums in longer ones
HIDING = functional.multi_head_attention_forward  # calls attention where no mode sees it
aten = torch.ops.aten


def takes_fused(loss: Tensor) -> bool:
    """Whether a loss was computed with the fused kernel of a CPU, by the graph that it has."""
    seen, waiting = set[Any](), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name().startswith("ScaledDotProductFlashAttentionForCpu"):
            return True
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return False


class FusedAttention(TorchFunctionMode):
    """Gives attention its second derivative where training takes the fused kernel of a CPU.

    Goes inside `sdpa_kernel(SDPBackend.MATH)`, which all other attention then takes. For models that take that kernel
    only: under any such mode some functions of torch lose an argument (`F.l1_loss` its weight).
    """

    def __init__(self) -> None:
        super().__init__()
        self.replaced = False  # did some attention take another kernel than it takes in training?

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is HIDING:
            self.replaced = True
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        given = (query, key, value, attn_mask, dropout_p, is_causal)
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        fused = self._takes_fused(given, options)
        plain = attn_mask is None and not dropout_p and not enable_gqa and query.dtype in PRECISE
        if not fused or not plain or torch.is_autocast_enabled("cpu"):
            self.replaced |= fused
            return functional.scaled_dot_product_attention(*given, **options)
        size = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        out: Tensor = _Attention.apply(query, key, value, is_causal, size)
        return out

    def _takes_fused(self, given: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Whether training takes the fused kernel here, which is torch's own choice."""
        before = torch.backends.cuda.flash_sdp_enabled()
        torch.backends.cuda.enable_flash_sdp(True)
        try:
            return bool(torch._fused_sdp_choice(*given, **options) == SDPBackend.FLASH_ATTENTION.value)
        finally:
            torch.backends.cuda.enable_flash_sdp(before)


class _Attention(Function):
    """O = P V with P = softmax(scale · Q Kᵀ)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        return *_Backward.apply(grad, q, k, v, out.detach(), sums, ctx.causal, ctx.scale), None, None


class _Backward(Function):
    """(G, Q, K, V) to the gradients of ⟨G, O⟩, and in `backward` the derivative of that map."""

    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(grad, q, k, v, out)
        ctx.causal, ctx.scale = causal, scale
        found: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, sums, 0.0, causal, scale=scale
        )
        return found

    @staticmethod
    def backward(ctx: Any, dual_q: Tensor, dual_k: Tensor, dual_v: Tensor) -> tuple[Tensor | None, ...]:
        grad, q, k, v, out = ctx.saved_tensors
        return *second_derivative(grad, q, k, v, out, dual_q, dual_k, dual_v, ctx.causal, ctx.scale), *(None,) * 4


def second_derivative(
    grad: Float[Tensor, "*batch n width"],
    q: Float[Tensor, "*batch n size"],
    k: Float[Tensor, "*batch m size"],
    v: Float[Tensor, "*batch m width"],
    out: Float[Tensor, "*batch n width"],
    dual_q: Float[Tensor, "*batch n size"],
    dual_k: Float[Tensor, "*batch m size"],
    dual_v: Float[Tensor, "*batch m width"],
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The derivatives of ⟨Q̄, ∂Q⟩ + ⟨K̄, ∂K⟩ + ⟨V̄, ∂V⟩ by (G, Q, K, V), with ∂ the gradients of ⟨G, O⟩.

    With P = softmax(S), S = scale Q Kᵀ, E = G Vᵀ − rowsum(G ⊙ O):

        ∂Q = scale (P⊙E) K,  ∂K = scale (P⊙E)ᵀ Q,  ∂V = Pᵀ G
        X = scale (Q̄ Kᵀ + Q K̄ᵀ),  T = P ⊙ (X − rowsum(P⊙X)),  U = W − P ⊙ rowsum(W) with W = T⊙E + P⊙(G V̄ᵀ)
        by G: T V + P V̄,  by V: Tᵀ G,  by Q: scale (U K + (P⊙E) K̄),  by K: scale (Uᵀ Q + (P⊙E)ᵀ Q̄)
    """
    shapes = (grad.shape, q.shape, k.shape, v.shape)
    given = (grad, q * scale, k, v, out, dual_q * scale, dual_k, dual_v)
    grad, q, k, v, out, dual_q, dual_k, dual_v = (x.flatten(0, -3).contiguous() for x in given)
    logits = q @ k.mT
    if causal:
        later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        logits.masked_fill_(later, -math.inf)
    p = logits.softmax(-1)
    e = torch.baddbmm((grad * out).sum(-1, keepdim=True), grad, v.mT, beta=-1)
    by_logits = p * e
    t = aten._softmax_backward_data((dual_q @ k.mT).baddbmm_(q, dual_k.mT), p, -1, p.dtype)
    u = (t * e).addcmul_(p, grad @ dual_v.mT)
    u.addcmul_(p, u.sum(-1, keepdim=True), value=-1)
    by_q = (u @ k).baddbmm_(by_logits, dual_k).mul_(scale)
    by_k = (u.mT @ q).baddbmm_(by_logits.mT, dual_q)
    found = ((t @ v).baddbmm_(p, dual_v), by_q, by_k, t.mT @ grad)
    by_grad, by_q, by_k, by_v = (x.view(shape) for x, shape in zip(found, shapes))
    return by_grad, by_q, by_k, by_v
