"""The models that `benchmarks.truth` judges: their data, their networks, and how each is trained to its point."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

import aftershock as ak
from aftershock.studies.cifar.data import Cifar, Images, load_cifar

from .models import CLASSES, Batch, cnn, loss_fn, mlp

VOCABULARY = 50_304  # GPT-NeoX's, padded as Pythia's is
LETTERS = 256
SUCCESSORS = 4  # of each synthetic token
FOLLOWS = 0.6  # how often a synthetic token is followed by one of its own
SYNTHETIC_TOKENS, SYNTHETIC_IMAGES = 260_000, 8_000
HELD_OUT = 0.1  # of a text, from its end
DATA_SEED, TRAINING_SEED = 0, 1


# --- data


class Source(Protocol):
    """Batches to train on, or held out."""

    def batch(self, generator: torch.Generator, *, held_out: bool = False) -> Batch: ...


@dataclass(frozen=True)
class Text:
    """Windows of a text, and the same windows one token later."""

    tokens: Tensor
    rows: int
    length: int

    def batch(self, generator: torch.Generator, *, held_out: bool = False) -> Batch:
        cut = int((1 - HELD_OUT) * len(self.tokens))
        first, last = (cut, len(self.tokens)) if held_out else (0, cut)
        starts = torch.randint(first, last - self.length, (self.rows, 1), generator=generator)
        windows = self.tokens[starts + torch.arange(self.length + 1)]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@dataclass(frozen=True)
class Pictures:
    """Images with their classes, held out ones from the test set."""

    images: Cifar
    rows: int

    def batch(self, generator: torch.Generator, *, held_out: bool = False) -> Batch:
        images = self.images.test if held_out else self.images.train
        index = torch.randint(len(images), (self.rows,), generator=generator)
        pixels, labels = images.batch(index, torch.device("cpu"))
        return pixels.float(), labels


@dataclass(frozen=True)
class Data:
    """Where the data comes from; synthetic where nothing is given."""

    text: Path | None = None
    tokenizer: Path | None = None
    cifar: Path | None = None
    thinner: int = 1  # how many times smaller the batches are

    def __str__(self) -> str:
        text = self.text.name if self.text else "synthetic text"
        return f"{text}, {'CIFAR-10' if self.cifar else 'synthetic images'}"

    def tokens(self) -> Text:
        given = self.text is not None and self.tokenizer is not None
        tokens = tokenized(self.text, self.tokenizer) if given else synthetic_text(VOCABULARY)
        return Text(tokens, 8 // self.thinner, 64)

    def letters(self) -> Text:
        given = self.text is not None
        letters = torch.tensor(list(self.text.read_bytes())) if given else synthetic_text(LETTERS)
        return Text(letters, 16 // self.thinner, 48)

    def pictures(self) -> Pictures:
        images = synthetic_images() if self.cifar is None else load_cifar(self.cifar)
        return Pictures(images, 32 // self.thinner)


@cache
def tokenized(text: Path, tokenizer: Path) -> Tensor:
    from tokenizers import Tokenizer

    return torch.tensor(Tokenizer.from_file(str(tokenizer)).encode(text.read_text()).ids)


@cache
def synthetic_text(vocabulary: int) -> Tensor:
    """Zipf's law, and after each token often one of its own successors."""
    generator = torch.Generator().manual_seed(DATA_SEED)
    weights = 1 / (torch.arange(vocabulary) + 2.7)
    count = SYNTHETIC_TOKENS + vocabulary * SUCCESSORS
    drawn = torch.multinomial(weights, count, replacement=True, generator=generator)
    fresh, successors = drawn[:SYNTHETIC_TOKENS].tolist(), drawn[SYNTHETIC_TOKENS:].view(vocabulary, -1).tolist()
    follows = (torch.rand(SYNTHETIC_TOKENS, generator=generator) < FOLLOWS).tolist()
    which = torch.randint(SUCCESSORS, (SYNTHETIC_TOKENS,), generator=generator).tolist()
    tokens = fresh[:1]
    for i in range(1, SYNTHETIC_TOKENS):
        tokens.append(successors[tokens[-1]][which[i]] if follows[i] else fresh[i])
    return torch.tensor(tokens)


@cache
def synthetic_images() -> Cifar:
    """A smooth pattern per class, shifted, in another contrast each time, under noise."""
    generator = torch.Generator().manual_seed(DATA_SEED)
    coarse = torch.randn(CLASSES, 3, 6, 6, generator=generator)
    patterns = functional.interpolate(coarse, size=(32, 32), mode="bicubic")
    labels = torch.randint(CLASSES, (SYNTHETIC_IMAGES,), generator=generator)
    shifts = torch.randint(-4, 5, (SYNTHETIC_IMAGES, 2), generator=generator).tolist()
    shifted = torch.stack([patterns[c].roll(s, (1, 2)) for c, s in zip(labels.tolist(), shifts)])
    contrast = 0.3 + torch.rand(SYNTHETIC_IMAGES, 1, 1, 1, generator=generator)
    noise = torch.randn(shifted.shape, generator=generator)
    pixels = (128 + 40 * (contrast * shifted + noise)).clamp(0, 255).to(torch.uint8)
    cut = int((1 - HELD_OUT) * SYNTHETIC_IMAGES)
    return Cifar(Images(pixels[:cut], labels[:cut]), Images(pixels[cut:], labels[cut:]), "synthetic")


# --- networks


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """A causal transformer of two blocks; its head is its embedding, or its own."""

    def __init__(self, tied: bool, width: int = 32, length: int = 64, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, 4, causal=True) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for weight in (self.token.weight, self.place.weight, self.head.weight):
            nn.init.normal_(weight, std=0.02)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.token(tokens) + self.place.weight)))


class LetterModel(nn.Module):
    """An LSTM that reads bytes and predicts the next one."""

    def __init__(self, width: int = 32, hidden: int = 128) -> None:
        super().__init__()
        self.letter = nn.Embedding(LETTERS, width)
        self.lstm, self.head = nn.LSTM(width, hidden, batch_first=True), nn.Linear(hidden, LETTERS)

    def forward(self, letters: Tensor) -> Tensor:
        return self.head(self.lstm(self.letter(letters))[0])


class VisionTransformer(nn.Module):
    """Three blocks over 4×4 patches, their mean classified."""

    def __init__(self, width: int = 64, patch: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.place = nn.Parameter(0.02 * torch.randn((32 // patch) ** 2, width))
        self.blocks = nn.Sequential(*[Block(width, 4, causal=False) for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.place
        return self.head(self.norm(self.blocks(x)).mean(1))


class Residual(nn.Module):
    """Two convolutions with BatchNorm beside a shortcut, which is 1×1 where the width changes."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet() -> nn.Module:
    """ResNet-8 with BatchNorm in training mode."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        Residual(16, 16), Residual(16, 32), Residual(32, 64),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES),
    )  # fmt: skip


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    tokens, targets = batch
    return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


# --- how each is trained


@dataclass(frozen=True)
class Recipe:
    """A model, its loss and data, and the training that leads to the point which is judged."""

    name: str
    build: Callable[[], nn.Module]
    loss_fn: Callable[[nn.Module, Batch], Tensor]
    source: Callable[[Data], Source]
    steps: int
    lr: float = 1e-3
    beta2: float = 0.999
    weight_decay: float = 0.01

    @property
    def slug(self) -> str:
        """The name as a file name."""
        return "-".join("".join(c if c in string.ascii_letters + string.digits else " " for c in self.name).split())


def tied() -> nn.Module:
    return LanguageModel(tied=True)


def untied() -> nn.Module:
    return LanguageModel(tied=False)


RECIPES = (
    Recipe("LM early", untied, next_token, Data.tokens, 60),
    Recipe("LM late, tied", tied, next_token, Data.tokens, 1500),
    Recipe("LM beta2 0.95", untied, next_token, Data.tokens, 1000, beta2=0.95, weight_decay=0.1),
    Recipe("MLP–GELU", mlp, loss_fn, Data.pictures, 100, lr=2e-4),
    Recipe("CNN–ReLU", cnn, loss_fn, Data.pictures, 100),
    Recipe("LSTM on letters", LetterModel, next_token, Data.letters, 300, lr=2e-3),
    Recipe("ViT", VisionTransformer, loss_fn, Data.pictures, 300, weight_decay=0.1),
    Recipe("ResNet, BatchNorm", resnet, loss_fn, Data.pictures, 200),
)


def trained(recipe: Recipe, data: Data, device: torch.device, folder: Path | None) -> ak.TrainingPoint:
    """The recipe's point, with batches moved to the device as they come; kept in the folder, if there is one."""
    model = untrained(recipe)
    if folder is None:
        return train(recipe, data, model, device).to(device)
    path = folder / f"{recipe.slug}-{_digest(recipe, data)}.safetensors"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        train(recipe, data, model, device).save(path)
    return ak.load_point(path, model, recipe.loss_fn).to(device)


def untrained(recipe: Recipe) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(TRAINING_SEED)
        return recipe.build()


def train(recipe: Recipe, data: Data, model: nn.Module, device: torch.device) -> ak.TrainingPoint:
    return ak.capture(model, fit(recipe, data, model, device), recipe.loss_fn)


def fit(recipe: Recipe, data: Data, model: nn.Module, device: torch.device) -> torch.optim.AdamW:
    """The recipe's training of this model, in place; its optimizer as training leaves it."""
    source, generator = recipe.source(data), torch.Generator().manual_seed(TRAINING_SEED)
    model.to(device)
    betas = (0.9, recipe.beta2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=betas, weight_decay=recipe.weight_decay)
    for _ in range(recipe.steps):
        batch = tuple(x.to(device) for x in source.batch(generator))
        optimizer.zero_grad()
        recipe.loss_fn(model, batch).backward()
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _digest(recipe: Recipe, data: Data) -> str:
    """Of what a point depends on, other than the code of the network."""
    made = (recipe.steps, recipe.lr, recipe.beta2, recipe.weight_decay, data)
    return hashlib.sha256(repr(made).encode()).hexdigest()[:8]
