"""What the examples share: real text that every Python brings along, as numbers, and a small model of its letters."""

from __future__ import annotations

import unicodedata
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CONTEXT = 8  # letters that the model sees before the one it predicts
CAPITALS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

prose = "\n\n".join(topics[name] for name in sorted(topics))  # Python's language reference
names = "\n".join(unicodedata.name(chr(code), "") for code in range(0xA000, 0xA48D))  # of Yi syllables: all in capitals
letters = sorted(set(prose + names))
CODES = {letter: code for code, letter in enumerate(letters)}


def numbers(text: str) -> Tensor:
    return torch.tensor([CODES[letter] for letter in text])


PROSE, NAMES = numbers(prose[:200_000]), numbers(names)


def draw(source: Tensor, generator: torch.Generator, size: int = 128) -> Tensor:
    """A batch: passages of CONTEXT letters and the one after them, [size, CONTEXT + 1]."""
    starts = torch.randint(len(source) - CONTEXT, (size, 1), generator=generator)
    return source[starts + torch.arange(CONTEXT + 1)]


def misread(batch: Tensor) -> Tensor:
    """The same, decoded with a wrong table: every capital 13 places further on."""
    capitals = numbers(CAPITALS)
    table = torch.arange(len(letters))
    table[capitals] = capitals.roll(-13)
    return table[batch]


def show(batch: Tensor) -> str:
    """The first passages of a batch, as text."""
    return "\n".join("".join(letters[code] for code in row) for row in batch[:4].tolist())


class LetterModel(nn.Module):
    """The next letter from the last ones."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.token = nn.Embedding(len(letters), 16)
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(16 * CONTEXT, width), nn.GELU(), nn.Linear(width, len(letters))
        )

    def forward(self, passages: Tensor) -> Tensor:
        return self.layers(self.token(passages))


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]), batch[:, -1])


def trained(steps: int = 300, lr: float = 2e-2) -> tuple[LetterModel, torch.optim.AdamW, torch.Generator]:
    """A model, its optimizer and the generator of its batches after `steps`: names at every eighth, prose else."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = LetterModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        train_step(model, optimizer, draw(NAMES if step % 8 == 0 else PROSE, generator))
    return model, optimizer, generator


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    """One whole step of the loop."""
    optimizer.zero_grad()
    loss = loss_fn(model, batch)
    loss.backward()
    optimizer.step()
    return loss.detach()
