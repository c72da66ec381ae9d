"""Runs that spike by themselves: small models at hot learning rates on independent batches, nothing planted.

A run is a pure function of its kind, its learning rate and its seed: the batch of step n is drawn from a generator of
its own. So a window is kept as one state, and the steps after it can be run again by a plain loop, with or without a
recorder.
"""

from __future__ import annotations

import copy
import json
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from aftershock.recorder.triggers import Spike

WINDOW, AFTER = 40, 16
LETTERS, LENGTH, WIDTH = 64, 16, 32
PASSAGE = 200  # letters of the text that are learned: by heart, else the loss is too noisy for a spike to stand out
CLASSES, PIXELS, NOISE = 10, 16, 0.5
ROWS = 32
LONGEST = {"cpu": 600, "cuda": 150}  # steps until a run is given up
SEEDS = {"cpu": 100, "cuda": 8}
EVERY = {"cpu": 1, "cuda": 8}  # steps between copies of a run, at one of which its window begins
# Of the language models for a GPU: 30M with 50,304 words. They learn few tokens by heart, as the small ones do.
TOKENS, SENTENCES, GPT_WIDTH, GPT_LAYERS, LEARNED = 128, 8, 384, 6, 1500

Batch = tuple[Tensor, Tensor]


# --- data


@dataclass(frozen=True)
class Data:
    """What batches are drawn from; both are made up where no file is given."""

    letters: Tensor
    images: Callable[[torch.Generator, int], Batch]
    tokens: Tensor | None = None  # of the whole text, for the models that run on a GPU

    @classmethod
    def read(cls, text: Path | None, images: Path | None, tokenizer: Path | None = None) -> Data:
        letters = read_letters(text) if text else markov_letters()
        return cls(letters, _cifar(images) if images else smooth_images, read_tokens(text, tokenizer) if text else None)

    @property
    def words(self) -> int:
        """The vocabulary of its tokens."""
        return 64 * math.ceil((int(_tokens(self).max()) + 1) / 64)


def read_letters(path: Path) -> Tensor:
    """A text as numbers: its 63 most frequent bytes, and one for all others."""
    found = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    common = np.bincount(found, minlength=256).argsort()[::-1][: LETTERS - 1]
    number = np.full(256, LETTERS - 1)
    number[common] = np.arange(len(common))
    middle = len(found) // 2
    return torch.from_numpy(number[found][middle : middle + PASSAGE])


def read_tokens(text: Path, tokenizer: Path | None) -> Tensor:
    """A text as a tokenizer's numbers, or as bytes."""
    if tokenizer is None:
        return torch.from_numpy(np.frombuffer(text.read_bytes(), dtype=np.uint8).astype(np.int64))
    from tokenizers import Tokenizer

    return torch.tensor(Tokenizer.from_file(str(tokenizer)).encode(text.read_text()).ids)


def markov_letters() -> Tensor:
    """Letters of which each depends on the two before it: few follow often, any may follow."""
    random = np.random.default_rng(0)
    follow = random.dirichlet(np.full(LETTERS, 0.05), size=(LETTERS, 8)).cumsum(-1)
    letters = [0, 0]
    for draw in random.random(PASSAGE - 2):
        letters.append(min(int(follow[letters[-1], letters[-2] % 8].searchsorted(draw)), LETTERS - 1))
    return torch.tensor(letters)


def smooth_images(generator: torch.Generator, rows: int) -> Batch:
    """A smooth pattern per class, under smooth and rough noise."""
    patterns = torch.randn(CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    coarse = patterns[labels] + NOISE * torch.randn(rows, 3, 4, 4, generator=generator)
    images = F.interpolate(coarse, size=PIXELS, mode="bilinear")
    return images + NOISE * torch.randn(images.shape, generator=generator), labels


def _cifar(path: Path) -> Callable[[torch.Generator, int], Batch]:
    found = np.load(path)
    images = torch.from_numpy(found["x_train"]).permute(0, 3, 1, 2).float().div(64).sub(2)
    images, labels = F.avg_pool2d(images, 2), torch.from_numpy(found["y_train"]).long().flatten()

    def draw(generator: torch.Generator, rows: int) -> Batch:
        some = torch.randint(len(images), (rows,), generator=generator)
        return images[some], labels[some]

    return draw


def _sentences(data: Data, generator: torch.Generator) -> Batch:
    start = torch.randint(len(data.letters) - LENGTH - 1, (ROWS, 1), generator=generator)
    letters = data.letters[start + torch.arange(LENGTH + 1)]
    return letters[:, :-1].contiguous(), letters[:, 1:].contiguous()


def _tokens(data: Data) -> Tensor:
    if data.tokens is None:
        raise SystemExit("the language models for a GPU need a text: --text FILE")
    return data.tokens


def _passages(data: Data, generator: torch.Generator) -> Batch:
    tokens = _tokens(data)
    start = torch.randint(LEARNED - TOKENS - 1, (SENTENCES, 1), generator=generator)
    some = tokens[start + torch.arange(TOKENS + 1)]
    return some[:, :-1].contiguous(), some[:, 1:].contiguous()


def _images(data: Data, generator: torch.Generator) -> Batch:
    return data.images(generator, ROWS)


# --- models


class Block(nn.Module):
    """Attention and an MLP, each normalized before it or after the sum."""

    def __init__(self, width: int, causal: bool, norm_first: bool) -> None:
        super().__init__()
        self.causal, self.norm_first = causal, norm_first
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if self.causal:
            scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.norm_first:
            x = x + self.attend(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attend(x))
        return self.norm2(x + self.mlp(x))


class Language(nn.Module):
    """A causal transformer of two blocks over letters."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(LETTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH, True, norm_first) for _ in range(2)))
        self.norm = nn.LayerNorm(WIDTH) if norm_first else nn.Identity()
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, letters: Tensor) -> Tensor:
        x = self.token(letters) + self.place.weight[: letters.shape[1]]
        return self.head(self.norm(self.blocks(x))).transpose(1, 2)


class Vision(nn.Module):
    """A transformer of two blocks over patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.place = nn.Parameter(0.02 * torch.randn(1, (PIXELS // 4) ** 2, WIDTH))
        self.blocks = nn.Sequential(*(Block(WIDTH, False, True) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.place
        return self.head(self.norm(self.blocks(x)).mean(1))


class Gpt(nn.Module):
    """A causal transformer with torch's own attention, over a tokenizer's words; the words' table is the head, too."""

    def __init__(self, words: int, dropout: float) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, GPT_WIDTH), nn.Embedding(TOKENS, GPT_WIDTH)
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.02)
        heads = GPT_WIDTH // 64
        layer = nn.TransformerEncoderLayer(
            GPT_WIDTH, heads, 4 * GPT_WIDTH, dropout, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, GPT_LAYERS, nn.LayerNorm(GPT_WIDTH), enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        return self.layers(x, mask=mask, is_causal=True) @ self.words.weight.T


def _convolutions(normalized: bool) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 32)):
        norm = [nn.BatchNorm2d(after)] if normalized else []
        layers += [nn.Conv2d(before, after, 3, padding=1), *norm, nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * (PIXELS // 8) ** 2, CLASSES))


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def token_loss(model: nn.Module, batch: Batch) -> Tensor:
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def half_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast(batch[0].device.type, torch.bfloat16):
        return token_loss(model, batch)


# --- kinds of runs


@dataclass(frozen=True)
class Kind:
    """A model, its data, and learning rates at which it spikes now and then."""

    name: str
    build: Callable[[Data], nn.Module]
    draw: Callable[[Data, torch.Generator], Batch]
    lrs: tuple[float, ...]
    beta2: float = 0.999
    warmup: int = 50
    loss: Callable[[nn.Module, Batch], Tensor] = loss_fn
    device: str = "cpu"


def _gpt(dropout: float = 0.0) -> Callable[[Data], nn.Module]:
    return lambda data: Gpt(data.words, dropout)


KINDS = (
    Kind("LM, pre-norm, β2 0.999", lambda _: Language(True), _sentences, (0.08, 0.1, 0.15)),
    Kind("LM, pre-norm, β2 0.95", lambda _: Language(True), _sentences, (0.12, 0.15), beta2=0.95),
    Kind("LM, post-norm, β2 0.999", lambda _: Language(False), _sentences, (0.05, 0.06, 0.07)),
    Kind("LM, short warm-up", lambda _: Language(True), _sentences, (0.07, 0.1, 0.12), warmup=5),
    Kind("ViT", lambda _: Vision(), _images, (0.02, 0.03, 0.04)),
    Kind("CNN", lambda _: _convolutions(False), _images, (0.01, 0.015, 0.02)),
    Kind("CNN, BatchNorm", lambda _: _convolutions(True), _images, (0.05, 0.1)),
)

HALF = {"loss": half_token_loss, "device": "cuda"}
GPU_KINDS = (
    Kind("GPT, float32", _gpt(), _passages, (0.02, 0.03), loss=token_loss, device="cuda"),
    Kind("GPT, bfloat16", _gpt(), _passages, (0.015, 0.02, 0.03), **HALF),
    Kind("GPT, bfloat16, dropout, β2 0.95", _gpt(0.1), _passages, (0.02, 0.03), beta2=0.95, **HALF),
)
KINDS_EVERYWHERE = (*KINDS, *GPU_KINDS)


class Loop:
    """A plain training loop; nothing here is aftershock's."""

    def __init__(self, kind: Kind, lr: float, seed: int, data: Data) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = kind.build(data).to(kind.device)
        self.kind, self.lr, self.seed, self.data = kind, lr, seed, data
        betas = (0.9, kind.beta2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=betas, weight_decay=0.01)

    def batch(self, number: int) -> Batch:
        inputs, targets = self.kind.draw(self.data, torch.Generator().manual_seed(1_000_003 * self.seed + number))
        return inputs.to(self.kind.device), targets.to(self.kind.device)

    def rate(self, number: int) -> float:
        return self.lr * min(1.0, (number + 1) / self.kind.warmup)

    def backward(self, number: int) -> tuple[Batch, Tensor]:
        batch = self.batch(number)
        torch.manual_seed(1_000_003 * self.seed + number)  # the same masks with and without an earlier step
        self.optimizer.zero_grad()
        loss = self.kind.loss(self.model, batch)
        loss.backward()
        return batch, loss.detach()

    def update(self, number: int) -> None:
        self.optimizer.param_groups[0]["lr"] = self.rate(number)
        self.optimizer.step()

    def step(self, number: int) -> float:
        _, loss = self.backward(number)
        self.update(number)
        return float(loss)

    def twin(self) -> Loop:
        shared = {id(self.data): self.data, id(self.kind): self.kind}
        return copy.deepcopy(self, shared)


# --- windows


@dataclass(frozen=True)
class Window:
    """Where one spike was found: steps start … trigger + AFTER of a run, and the recorded losses of those steps."""

    name: str
    kind: str
    lr: float
    seed: int
    start: int
    trigger: int
    losses: tuple[float, ...]

    def loop(self, folder: Path, data: Data) -> Loop:
        """The run at the window's first step."""
        kind = next(kind for kind in KINDS_EVERYWHERE if kind.name == self.kind)
        loop = Loop(kind, self.lr, self.seed, data)
        _load(loop, folder / f"{self.name}.safetensors")
        return loop

    @property
    def last(self) -> int:
        return self.trigger + AFTER

    @property
    def repeats(self) -> bool:
        """Whether its run has the same bits each time."""
        return next(kind for kind in KINDS_EVERYWHERE if kind.name == self.kind).device == "cpu"

    @property
    def by_step(self) -> dict[int, float]:
        return dict(enumerate(self.losses, self.start))


@dataclass(frozen=True)
class Found:
    """A spike of a run: the loop at its window's first step, and the losses from there on."""

    loop: Loop
    start: int
    trigger: int
    losses: tuple[float, ...]


def first_spike(kind: Kind, lr: float, seed: int, data: Data) -> Found | None:
    """The first step at which the recorder's own trigger fires on the loss; None where the run stays calm or breaks.

    The run is made once, with copies on the way: on a GPU it may not repeat itself.
    """
    loop, trigger = Loop(kind, lr, seed, data), Spike("loss")
    trigger.begin(WINDOW)
    fired, losses, copies = None, list[float](), deque[tuple[int, Loop]](maxlen=WINDOW // EVERY[kind.device] + 2)
    while len(losses) < LONGEST[kind.device] and (fired is None or len(losses) <= fired + AFTER):
        number = len(losses)
        if fired is None and number % EVERY[kind.device] == 0:
            copies.append((number, loop.twin()))
        losses.append(loop.step(number))
        if not math.isfinite(losses[-1]):
            return None
        record: Any = SimpleNamespace(loss=losses[-1])
        if trigger.fires(record) and fired is None:
            fired = number
    if fired is None or len(losses) <= fired + AFTER:
        return None
    start, first = max((copy for copy in copies if copy[0] <= max(0, fired - WINDOW)), key=lambda copy: copy[0])
    return Found(first, start, fired, tuple(losses[start:]))


def find(kind: Kind, wanted: int, data: Data, folder: Path) -> Iterator[Window]:
    """Seeds in turn, each with every rate, until there are enough windows; what was found before is read."""
    count = 0
    for seed in range(SEEDS[kind.device]):
        for lr in kind.lrs:
            if count == wanted:
                return
            window = _window(kind, lr, seed, data, folder)
            if window is not None:
                count += 1
                yield window


def _window(kind: Kind, lr: float, seed: int, data: Data, folder: Path) -> Window | None:
    name = "".join(c if c.isalnum() else "-" for c in f"{kind.name} {lr} {seed}")
    path = folder / f"{name}.json"
    if not path.is_file():
        spike = first_spike(kind, lr, seed, data)
        if spike is not None:
            _save(spike.loop, folder / f"{name}.safetensors")
        window = spike and Window(name, kind.name, lr, seed, spike.start, spike.trigger, spike.losses)
        path.write_text(json.dumps(window and asdict(window)))
    found = json.loads(path.read_text())
    return None if found is None else Window(**{**found, "losses": tuple(found["losses"])})


def _save(loop: Loop, path: Path) -> None:
    state = {f"model/{name}": tensor for name, tensor in loop.model.state_dict().items()}
    for i, moments in loop.optimizer.state_dict()["state"].items():
        state |= {f"optimizer/{i}/{name}": tensor for name, tensor in moments.items()}
    save_file({name: tensor.contiguous().clone() for name, tensor in state.items()}, path)


def _load(loop: Loop, path: Path) -> None:
    found = load_file(path)
    loop.model.load_state_dict({k.removeprefix("model/"): t for k, t in found.items() if k.startswith("model/")})
    moments: dict[int, dict[str, Tensor]] = {}
    for key, tensor in found.items():
        if key.startswith("optimizer/"):
            _, i, name = key.split("/")
            moments.setdefault(int(i), {})[name] = tensor.clone()
    groups = loop.optimizer.state_dict()["param_groups"]
    loop.optimizer.load_state_dict({"state": moments, "param_groups": groups})
