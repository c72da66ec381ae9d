"""Other tensors in a model's places: tied ones in all of theirs, and everything back afterwards."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from aftershock.core.places import Places


class Tied(nn.Module):
    """A head tied to its embedding, a block that stands in two places, and a buffer that forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.words.weight
        self.block = self.same = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return self.head(self.same(self.block(self.words(x))))


def test_it_is_what_functional_call_gives() -> None:
    torch.manual_seed(0)
    model, x = Tied().double(), torch.tensor([1, 4])
    names = [name for name, _ in model.named_parameters()]
    tensors = {name: torch.randn_like(p) for name, p in model.named_parameters()} | {"seen": torch.tensor(4.0)}
    before = dict(model.named_parameters(remove_duplicate=False)) | {"seen": model.seen}
    # on a copy: torch leaves a block that stands in two places with the other tensors
    wanted = torch.func.functional_call(copy.deepcopy(model), dict(tensors), (x,), tie_weights=True)
    assert names == ["words.weight", "block.weight", "block.bias"]
    with Places(model).holding(tensors):
        assert model.head.weight is model.words.weight is tensors["words.weight"]
        found = model(x)
    assert torch.equal(found, wanted)
    assert float(tensors["seen"]) == 5
    for name, tensor in before.items():
        assert model.get_parameter(name) is tensor if name != "seen" else model.seen is tensor


def test_an_error_leaves_the_model_as_it_was() -> None:
    model = Tied()
    weight, places = model.words.weight, Places(model)
    with pytest.raises(IndexError), places.holding({"words.weight": torch.zeros(5, 3)}):
        model(torch.tensor([9]))
    assert model.head.weight is model.words.weight is weight
