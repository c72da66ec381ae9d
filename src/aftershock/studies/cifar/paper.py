"""Every number that the paper prints for the networks of Experiment 1, as it prints them."""

from __future__ import annotations

from ..quotes import Table, rows_of

SYSTEMS = 16  # of each network

NETWORKS: tuple[Table, ...] = (
    Table(
        "tab:app_exp2_fidelity",
        "Finite-horizon tangent fidelity, networks",
        ("NRMSE", "Sign agr.", "Rel. M err.", "Rel. ARE err.", "Extremum-sign acc."),
        rows_of("""
        CNN–ReLU, α = 0.0625 | 0.0458 | 1.000 | 0.0113 | 0.0115 | 1.000
        CNN–ReLU, α = 0.125  | 0.0610 | 1.000 | 0.0160 | 0.0185 | 1.000
        CNN–ReLU, α = 0.25   | 0.1097 | 1.000 | 0.0299 | 0.0307 | 1.000
        CNN–ReLU, α = 0.5    | 0.1959 | 1.000 | 0.0587 | 0.0632 | 1.000
        CNN–ReLU, α = 1      | 0.3854 | 0.958 | 0.1094 | 0.1126 | 1.000
        MLP–GELU, α = 0.0625 | 0.0377 | 1.000 | 0.0116 | 0.0140 | 1.000
        MLP–GELU, α = 0.125  | 0.0759 | 1.000 | 0.0230 | 0.0276 | 1.000
        MLP–GELU, α = 0.25   | 0.1530 | 1.000 | 0.0462 | 0.0566 | 1.000
        MLP–GELU, α = 0.5    | 0.2980 | 1.000 | 0.1002 | 0.1191 | 1.000
        MLP–GELU, α = 1      | 0.6294 | 0.917 | 0.1698 | 0.2270 | 1.000
        """),
        systems=SYSTEMS,
    ),
    Table(
        "text:exp1_neural",
        "Numbers in the text, both networks of Experiment 1 together",
        ("value",),
        rows_of("""
        Pooled local NRMSE                     | 0.0678
        Pooled local sign agreement            | 1.000
        State-error identity, largest residual | 9.33e-17
        Full ISO, pooled Spearman              | 0.832
        Positive extrema                       | 57 of 96 (39 negative, 40.6 %)
        """),
        systems=2 * SYSTEMS,
    ),
    Table(
        "text:exp1_neural_by_network",
        "Numbers in the text, each network of Experiment 1",
        ("CNN–ReLU", "MLP–GELU"),
        rows_of("""
        Validity radius                             | 0.75 [0.5, 1] | 0.5 [0.375, 0.5]
        Error exponent, h = 1                       | 2.017         | 2.001 to 2.005
        Error exponent, h = 4                       | 1.916         | 2.001 to 2.005
        Error exponent, h = 8                       | 1.573         | 2.001 to 2.005
        Error exponent, h = 12                      | 1.120         | 2.001 to 2.005
        Spearman of shuffled readouts               | 0.776         | 0.713
        p of Full ISO against shuffled readouts     | 0.0019        | 0.191
        Systems with a negative conditional v       | 15 of 16      | 13 of 16
        M, β1 = 0.99 over 0.5                       | 8.47          | 10.80
        ARE, β1 = 0.99 over 0.5                     | 14.17         | 11.96
        h* at β1 = 0.5                              | 3.5 to 4      | 3.5 to 4
        h* at β1 = 0.99                             | 12            | 12
        ARE, β2 = 0.9999 over 0.9                   | 4.24          | 2.75
        """),
        systems=SYSTEMS,
    ),
    Table(
        "text:exp1_neural_cnn",
        "Numbers in the text, CNN–ReLU of Experiment 1",
        ("CNN–ReLU",),
        rows_of("""
        Percentile in the readout null       | 99
        Switched gates at h = 8, α = 0.0625  | 1.79e-4
        Switched gates at h = 8, α = 1       | 2.82e-3
        Switched gates grow with the scale   | yes
        """),
        systems=SYSTEMS,
    ),
    Table(
        "text:exp1_neural_mlp",
        "Numbers in the text, MLP–GELU of Experiment 1",
        ("MLP–GELU",),
        rows_of("""
        Error exponent, smallest over horizons                                | 2.001
        Error exponent, largest over horizons                                 | 2.005
        R² of the exponent's fit                                              | about 1.00
        Full ISO's lead over frozen dynamics is positive in median            | yes
        Full ISO's lead over clamped parameter state is positive in median    | yes
        Full ISO's lead over no propagation is positive in median             | yes
        Full ISO's lead over initial parameter only is positive in median     | yes
        """),
        systems=SYSTEMS,
    ),
    Table(
        "tab:app_exp2_ranking",
        "Spearman correlation with M, networks",
        ("CNN–ReLU", "MLP–GELU"),
        rows_of("""
        Full ISO                | 0.888 | 0.762
        Frozen dynamics         | 0.843 | 0.671
        Clamped parameter state | 0.818 | 0.661
        No propagation          | 0.755 | 0.668
        Initial parameter only  | 0.734 | 0.720
        Frozen readout          | 0.713 | 0.507
        Exact one-step          | 0.545 | 0.566
        Gradient norm           | 0.535 | 0.336
        Parameter-write norm    | 0.490 | 0.283
        Curvature               | 0.559 | 0.248
        Norm product            | 0.241 | 0.224
        """),
        systems=SYSTEMS,
        also=("tab:exp_main_ranking",),
    ),
    Table(
        "text:exp1_neural_tests",
        "Does Full ISO rank better? Paired Wilcoxon tests with Holm's correction (p < 0.05)",
        ("CNN–ReLU", "MLP–GELU"),
        rows_of("""
        Frozen dynamics         | no  | no
        Clamped parameter state | yes | no
        No propagation          | yes | no
        Initial parameter only  | yes | no
        Frozen readout          | yes | yes
        Exact one-step          | yes | yes
        Gradient norm           | yes | yes
        Parameter-write norm    | yes | yes
        Curvature               | yes | yes
        Norm product            | yes | yes
        """),
        systems=SYSTEMS,
    ),
    Table(
        "tab:app_exp2_channels",
        "State-channel interventions, networks (ARE relative to 111)",
        ("CNN–ReLU: ARE", "CNN–ReLU: h*", "MLP–GELU: ARE", "MLP–GELU: h*"),
        rows_of("""
        100 | 0.216 | 2.5  | 0.250 | 1.5
        010 | 0.821 | 9.0  | 0.827 | 7.5
        001 | 0.030 | 10.0 | 0.015 | 9.5
        110 | 1.025 | 9.0  | 1.010 | 6.5
        101 | 0.214 | 3.0  | 0.237 | 1.5
        011 | 0.812 | 9.0  | 0.818 | 7.5
        111 | 1.000 | 9.0  | 1.000 | 7.0
        """),
        systems=SYSTEMS,
    ),
)
