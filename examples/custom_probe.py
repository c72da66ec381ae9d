"""Any number that a model gives can be watched: here, how sure it is of a capital after a capital.

python examples/custom_probe.py
"""

from __future__ import annotations

import torch
from letters import CAPITALS, NAMES, PROSE, draw, loss_fn, misread, numbers, trained
from torch import Tensor, nn

import aftershock as ak


def main() -> ak.Response:
    model, optimizer, generator = trained(200)
    passages = draw(NAMES, torch.Generator().manual_seed(7))[:, :-1]
    capitals = numbers(CAPITALS)

    def doubt(model: nn.Module) -> Tensor:
        """Minus the log of the probability of a capital. It must use the model that it is given."""
        return -model(passages).log_softmax(1)[:, capitals].logsumexp(1).mean()

    point = ak.capture(model, optimizer, loss_fn)  # a copy of the live run
    path = point.follow([draw(PROSE, generator) for _ in range(12)])
    sound = draw(NAMES, generator)
    response = path.replace([sound, misread(sound)], at=0).response(probe=doubt)
    print(response)
    return response


if __name__ == "__main__":
    main()
