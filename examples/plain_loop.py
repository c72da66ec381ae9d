"""A plain training loop with a flight recorder: which batch is behind a spike that comes fourteen steps later?

python examples/plain_loop.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from letters import NAMES, PROSE, draw, loss_fn, misread, show, train_step, trained

import aftershock as ak
from aftershock.recorder.explanation import FlightExplanation


def main(folder: Path = Path("flight"), **options: Any) -> FlightExplanation:
    model, optimizer, generator = trained(300)
    losses = {}
    with ak.FlightRecorder(model, optimizer, loss_fn, folder, window=20, after=4) as recorder:
        for step in range(300, 350):
            batch = draw(NAMES if step in (304, 312, 320, 334) else PROSE, generator)
            if step == 320:
                batch = misread(batch)  # a shard that was decoded with the wrong table
            losses[step] = train_step(model, optimizer, batch)
            recorder.step(batch, losses[step])  # after optimizer.step()

    for step in (304, 312, 320, 334):
        print(f"names of characters at step {step}: loss {losses[step]:.2f}")
    found = ak.explain(recorder, step=334, describe=show, **options)  # the sound names, and not the worst spike, 320
    print(found)
    return found


if __name__ == "__main__":
    main()
