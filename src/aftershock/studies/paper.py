"""Every number that the paper prints, by table: Experiment 2's here, the others' beside the study that makes them.

A table goes by the paper's label; "text:…" holds the numbers of a paragraph. Tables of the main text that repeat
numbers of the appendix are named in `also` and not written twice, so that no number is counted twice.
"""

from __future__ import annotations

from .cifar import paper as cifar
from .language import paper as language
from .quadratic import paper as quadratic
from .quotes import Table, rows_of

BY_KIND = {"Quadratic": quadratic.SYSTEMS, "MLP": cifar.SYSTEMS, "CNN": cifar.SYSTEMS}

FUTURES: tuple[Table, ...] = (
    Table(
        "tab:app_exp2_predictability_primary",
        "Repeated futures: prospective structure of M",
        ("Π(M)", "Branch ρ"),
        rows_of("""
        Quadratic, standard; natural    | 0.801 [0.709, 0.877] | 0.919 [0.866, 0.949]
        Quadratic, standard; matched    | 0.730 [0.594, 0.845] | 0.909 [0.839, 0.941]
        Quadratic, anisotropic; natural | 0.718 [0.602, 0.825] | 0.899 [0.846, 0.943]
        Quadratic, anisotropic; matched | 0.603 [0.501, 0.727] | 0.895 [0.844, 0.931]
        MLP–GELU; natural               | 0.771 [0.621, 0.844] | 0.862 [0.795, 0.914]
        MLP–GELU; matched               | 0.921 [0.885, 0.951] | 0.955 [0.937, 0.959]
        CNN–ReLU; natural               | 0.716 [0.649, 0.758] | 0.855 [0.823, 0.900]
        CNN–ReLU; matched               | 0.700 [0.595, 0.771] | 0.872 [0.855, 0.892]
        """),
        systems=BY_KIND,
        also=("tab:exp_main_predictability",),
    ),
    Table(
        "tab:app_exp2_present_scores",
        "Present-time scores: Spearman with the mean M over futures",
        ("Exact 1-step", "Grad. norm", "Write norm", "Frozen ISO", "Ref.-surrogate ISO"),
        rows_of("""
        Quadratic, standard; natural    | 0.801 | 0.212 | 0.253  | 0.659  | 0.372
        Quadratic, standard; matched    | --    | 0.049 | -0.057 | -0.066 | -0.021
        Quadratic, anisotropic; natural | 0.790 | 0.394 | 0.374  | 0.562  | 0.490
        Quadratic, anisotropic; matched | --    | 0.272 | 0.025  | 0.031  | 0.025
        MLP–GELU; natural               | 0.661 | 0.318 | 0.325  | 0.734  | 0.262
        MLP–GELU; matched               | --    | 0.066 | 0.339  | 0.941  | 0.752
        CNN–ReLU; natural               | 0.619 | 0.538 | 0.510  | 0.752  | 0.601
        CNN–ReLU; matched               | --    | 0.500 | 0.500  | 0.755  | 0.811
        """),
        systems=BY_KIND,
        also=("tab:exp_main_predictability",),
    ),
    Table(
        "tab:app_exp2_matching_audit",
        "Exact-one-step matching audit of Experiment 2",
        ("CV of |d1|", "Calibration success"),
        rows_of("""
        Quadratic, standard    | 1.07e-12 [7.97e-13, 1.75e-12] | 1.000
        Quadratic, anisotropic | 1.33e-12 [6.50e-13, 1.84e-12] | 1.000
        MLP–GELU               | 3.57e-13 [2.79e-13, 5.73e-13] | 1.000
        CNN–ReLU               | 1.36e-12 [1.08e-12, 2.02e-12] | 1.000
        """),
        systems=BY_KIND,
    ),
    Table(
        "tab:app_exp2_variance_components",
        "Variance components of M, matched candidates",
        ("Between candidates", "Within futures"),
        rows_of("""
        Quadratic, standard    | 9.92e-10 | 2.39e-10
        Quadratic, anisotropic | 4.25e-8  | 2.35e-8
        MLP–GELU               | 4.31e-8  | 5.45e-9
        CNN–ReLU               | 2.02e-8  | 1.13e-8
        """),
        systems=BY_KIND,
    ),
    Table(
        "tab:app_exp2_secondary_metrics",
        "Prospective structure of two secondary summaries (that of M is in the primary table)",
        ("Π(A)", "Π(P+)"),
        rows_of("""
        Quadratic, standard; natural    | 0.817 | 0.704
        Quadratic, standard; matched    | 0.729 | 0.995
        Quadratic, anisotropic; natural | 0.722 | 0.570
        Quadratic, anisotropic; matched | 0.603 | 0.990
        MLP–GELU; natural               | 0.816 | 0.807
        MLP–GELU; matched               | 0.887 | 0.995
        CNN–ReLU; natural               | 0.738 | 0.787
        CNN–ReLU; matched               | 0.791 | 0.940
        """),
        systems=BY_KIND,
    ),
)

TABLES: dict[str, Table] = {
    table.label: table for table in (*quadratic.CONTROLLED, *cifar.NETWORKS, *language.LANGUAGE, *FUTURES)
}
