"""Loops with compiled parts under a recorder: training is equal to the bit, and what cannot be seen is said."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aftershock as ak

STEPS = 4
QUICK: dict[str, Any] = {"verify": 0, "placebos": 0, "treatments": False, "examples": 0}
Loss = Callable[[nn.Module, Any], Tensor]


class Net(nn.Module):
    """With dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.first(x))))


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def method(model: nn.Module, **options: Any) -> tuple[nn.Module, Loss]:
    model.compile(**options)
    return model, loss_fn


def loss(model: nn.Module, **options: Any) -> tuple[nn.Module, Loss]:
    return model, torch.compile(loss_fn, **options)


Compiled = Callable[..., tuple[nn.Module, Loss]]


def trained(
    compiled: Compiled, whole: bool, folder: Path | None = None, *, told: bool = False
) -> tuple[list[float], list[Tensor], ak.FlightRecorder | None, str]:
    """Losses and weights of a plain loop with dropout that draws between its steps, and what a recorder warned of.

    told: the loop says where loss_fn begins.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    called, compute = compiled(model, backend="eager", fullgraph=whole)
    recorder = None
    if folder is not None:
        recorder = ak.FlightRecorder(model, optimizer, loss_fn, folder, window=STEPS, triggers=())
    losses = []
    with warnings.catch_warnings(record=True) as caught, recorder or nullcontext():
        warnings.simplefilter("always")
        for _ in range(STEPS):
            batch = torch.randn(5, 4), torch.randint(0, 3, (5,))
            optimizer.zero_grad()
            if recorder is not None and told:
                recorder.before_forward()
            loss = compute(called, batch)
            loss.backward()
            optimizer.step()
            if recorder is not None:
                recorder.step(batch, loss)
            losses.append(loss.item())
    said = " ".join(str(warning.message) for warning in caught)
    return losses, [p.detach() for p in model.parameters()], recorder, said


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


def is_replayed(recorder: ak.FlightRecorder | None) -> bool:
    assert recorder is not None
    assert len(recorder.recent) == STEPS
    return "to the bit" in str(ak.explain(recorder, step=STEPS - 1, **QUICK).certificate)


@pytest.mark.parametrize("compiled", [method, loss])
def test_a_whole_graph_stays_whole_and_is_recorded_where_the_loop_says_that_it_begins(
    compiled: Compiled, tmp_path: Path
) -> None:
    plain = trained(compiled, True)
    unseen = trained(compiled, True, tmp_path / "unseen")
    assert same(unseen, plain)
    assert "where its call is compiled, call recorder.before_forward() right before it" in unseen[3]
    told = trained(compiled, True, tmp_path / "told", told=True)
    assert same(told, plain)
    assert "recorder" not in told[3]
    assert is_replayed(told[2])


def test_a_graph_that_may_be_cut_is_looked_into(tmp_path: Path) -> None:
    """A hook that does nothing in any compiled code would lose what it draws."""
    plain = trained(loss, False)
    seen = trained(loss, False, tmp_path)
    assert same(seen, plain)
    assert "recorder" not in seen[3]
    assert is_replayed(seen[2])


def test_a_whole_graph_is_the_one_without_a_recorder(tmp_path: Path) -> None:
    """Kernels are made from the graph: one more operation in it could round differently."""
    graphs: list[list[str]] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([f"{node.op} {node.target}" for node in graph.graph.nodes if node.op != "placeholder"])
        return graph.forward

    def compiled(model: nn.Module, **options: Any) -> tuple[nn.Module, Loss]:
        return loss(model, **{**options, "backend": keep})

    trained(compiled, True)
    trained(compiled, True, tmp_path, told=True)
    assert len(graphs) == 2
    assert graphs[0] == graphs[1]
    assert len(graphs[0]) > 3


@pytest.mark.parametrize("how", ["whole", "inside", "method"])
def test_masks_that_compiled_code_draws_are_told_when_recording_begins(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch._inductor.config as inductor

    def said(dropout: float, *, fallback: bool = False) -> bool:
        model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        if how == "whole":
            model = torch.compile(model)  # type: ignore[assignment]
        elif how == "inside":
            model[1] = torch.compile(model[1])  # type: ignore[index]
        else:
            model.compile()
        recorder = ak.FlightRecorder(model, optimizer, lambda m, x: m(x).sum(), tmp_path / f"{dropout}{fallback}")
        with inductor.patch(fallback_random=fallback), recorder:
            pass
        return "fallback_random" in capsys.readouterr().err

    assert said(0.1)
    assert not said(0.1, fallback=True)
    assert not said(0.0)
