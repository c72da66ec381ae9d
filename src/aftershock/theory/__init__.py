"""The theory of the paper on the user's own model: paths and changes in, labelled results out.

where does the error come from?       decompose, error_shares, error_bounds, write_in_bound, activation_margin,
                                      switch_fraction
how does a shock enter?               write_paths, second_order
what do reruns alone say?             logit_tangent
which memory carries it?              channel_responses, persistence, FrozenMemory
which batch matters most?             scores, readout_null, match_first_step
what will it do in an unknown future? repeated_futures, prospective_structure, sampled_future
what do many systems say together?    aggregate, error_exponents, spearman, compare_scores
how is a table kept?                  save, load
"""

from ..results.certificate import certify
from ..results.fidelity import (
    error_exponents,
    extremum_sign_accuracy,
    nrmse,
    sign_agreement,
    symmetric_error,
    trusted_horizon,
    validity_radius,
)
from ..results.statistics import (
    aggregate,
    coefficient_of_variation,
    compare_scores,
    holm,
    median_interval,
    spearman,
)
from ..results.summaries import crossing, spike_margin, summarize
from .baselines import readout_null, scores
from .channels import channel_responses, interactions
from .envelopes import curvature_bound, error_bounds, operator_norm, probe_constant, smooth_constant, write_in_bound
from .error_shares import error_shares
from .finite_difference import logit_tangent, token_loss
from .frozen import FrozenMemory
from .futures import (
    present_frozen,
    prospective_ratio,
    prospective_structure,
    reference_surrogate,
    repeated_futures,
    sampled_future,
)
from .matching import match_first_step, persistence, residuals
from .remainder import decompose
from .samplers import FittedProcess, fit_process, sample_futures
from .second_order import second_order
from .switching import activation_margin, margin_mass, switch_fraction, telescoped_defects
from .tables import load, save
from .write_paths import split_write, write_paths

__all__ = [
    "FittedProcess",
    "FrozenMemory",
    "activation_margin",
    "aggregate",
    "certify",
    "channel_responses",
    "coefficient_of_variation",
    "compare_scores",
    "crossing",
    "curvature_bound",
    "decompose",
    "error_bounds",
    "error_exponents",
    "error_shares",
    "extremum_sign_accuracy",
    "fit_process",
    "holm",
    "interactions",
    "load",
    "logit_tangent",
    "margin_mass",
    "match_first_step",
    "median_interval",
    "nrmse",
    "operator_norm",
    "persistence",
    "present_frozen",
    "probe_constant",
    "prospective_ratio",
    "prospective_structure",
    "readout_null",
    "reference_surrogate",
    "repeated_futures",
    "residuals",
    "sample_futures",
    "sampled_future",
    "save",
    "scores",
    "second_order",
    "sign_agreement",
    "smooth_constant",
    "spearman",
    "spike_margin",
    "split_write",
    "summarize",
    "switch_fraction",
    "symmetric_error",
    "telescoped_defects",
    "token_loss",
    "trusted_horizon",
    "validity_radius",
    "write_in_bound",
    "write_paths",
]
