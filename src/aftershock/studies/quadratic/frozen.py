"""The frozen memory of one coordinate of a controlled system, where a candidate's first response is largest."""

from __future__ import annotations

from ...theory.frozen import FrozenMemory
from .family import HYPER, Probe
from .rows import linear_step
from .scene import Scene


def frozen_memory(scene: Scene, probe: Probe) -> FrozenMemory:
    """Ā at the step after the shock. The coordinate is the one through which candidate 0 first moves the probe most."""
    state, batch = scene.path[0], scene.future[0]
    moved = scene.after(scene.xi[:1]).theta - scene.control.theta
    j = int((probe.gradient(scene.control.theta) * moved)[0].abs().argmax())
    gradient = batch.gradient(state.theta)
    linear = linear_step(state, gradient, HYPER)
    g, m, v = (float(x[0, j]) for x in (gradient, linear.dq_dm, linear.dq_dv))
    curvature = float(batch.diagonal[j] + batch.factor[j].square().mean())
    return FrozenMemory.of_scalars(
        retention=1 - float(HYPER.lr) * HYPER.weight_decay, dq_dm=m, dq_dv=v,
        dtheta_dg=(1 - HYPER.beta1) * m + 2 * (1 - HYPER.beta2) * g * v, curvature=curvature, gradient=g,
        beta1=HYPER.beta1, beta2=HYPER.beta2,
    )  # fmt: skip
