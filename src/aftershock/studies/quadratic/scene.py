"""A controlled system at the time of the shock."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...core.linear_step import LinearStep
from ...core.state import Cotangent, JointState, Tangent
from ...theory.matching import ACCEPTED, TARGET, calibrate, first_step_candidates
from ..study import System
from .family import (
    CONDITIONS,
    HYPER,
    Probe,
    Process,
    Quadratic,
    anisotropic_probe,
    mean_loss,
    rotating_probe,
    standard_probe,
    start_state,
)
from .rows import linear_step, path_of, rollout, rows_of, step_

BURN_IN, REFERENCES, CANDIDATES, HORIZON = 40, 4, 16, 32


@dataclass(frozen=True)
class Scene:
    """One system up to the shock: x_t, the control's gradient ḡ, the residuals ξ_i, the realized future, the probes.

    Every row takes the step of the shock with its own ḡ + ξ.
    """

    state: JointState  # one row
    mean_gradient: Float[Tensor, "1 d"]
    system: System
    process: Process
    seen: list[Quadratic]  # burn-in, references and candidates, in their order
    future: list[Quadratic]  # H − 1 batches of the realized future
    xi: Float[Tensor, "change d"]
    standard: Probe
    anisotropic: Probe

    @classmethod
    def of(cls, system: System) -> Scene:
        process = Process(CONDITIONS[system.index % len(CONDITIONS)])
        batches = process.sequence(system.generator("sequence"), BURN_IN + REFERENCES + CANDIDATES + HORIZON - 1)
        *_, state = rollout(start_state(system.generator("start")), batches[:BURN_IN], HYPER)
        seen = batches[: BURN_IN + REFERENCES + CANDIDATES]
        references, candidates = seen[BURN_IN : BURN_IN + REFERENCES], seen[BURN_IN + REFERENCES :]
        mean = mean_loss(references).gradient(state.theta)
        xi = torch.cat([batch.gradient(state.theta) for batch in candidates]) - mean
        standard = standard_probe(process, system.generator("probe"))
        weighted = anisotropic_probe(standard, system.generator("anisotropy"))
        return cls(state, mean, system, process, seen, batches[len(seen) :], xi, standard, weighted)

    @property
    def references(self) -> list[Quadratic]:
        return self.seen[BURN_IN : BURN_IN + REFERENCES]

    @property
    def probes(self) -> dict[str, Probe]:
        """The two that the main experiment watches."""
        return {"standard": self.standard, "anisotropic": self.anisotropic}

    # --- the shock

    def after(self, xi: Float[Tensor, "row d"]) -> JointState:
        """The state after the step, exact, row by row."""
        return step_(rows_of(self.state, len(xi)), self.mean_gradient + xi, HYPER)

    @cached_property
    def control(self) -> JointState:
        """The state after the step with ḡ."""
        return self.after(torch.zeros_like(self.mean_gradient))

    @cached_property
    def write_in(self) -> LinearStep:
        return linear_step(self.state, self.mean_gradient, HYPER)

    def written(self, xi: Float[Tensor, "row d"]) -> Tangent:
        """B ξ."""
        dx = Tangent(*(torch.zeros_like(xi) for _ in range(3)))
        self.write_in.absorb_(dx, xi)
        return dx

    def matched(self, probe: Probe) -> Matched:
        """Candidates γ_i ξ̃_i of equal exact first responses. `eq:app_exact_matching`"""
        readout = probe.gradient(self.control.theta)
        nothing = torch.zeros_like(readout)
        functional = self.write_in.absorb_transposed_(Cotangent(readout, nothing, nothing.clone()))[0]
        candidates, signs, target = first_step_candidates(functional, self.xi, TARGET)
        base = probe.value(self.control.theta)

        def excess(gamma: Float[Tensor, " change"]) -> Float[Tensor, " change"]:
            return signs * (probe.value(self.after(gamma[:, None] * candidates).theta) - base) - target

        gamma = calibrate(excess, len(candidates))
        return Matched(gamma[:, None] * candidates, excess(gamma).abs() <= ACCEPTED * target)

    # --- the control's future

    @cached_property
    def path(self) -> list[JointState]:
        """The control at h = 1 … H along the realized future."""
        return path_of(self.control, self.future, HYPER)

    @cached_property
    def rotating(self) -> Probe:
        before, after = (self.path[h - 1].theta[0] for h in (HORIZON // 2, HORIZON // 2 + 1))
        return rotating_probe(before, after, self.system.generator("rotation"))


@dataclass(frozen=True)
class Matched:
    """Perturbations of equal exact |d_1|, and whether each has reached the target."""

    xi: Float[Tensor, "change d"]
    accepted: Bool[Tensor, " change"]
