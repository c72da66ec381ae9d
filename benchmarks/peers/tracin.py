"""captum's TracIn, and dattri's TracIn and DVEmb, as scores of a window's steps.

They score single examples, positive where one lowers the probe's loss; a step's score is the sum over its batch with
the sign turned.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from .window import Window

CHECKPOINTS = 4
PROJECTED = 512  # DVEmb holds a square matrix of so many rows


# --- captum


def captum_own_states(window: Window) -> Tensor:
    """Each batch at the state that saw it: TracIn as its paper defines it."""
    found = [_captum(window, [state], [at]) for at, state in enumerate(window.states()[:-1])]
    return torch.cat(found)


def captum_checkpoints(window: Window) -> Tensor:
    """Every batch at a few states of the window: TracInCP, which needs no more than them."""
    steps = len(window.batches)
    states = window.states()[:-1][:: max(1, steps // CHECKPOINTS)]
    return _captum(window, states, list(range(steps))) / len(states)


def _captum(window: Window, states: list[nn.Module], steps: list[int]) -> Tensor:
    from captum.influence import TracInCP

    model, lr = window.fresh()[0], window.options["lr"]

    def load(into: nn.Module, state: nn.Module) -> float:
        into.load_state_dict(state.state_dict())
        return lr

    # Captum's gradients of a whole batch at once know linear layers and convolutions only.
    whole = all(isinstance(m, nn.Linear | nn.Conv2d) for m in model.modules() if list(m.parameters(recurse=False)))
    rows = len(window.probe[1])
    data = TensorDataset(*(torch.cat([window.batches[at][k] for at in steps]) for k in range(2)))
    loader = DataLoader(data, batch_size=rows if whole else 1)
    loss = nn.CrossEntropyLoss(reduction="sum") if whole else _per_example
    tracin = TracInCP(
        model,
        loader,
        states,
        load,
        loss_fn=loss,
        sample_wise_grads_per_batch=whole,  # type: ignore[arg-type]
    )
    influence = tracin.influence(window.probe if whole else _one_by_one(window.probe), aggregate=True)[0]
    return -influence.view(len(steps), rows).sum(1).double() / rows**2


def _per_example(outputs: Tensor, targets: Tensor) -> Tensor:
    """[example] Tokens of a text are its example's mean."""
    losses = nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")
    return losses.view(len(targets), -1).mean(1)


def _one_by_one(batch: tuple[Tensor, Tensor]) -> DataLoader:
    return DataLoader(TensorDataset(*batch), batch_size=1)


# --- dattri


def dattri_tracin(window: Window) -> Tensor:
    """TracIn, each batch at the state that saw it."""
    from dattri.algorithm import TracInAttributor

    found = []
    for batch, state in zip(window.batches, window.states()):
        task = _task(window, state)
        tracin = TracInAttributor(task, torch.tensor([window.options["lr"]]), normalized_grad=False)
        tracin.projector_kwargs = None  # as given, it projects onto 512 random directions
        scores = tracin.attribute(_loader(batch), _loader(window.probe))
        found.append(-scores.mean(1).mean())
    return torch.stack(found).double()


def dattri_dvemb(window: Window) -> Tensor:
    """DVEmb: leave-one-out along the trajectory, for SGD, in randomly projected gradients."""
    from dattri.algorithm import DVEmbAttributor

    live = window.fresh()
    dvemb = DVEmbAttributor(_task(window, live[0]), proj_dim=PROJECTED)
    rows = len(window.probe[1])
    for at, batch in enumerate(window.batches):
        dvemb.cache_gradients(0, batch, torch.arange(at * rows, (at + 1) * rows), window.options["lr"])
        window.step(live, at)
    dvemb.cache()
    scores = dvemb.attribute(_loader(window.probe))
    return -scores.mean(1).view(len(window.batches), rows).sum(1).double()


def _task(window: Window, model: nn.Module):  # type: ignore[no-untyped-def]
    from dattri.task import AttributionTask

    def loss_of(parameters: dict[str, Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = data
        outputs = functional_call(model, parameters, (inputs[None],))
        return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    return AttributionTask(loss_func=loss_of, model=model, checkpoints=[model.state_dict()])


def _loader(batch: tuple[Tensor, Tensor]) -> DataLoader:
    return DataLoader(TensorDataset(*batch), batch_size=len(batch[0]))
