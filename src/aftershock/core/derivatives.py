"""Why a derivative cannot be had, in the user's words."""

from __future__ import annotations

from torch import Tensor

from ..errors import AftershockError, UnsupportedAttention, UnsupportedModel

REENTRANT = "the model uses reentrant activation checkpointing, which hides parameters; set use_reentrant=False"


def first_line(error: BaseException) -> str:
    """What an error of somebody else's code says first."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def named_line(error: BaseException) -> str:
    """The same after the kind of error that it is."""
    return f"{type(error).__name__}: {first_line(error)}"


def refuse_reentrant(loss: Tensor) -> None:
    """Reentrant checkpointing hides parameters from autograd.grad: they would look unused."""
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name().startswith("CheckpointFunction"):
            raise UnsupportedModel(REENTRANT)
        seen.add(node)
        waiting += [next_node for next_node, _ in node.next_functions]


def derivative_error(error: RuntimeError) -> AftershockError:
    text = str(error)
    if "attention" in text and "not implemented" in text:
        return UnsupportedAttention(
            f"the model forces an attention kernel that has no second derivative ({first_line(error)}). "
            'Set attn_implementation="eager", or wrap the attention in '
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )
    if "double backward" in text or "differentiate twice" in text or "not implemented" in text:
        return UnsupportedModel(
            f"an operation of the model has no second derivative ({first_line(error)}). Replace it, or "
            "remove torch.compile and custom autograd functions from what loss_fn calls"
        )
    if "Checkpointing is not compatible" in text or "use_reentrant" in text:
        return UnsupportedModel(REENTRANT)
    return UnsupportedModel(f"the gradient could not be computed: {first_line(error)}")
