"""A new shard of 24 batches: which of them would hurt the run, before any of them is trained on?

python examples/rank_a_pool.py
"""

from __future__ import annotations

import torch
from letters import NAMES, PROSE, draw, loss_fn, misread, trained

import aftershock as ak
from aftershock.api.ranking import Ranking

BAD = (5, 17)  # batches of the pool that were decoded with the wrong table


def main() -> Ranking:
    model, optimizer, generator = trained(200)
    held_out = draw(NAMES, torch.Generator().manual_seed(7))
    pool = [draw(NAMES, generator) for _ in range(24)]
    for i in BAD:
        pool[i] = misread(pool[i])

    future = [draw(PROSE, generator) for _ in range(11)]
    path = ak.capture(model, optimizer, loss_fn).follow([draw(NAMES, generator), *future])
    ranking = path.rank(pool, probe=held_out, verify=3)  # each in the place of the first batch
    print(ranking)
    return ranking


if __name__ == "__main__":
    main()
