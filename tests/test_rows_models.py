"""Rows together on the models that people train: each equals the same row alone, whether its model maps or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aftershock as ak
from aftershock.core.graphs import GradientGraph
from aftershock.core.loss import LossFunction
from aftershock.core.pools import Pool
from aftershock.core.rows import row_gradients, row_values

KINDS = ("value", "gradient", "product", "pool")
ROWS = 3
VOCABULARY = 40
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Model:
    """How a model is made and fed, and which kinds of work it cannot do in rows."""

    make: Callable[[], nn.Module]
    loss_fn: Loss
    batch: Callable[[int], Any]
    alone: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float64


# --- feeding them


def tokens(padded: bool = False) -> Callable[[int], dict[str, Tensor]]:
    def batch(seed: int) -> dict[str, Tensor]:
        ids = torch.randint(VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(seed))
        mask = torch.ones_like(ids)
        if padded:
            mask[0, 7 - seed % 4 :] = 0
        return {"input_ids": ids, "attention_mask": mask}

    return batch


def series(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 5, 8, generator=generator), torch.randint(3, (4,), generator=generator)


def images(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(3, (4,), generator=generator)


def language(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch, labels=batch["input_ids"], use_cache=False).loss


def next_token(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    ids = batch["input_ids"]
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    inputs = inputs.to(next(model.parameters()).dtype)
    return F.cross_entropy(model(inputs), labels)


# --- making them


def neox(attention: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPTNeoXConfig(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=24, vocab_size=VOCABULARY,
        max_position_embeddings=16, attn_implementation=attention, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPTNeoXForCausalLM(config)


def gpt2(attention: str) -> nn.Module:
    """With its usual dropout of 0.1."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=VOCABULARY, n_positions=16, attn_implementation=attention,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama(attention: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=2, num_key_value_heads=1, intermediate_size=24,
        vocab_size=VOCABULARY, max_position_embeddings=16, attn_implementation=attention,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.mix(self.first(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


class PlainGPT(nn.Module):
    """A small GPT as people write it, its embedding tied to its output."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(16, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids) + self.place(torch.arange(ids.shape[1]))))


class Encoder(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(8, 6, num_layers=2, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x)[0][:, -1])


def vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4,
        num_labels=3, attn_implementation="eager",
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def classify_vit(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(pixel_values=inputs.to(next(model.parameters()).dtype)).logits, labels)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norms[1](self.b(F.relu(self.norms[0](self.a(x))))))


def resnet() -> nn.Module:
    """Training BatchNorm: every row has running statistics of its own."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True), Residual(6), Residual(6),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip


class Peeking(nn.Module):
    """Decides by a value of its own weights, which rows do not share and batches do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        scale = 2.0 if float(self.layer.weight.detach().abs().max()) > 0.1 else 1.0
        return scale * torch.tanh(self.layer(x.mean(1)))


# Transformers compute parts in float32 whatever the model's dtype.
MODELS: dict[str, Model] = {
    "NeoX eager": Model(lambda: neox("eager"), language, tokens(), dtype=torch.float32),
    "NeoX sdpa": Model(lambda: neox("sdpa"), language, tokens(), dtype=torch.float32),
    "NeoX eager, padded": Model(lambda: neox("eager"), language, tokens(padded=True), dtype=torch.float32),
    # the model looks at the mask to choose a kernel, and the batches of this pool have different ones
    "NeoX sdpa, padded": Model(
        lambda: neox("sdpa"), language, tokens(padded=True), alone=("pool",), dtype=torch.float32
    ),
    "GPT-2 eager": Model(lambda: gpt2("eager"), language, tokens(), dtype=torch.float32),
    "GPT-2 sdpa": Model(lambda: gpt2("sdpa"), language, tokens(), dtype=torch.float32),
    "Llama eager": Model(lambda: llama("eager"), language, tokens(), dtype=torch.float32),
    "Llama sdpa": Model(lambda: llama("sdpa"), language, tokens(), dtype=torch.float32),
    "plain GPT": Model(PlainGPT, next_token, tokens()),
    "TransformerEncoderLayer": Model(Encoder, classify, series),
    # its dropout meets transposed tensors, whose masks are drawn in another order when they are mapped
    "TransformerEncoderLayer, dropout": Model(
        lambda: Encoder(0.1), classify, series, alone=("value", "gradient", "pool")
    ),
    # torch maps an LSTM's weights where a gradient takes it apart, and neither its plain pass nor its inputs
    "LSTM": Model(Recurrent, classify, series, alone=("value", "pool")),
    "ViT": Model(vit, classify_vit, images, dtype=torch.float32),
    "ResNet with BatchNorm": Model(resnet, classify, images),
    "looks at its weights": Model(Peeking, classify, series, alone=("value", "gradient")),
}


class Rows:
    """A captured model at several parameter sets, its rows together or one after another."""

    def __init__(self, model: Model) -> None:
        torch.manual_seed(0)
        live = model.make().to(model.dtype).train()
        optimizer = torch.optim.AdamW(live.parameters(), lr=1e-2)
        for seed in range(2):
            optimizer.zero_grad()
            model.loss_fn(live, model.batch(100 + seed)).backward()
            optimizer.step()
        self.model, self.point = model, ak.capture(live, optimizer, model.loss_fn)
        self.loss: LossFunction = self.point.loss
        state, layout = self.point.captured.state, self.loss.layout
        generator = torch.Generator().manual_seed(1)
        noise = torch.randn(ROWS, layout.size, generator=generator, dtype=torch.float64)
        self.vectors = layout.expand(noise)
        self.thetas = state.theta + 0.02 * self.vectors
        self.state, self.batch = state, model.batch(0)
        self.arguments = (self.batch, self.point.captured.random, "the test")
        found = self.loss.gradient(state.theta, state.buffers, *self.arguments)
        self.present = found.present

    def value(self) -> dict[str, Tensor]:
        return {"loss": row_values(self.loss, self.thetas, [self.state.buffers] * ROWS, *self.arguments)}

    def gradient(self) -> dict[str, Tensor]:
        buffers = [self.state.buffers] * ROWS
        return self._joined(row_gradients(self.loss, self.thetas, buffers, *self.arguments, self.present))

    def product(self) -> dict[str, Tensor]:
        graph = GradientGraph(self.loss, self.state.theta, self.state.buffers, *self.arguments)
        return {"product": graph.products(self.vectors)}

    def pool(self) -> dict[str, Tensor]:
        pool, random = [self.model.batch(10 + i) for i in range(ROWS)], self.arguments[1]
        state, layout = self.state, self.loss.layout
        asked = Pool(self.loss, state.theta, state.buffers, pool, random, lambda i: f"batch {i}", self.present)
        found, rows = list(asked.gradients()), layout.zeros(ROWS)
        norms, present = asked.write(rows)
        assert torch.equal(rows, torch.stack([layout.join(each.grads) for each in found]))
        assert torch.equal(norms, torch.stack([each.norm for each in found]))
        assert present == [each.present for each in found]
        return self._joined(found)

    def _joined(self, found: list[Any]) -> dict[str, Tensor]:
        """Losses, gradients, norms, and the buffers that the pass left."""
        assert all(each is not None for each in found)
        left = {name: torch.stack([each.buffers[name].double() for each in found]) for name in found[0].buffers}
        return {
            "loss": torch.stack([each.loss for each in found]),
            "gradient": torch.stack([self.loss.layout.join(each.grads) for each in found]),
            "norm": torch.stack([each.norm for each in found]),
            **left,
        }


@pytest.mark.parametrize("name", MODELS)
def test_rows_together_are_rows_alone(name: str) -> None:
    model = MODELS[name]
    rows = Rows(model)
    for kind in KINDS:
        rows.loss.sharing.wanted = False
        alone = getattr(rows, kind)()
        rows.loss.sharing.wanted = True
        for _ in range(2):  # the first is compared with one row alone, the second is trusted
            assert_close(getattr(rows, kind)(), alone, model.dtype)
        assert rows.loss.sharing.compared(kind)
    together = {kind for kind in KINDS if rows.loss.sharing.tries(kind, ROWS)}
    assert together == set(KINDS) - set(model.alone)


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        off, size = float((found[name] - value).norm()), float(value.norm())
        assert off <= CLOSE[dtype] * size, f"{name} is off by {off:.1e} of {size:.1e}"
    main = next(name for name in ("gradient", "product", "loss") if name in expected)
    assert all(float(row.norm()) > 0 for row in expected[main])


@pytest.mark.parametrize("name", ["NeoX eager", "plain GPT", "LSTM", "ResNet with BatchNorm", "looks at its weights"])
def test_answers_and_rankings_are_the_same_together(name: str) -> None:
    # in float32 a key's bias has a gradient of pure rounding, which AdamW makes as large as any other
    rows = Rows(replace(MODELS[name], dtype=torch.float64))
    path_batches, others, probe = ([rows.model.batch(first + i) for i in range(3)] for first in (20, 30, 40))
    found = []
    for wanted in (False, True):
        rows.loss.sharing.wanted = wanted
        path = rows.point.follow(path_batches)
        response = path.replace(others).response(probe[0]).data["response"].values
        found.append([torch.from_numpy(response), *_ranked(path.rank(others, probe[0], by="response"))])
    within = 1e-4 if name == "NeoX eager" else 1e-7  # its softmax is in float32
    for alone, together in zip(*found):
        assert float(alone.norm()) > 0
        assert float((alone - together).norm()) <= within * float(alone.norm())


def _ranked(ranking: Any) -> list[Tensor]:
    by_label = ranking.data.sortby("change")
    return [torch.from_numpy(by_label[name].values) for name in ("predicted", "measured")]


def test_a_batch_that_cannot_be_mapped_does_not_spoil_a_pool_that_can() -> None:
    """The mask of the first pool is shared by all; that of the second is not, and sdpa looks at it."""
    plain, padded = MODELS["NeoX sdpa"], MODELS["NeoX sdpa, padded"]
    rows = Rows(plain)
    rows.loss.sharing.wanted = True
    rows.pool()
    assert rows.loss.sharing.tries("pool", ROWS)
    rows.model = padded
    together = rows.pool()
    rows.loss.sharing.wanted = False
    assert_close(together, rows.pool(), plain.dtype)


def test_one_batch_many_times_is_a_pool() -> None:
    rows = Rows(MODELS["plain GPT"])
    batch = rows.model.batch(3)
    rows.loss.sharing.wanted = True
    state, random = rows.state, rows.arguments[1]
    found = Pool(rows.loss, state.theta, state.buffers, [batch] * ROWS, random, str, rows.present).gradients()
    alone = rows.loss.gradient(state.theta, state.buffers, batch, random, "alone")
    for each in found:
        assert_close(rows._joined([each]), rows._joined([alone]), rows.model.dtype)
    assert rows.loss.sharing.tries("pool", ROWS)


def test_coarse_numbers_round_and_are_no_reason_to_run_alone() -> None:
    """Another mask, or a state that the model hides, is still told from the rounding of bfloat16."""
    calls = iter(range(1000))

    def hidden(model: nn.Module, batch: Any) -> Tensor:
        return classify(model, batch) * (1 + 0.2 * (next(calls) % 3))

    plain = MODELS["TransformerEncoderLayer"]
    other_mask, hides = MODELS["TransformerEncoderLayer, dropout"], replace(plain, loss_fn=hidden)
    for model, together in ((plain, True), (MODELS["plain GPT"], True), (other_mask, False), (hides, False)):
        rows = Rows(replace(model, dtype=torch.bfloat16))
        rows.loss.sharing.wanted = True
        rows.gradient()
        rows.pool()
        assert [rows.loss.sharing.tries(kind, ROWS) for kind in ("gradient", "pool")] == [together] * 2


def test_rows_of_a_recurrent_layer_warn_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    rows = Rows(replace(MODELS["LSTM"], dtype=torch.float32))
    rows.loss.sharing.wanted = True
    for kind in KINDS:
        getattr(rows, kind)()
    assert not [str(warning.message) for warning in recwarn]
