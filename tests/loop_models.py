"""Models as strangers write them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .loop_losses import CLASSES, DEVICE, SIZE, TOKENS, WIDTH


def mlp(activation: type[nn.Module] = nn.Tanh, extra: Callable[[], nn.Module] = nn.Identity) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 5), extra(), activation(), nn.Linear(5, CLASSES))


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(12, CLASSES),
    )


def half_frozen_norm() -> nn.Sequential:
    model = mlp(extra=lambda: nn.BatchNorm1d(5))
    model[1].eval()
    return model


class Transformer(nn.Module):
    def __init__(self, dropout: float = 0.0, *, tied: bool = False, checkpointed: bool = False, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, width, padding_idx=0)
        self.block = nn.TransformerEncoderLayer(width, 2, 12, dropout=dropout, batch_first=True)
        self.head = nn.Linear(width, TOKENS, bias=False)
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        x = self.embed(ids)
        x = checkpoint(self.block, x, mask, use_reentrant=False) if self.checkpointed else self.block(x, mask)
        return self.head(x)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed, self.core, self.head = nn.Embedding(TOKENS, 5), kind(5, 6, batch_first=True), nn.Linear(6, TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.core(self.embed(ids))[0])


class Experts(nn.Module):
    """Top-k routing."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList([nn.Linear(WIDTH, CLASSES) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        weight, which = self.gate(x).softmax(-1).topk(2)
        out = torch.stack([expert(x) for expert in self.experts], 1)
        return (weight[..., None] * out.gather(1, which[..., None].expand(-1, -1, CLASSES))).sum(1)


class Quantized(nn.Module):
    """Vector quantization with a straight-through estimator."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.codes, self.out = nn.Linear(WIDTH, 3), nn.Embedding(5, 3), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        z = self.inp(x)
        code = self.codes(torch.cdist(z, self.codes.weight).argmin(-1))
        self.commitment = (z - code.detach()).square().mean() + (z.detach() - code).square().mean()
        return self.out(z + (code - z).detach())


class Heads(nn.Module):
    """Two heads, of which the batch says which one is used."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(WIDTH, 5), nn.ModuleList([nn.Linear(5, CLASSES) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[int(x.sum() > 0)](torch.tanh(self.body(x)))


class OneHead(Heads):
    """The second head is never used."""

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[0](torch.tanh(self.body(x)))


class Spectral(nn.Module):
    """Complex numbers inside, real parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.filter, self.out = nn.Linear(WIDTH, 8), nn.Parameter(torch.randn(5)), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.fft.irfft(torch.fft.rfft(self.inp(x)) * self.filter, n=8).tanh())


class MixedTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 5), nn.Linear(5, CLASSES).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)).to(torch.bfloat16)).float()


class Counting(nn.Module):
    """A Python attribute that moves with each call and changes the output: a warm-up of the temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.calls = mlp(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layers(x) * (1 + 0.1 * self.calls)


class OwnGenerator(nn.Module):
    """Noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.generator = mlp(), torch.Generator(DEVICE).manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + 0.1 * torch.randn(x.shape, generator=self.generator, device=DEVICE))


class Averaging(nn.Module):
    """A student and the average of its weights, which the loop moves and the loss looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.student = mlp()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x)


class BoundedTokens(nn.Module):
    """An embedding that rescales its rows in place as they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, 4, max_norm=1.0), nn.Linear(4, TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


class Carrying(nn.Module):
    """Truncated backpropagation: the hidden state is an attribute, carried from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.RNNCell(WIDTH, 5), nn.Linear(5, CLASSES)
        self.hidden = torch.zeros(SIZE, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.cell(x, self.hidden)
        self.hidden = hidden.detach()
        return self.head(hidden)


class AssignedBuffer(nn.Module):
    """A running mean that is assigned anew, rather than written into."""

    def __init__(self, *, registered: bool = True) -> None:
        super().__init__()
        self.layers = mlp()
        if registered:
            self.register_buffer("mean", torch.zeros(WIDTH))
        else:
            self.mean = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.layers(x - self.mean)


class WrittenTensor(AssignedBuffer):
    """A plain tensor, not a buffer, that forward writes into."""

    def __init__(self) -> None:
        super().__init__(registered=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.layers(x - self.mean)


class ManyBuffers(nn.Module):
    """Buffers of every kind: written into and shared by two modules, of truth values, of counts, not saved, absent."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.inner = mlp(), nn.Module()
        self.register_buffer("seen", torch.zeros(WIDTH), persistent=False)
        self.inner.register_buffer("seen", self.seen)
        self.register_buffer("used", torch.zeros(WIDTH, dtype=torch.bool))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.mean(0))
        self.used |= self.seen > 0
        self.calls += 1
        return self.layers(x * self.used - self.inner.seen / self.calls)


class OddParameters(nn.Module):
    """A transposed one, a slice of a larger one, a single number, an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(5, WIDTH).t())
        self.sliced = nn.Parameter(torch.randn(7, CLASSES)[1:6])
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.turned) @ self.sliced * self.scale + self.empty.sum()


class OneVector(nn.Module):
    """All parameters are views of one vector, at odd places in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, at = mlp(), 1
        vector = torch.randn(1 + sum(p.numel() for p in self.layers.parameters()))
        for p in self.layers.parameters():
            p.data, at = vector[at : at + p.numel()].view_as(p), at + p.numel()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class OneMemory(nn.Module):
    """Tied by `.data`: two parameters in one piece of memory, each of which the optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, 4), nn.Linear(4, TOKENS, bias=False)
        self.head.weight.data = self.embed.weight.data

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


class BufferOnParameter(nn.Module):
    """A buffer that is a view of a parameter's memory, and moves with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.register_buffer("scale", self.layers[0].weight.data[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x * (1 + self.scale))


class Lambda(nn.Module):
    """A function among the attributes that closes over the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = mlp(), nn.Parameter(torch.ones(CLASSES))
        self.rescale = lambda x: x * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.rescale(self.layers(x))


# --- models made of others


def norm(**options: Any) -> Callable[[], nn.Module]:
    return lambda: mlp(extra=lambda: nn.BatchNorm1d(5, **options))


def evaluating(model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: model().eval()


def normed(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = mlp()
        model[0] = wrap(model[0])
        return model

    return build


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def channels_last() -> nn.Module:
    return cnn().to(memory_format=torch.channels_last)


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=9, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


def dropout() -> nn.Module:
    return mlp(extra=lambda: nn.Dropout(0.3))


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(TOKENS, 4, sparse=True), nn.Linear(4, TOKENS))


class Tempered(nn.Module):
    """A plain number among the attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.temperature = mlp(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) / self.temperature
