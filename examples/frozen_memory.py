"""AdamW's memory at one weight, frozen: does a write into m or v grow before it fades, and for how long?

python examples/frozen_memory.py
"""

from __future__ import annotations

from letters import CODES, PROSE, draw, loss_fn, trained

import aftershock as ak
from aftershock.theory import FrozenMemory


def main() -> dict[str, FrozenMemory]:
    model, optimizer, generator = trained(200)
    path = ak.capture(model, optimizer, loss_fn).follow([draw(PROSE, generator) for _ in range(2)])
    places = {
        "the embedding of 'e'": ("token.weight", (CODES["e"], 0)),
        "the embedding of 'Q'": ("token.weight", (CODES["Q"], 0)),
        "the output's bias for 'e'": ("layers.3.bias", (CODES["e"],)),
    }
    found = {}
    for name, coordinate in places.items():
        memory = found[name] = FrozenMemory.of(path, step=1, coordinate=coordinate)
        response = memory.response(horizon=400)
        largest = abs(response).argmax("horizon") + 1
        peaks = {channel: int(largest.sel(channel=channel)) for channel in ("m", "v")}
        print(f"{name}: spectral radius {memory.spectral_radius:.6f}, largest response {peaks} states after the write")
    return found


if __name__ == "__main__":
    main()
