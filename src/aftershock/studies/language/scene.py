"""A language system at the time of the shock: its model after the continuation, its sequences and their parts."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ... import theory
from ...api.path import Path as Run
from ...api.point import TrainingPoint, capture
from ...core.batches import Batch
from ...core.lifting import lifting
from ...core.memory import left_on_card
from ...core.path_plans import require_fit
from ...errors import InvalidInput
from ...theory.finite_difference import STEPS
from ..study import System
from .models import ModelSource, build_model, load_encoder, require_length
from .text import TextSource, token_sequences

RATE, BETAS, EPSILON, DECAY = 1e-5, (0.9, 0.999), 1e-8, 0.01
LIMIT = 75 * 2**30  # bytes of a card that a system may take: one of 80 GB does
ONE_STATE, TWO_STATES = 4, 8  # in states: the memory with which a path keeps its first, and its last too
LEAST_VECTORS = 14  # copies of the parameters that a system holds at once, at the least
SAME_LOGITS = 1e-2  # of the largest: bfloat16 rounds by less, and another mask changes more
ROUNDINGS = 16  # by which logits may differ that no later token changes
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Protocol:
    """The paper's numbers (app:exp1_llm_details); `QUICK` has smaller ones."""

    sequences: int = 2048
    length: int = 129  # tokens; the last one is only predicted
    continuation: int = 500
    references: int = 2
    candidates: int = 8
    horizon: int = 8
    probe: int = 2
    scales: tuple[float, ...] = (0.0625, 0.125, 0.25, 0.5, 1.0)
    steps: tuple[float, ...] = STEPS

    @property
    def used(self) -> int:
        """Sequences with a part in the study; the rest are only drawn from."""
        return self.continuation + self.references + self.candidates + self.horizon - 1 + self.probe


FULL = Protocol()
QUICK = Protocol(sequences=64, length=33, continuation=20, candidates=4, horizon=4)


def logits_of(model: nn.Module, batch: Batch) -> tuple[Float[Tensor, "row token kind"], Int64[Tensor, "row token"]]:
    """The logits and what they should predict. Float64 weights compute in float64 throughout: norms and softmaxes of
    many models go through float32, whose rounding would stay."""
    tokens = batch["tokens"]
    with lifting(model) if next(model.parameters()).dtype == torch.float64 else nullcontext():
        found = model(input_ids=tokens[:, :-1], attention_mask=batch["mask"], use_cache=False)
    return found.logits, tokens[:, 1:]


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean loss of the next token, reduced in float64."""
    return theory.token_loss(*logits_of(model, batch))


@dataclass
class Clock:
    """Seconds by part of the work."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


@dataclass(frozen=True)
class Scene:
    """One system up to the shock. Its sequences come from one permutation: continuation, references, candidates,
    future and probe take theirs from its front, in this order."""

    system: System
    model: ModelSource
    text: TextSource
    dtype: str
    protocol: Protocol
    device: torch.device
    tokens: Int64[Tensor, "sequence token"]
    mask: Float[Tensor, "1 1 token token"] | None
    point: TrainingPoint
    clock: Clock

    def _batches(self, first: int, count: int) -> list[Batch]:
        return [_batch(self.tokens[i : i + 1], self.mask) for i in range(first, first + count)]

    @cached_property
    def control_batch(self) -> Batch:
        """The references together: sequences are equally long, so that its gradient is the mean of theirs."""
        first = self.protocol.continuation
        return _batch(self.tokens[first : first + self.protocol.references], self.mask)

    @cached_property
    def candidates(self) -> list[Batch]:
        first = self.protocol.continuation + self.protocol.references
        return self._batches(first, self.protocol.candidates)

    @cached_property
    def future(self) -> list[Batch]:
        first = self.protocol.used - self.protocol.probe - self.protocol.horizon + 1
        return self._batches(first, self.protocol.horizon - 1)

    @cached_property
    def probe(self) -> Batch:
        return _batch(self.tokens[self.protocol.used - self.protocol.probe : self.protocol.used], self.mask)

    @cached_property
    def path(self) -> Run:
        """The control; on a card its states are recomputed from the first, so that more rows fit."""
        batches = [self.control_batch, *self.future]
        if self.device.type != "cuda":
            return self.point.follow(batches)
        path = self.point.follow(batches, keep="checkpoints", memory=ONE_STATE * self.point.captured.state.nbytes)
        return Run(self.point, path.trajectory, self.memory)

    @property
    def memory(self) -> int | None:
        """What may be used on a card beside the model and the path; on a CPU, what is free."""
        return left_on_card(self.device, LIMIT, self.point.loss.player.nbytes)


def prepare(
    system: System,
    model: ModelSource,
    text: TextSource,
    dtype: str,
    tokenizer: Path | None,
    protocol: Protocol,
    device: str,
) -> Scene:
    """The system after its continuation: 500 g."""
    place = torch.device(device)
    clock = Clock(place)
    with clock.part("load"):
        encode = load_encoder(model, tokenizer)
        sequences = token_sequences(text, encode, protocol.sequences, protocol.length)
        # one order for all models of a domain
        order = torch.randperm(len(sequences), generator=System(text.name, system.seed, 0).generator("order"))
        tokens = sequences[order[: protocol.used]].to(place)
        network = build_model(model, place, DTYPES[dtype], system.seed)
        require_length(network, protocol.length - 1)
        require_vocabulary(network, tokens, model.name)
        parameters = sum(p.numel() for p in network.parameters())
        require_fit(model.name, parameters, DTYPES[dtype].itemsize, LEAST_VECTORS, place)
        require_causal(network, tokens[:1, :-1], model.name)
        mask = causal_mask(network, tokens[:1, :-1])
    with clock.part("continuation"):
        batches = [_batch(tokens[i : i + 1], mask) for i in range(protocol.continuation)]
        point = continued(network, batches)
        del network
        collect(place)
    return Scene(system, model, text, dtype, protocol, place, tokens, mask, point, clock)


def continued(network: nn.Module, batches: Sequence[Batch]) -> TrainingPoint:
    """The training point after AdamW's updates on these batches, from empty moments."""
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY, fused=True
    )
    start = capture(network, optimizer, next_token_loss)
    return start.follow(batches, keep="checkpoints", memory=TWO_STATES * start.captured.state.nbytes).end


def causal_mask(network: Any, tokens: Int64[Tensor, "row token"]) -> Float[Tensor, "1 1 token token"] | None:
    """Added to attention scores: 0 for what a token may see, else as good as −∞. Given whole, so that the model makes
    none of its own at every call; None for a model to which that is not the same."""
    count, dtype, device = tokens.shape[1], network.dtype, tokens.device
    hidden = torch.ones(count, count, dtype=torch.bool, device=device).triu(1)
    mask = torch.zeros(count, count, dtype=dtype, device=device).masked_fill(hidden, torch.finfo(dtype).min)[None, None]
    with torch.no_grad():
        plain = network(input_ids=tokens, use_cache=False).logits
        try:
            given = network(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        except Exception:  # OPT counts tokens by it, Bloom makes positions of it: each has its own error
            return None
    same = (given - plain).abs().max() <= SAME_LOGITS * plain.abs().max()
    return mask if bool(same) else None


def require_causal(network: Any, tokens: Int64[Tensor, "row token"], name: str) -> None:
    """Refuse a model whose logits see what they are to predict: two forward passes, which differ in the last token."""
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % network.get_input_embeddings().num_embeddings
    with torch.no_grad():
        plain, changed = (network(input_ids=some, use_cache=False).logits[:, :-1] for some in (tokens, other))
    rounding = ROUNDINGS * torch.finfo(plain.dtype).eps * plain.abs().max()
    if bool((changed - plain).abs().max() > rounding):
        raise InvalidInput(
            f"{name} is no causal language model: a later token changes the logits of those before it; choose a model "
            "that predicts the next token"
        )


def require_vocabulary(network: Any, tokens: Int64[Tensor, "sequence token"], name: str) -> None:
    """Refuse tokens that the model does not know, or that it takes for padding: those have no gradient."""
    embeddings = network.get_input_embeddings()
    known, padding, largest = embeddings.num_embeddings, embeddings.padding_idx, int(tokens.max())
    if largest >= known:
        raise InvalidInput(
            f"the tokenizer belongs to another model: it gives token {largest}, and {name} knows {known} tokens; give "
            "the model's own with --tokenizer FILE"
        )
    if padding is not None and bool((tokens == padding).any()):
        raise InvalidInput(
            f"the text holds token {padding}, which {name} takes for padding: its embedding gets no gradient, so that "
            "second derivatives through it are wrong; take it out of the text, or set pad_token_id to null in the "
            "model's config.json"
        )


def _batch(tokens: Int64[Tensor, "row token"], mask: Float[Tensor, "1 1 token token"] | None) -> Batch:
    return {"tokens": tokens, "mask": mask}


def collect(device: torch.device) -> None:
    """What was held on a card and is not needed any more is free for the rest."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
