"""Every number that the paper prints for its language models, as it prints them.

Shares that the text prints in percent stand as shares here, as in its tables.
"""

from __future__ import annotations

from ..quotes import Table, rows_of

VALUE = ("value",)
FD = "ISO Tangent (FD)"

LANGUAGE: tuple[Table, ...] = (
    Table(
        "text:exp3_steps",
        "Finite-difference steps, language models",
        VALUE,
        rows_of("""
        Identifiable candidates        | 72 of 72
        Selected consistency, median   | 0.00378
        Selected consistency, largest  | 0.22765
        Selected step 0.25             | 35 of 72
        Selected step 0.125            | 15 of 72
        Selected step 0.0625           | 14 of 72
        Selected step 0.03125          | 4 of 72
        Selected step 0.015625         | 4 of 72
        """),
    ),
    Table(
        "tab:app_exp3_alpha",
        "Finite-scale trajectory fidelity, language models (over all candidates)",
        ("NRMSE", "75 % NRMSE", "Cosine", "Rel. M", "Sign acc."),
        rows_of("""
        α = 0.0625 | 0.0387 | 0.1664 | 0.99990 | 0.0224 | 1.000
        α = 0.125  | 0.0477 | 0.1906 | 0.99993 | 0.0263 | 1.000
        α = 0.25   | 0.0946 | 0.2095 | 0.99983 | 0.0524 | 1.000
        α = 0.5    | 0.2105 | 0.4431 | 0.99938 | 0.1081 | 0.986
        α = 1      | 0.3902 | 0.7867 | 0.99668 | 0.2235 | 0.903
        """),
    ),
    Table(
        "text:exp3_validity",
        "Share of valid candidates by scale, language models",
        (FD,),
        rows_of("""
        α = 0.0625 | 0.931
        α = 0.125  | 0.972
        α = 0.25   | 0.875
        α = 0.5    | 0.736
        α = 1      | 0.556
        """),
    ),
    Table(
        "tab:app_exp3_scale",
        "Scaling summary, language models",
        ("Local NRMSE", "Cosine", "Valid 0.25", "Valid 1", "ISO-FD ρ"),
        rows_of("""
        0.41B | 0.1090 | 0.99918 | 0.958 | 0.417 | 0.714
        1.0B  | 0.0519 | 0.99995 | 0.792 | 0.667 | 0.833
        1.4B  | 0.0567 | 0.99994 | 0.875 | 0.583 | 0.762
        """),
        also=("tab:exp_main_scaling",),
    ),
    Table(
        "text:exp3_domains",
        "Numbers in the text by domain, language models",
        ("Local NRMSE", "Valid 1", "Positive extrema", "Negative extrema"),
        rows_of("""
        CodeParrot   | 0.0426 | 0.875 | 24 of 24 | 0 of 24
        OpenWebText  | 0.1094 | 0.375 | 13 of 24 | 11 of 24
        WikiText-103 | 0.1161 | 0.417 | 14 of 24 | 10 of 24
        """),
    ),
    Table(
        "text:exp3_exponents",
        "Fitted exponent of the local error, language models",
        (FD,),
        rows_of("""
        410M, CodeParrot   | 1.878
        410M, OpenWebText  | 1.089
        410M, WikiText-103 | 0.658
        1B, CodeParrot     | 1.988
        1B, OpenWebText    | 1.916
        1B, WikiText-103   | 1.936
        1.4B, CodeParrot   | 1.992
        1.4B, OpenWebText  | 1.951
        1.4B, WikiText-103 | 2.025
        Overall median     | 1.921
        """),
    ),
    Table(
        "tab:app_exp3_ranking",
        "Spearman correlation with M inside each system, language models",
        (FD, "Exact 1-step", "Gradient norm", "Parameter write"),
        rows_of("""
        410M, CodeParrot   | 0.857 | 0.643 | -0.286 | -0.262
        410M, OpenWebText  | 0.548 | 0.738 | 0.571  | 0.595
        410M, WikiText-103 | 0.714 | 0.643 | 0.571  | 0.619
        1B, CodeParrot     | 0.952 | 0.905 | -0.167 | -0.048
        1B, OpenWebText    | 0.333 | 0.929 | 0.071  | -0.286
        1B, WikiText-103   | 0.833 | 0.762 | -0.214 | 0.048
        1.4B, CodeParrot   | 0.976 | 0.905 | -0.167 | -0.167
        1.4B, OpenWebText  | 0.762 | 0.929 | 0.429  | 0.405
        1.4B, WikiText-103 | 0.619 | 0.667 | -0.119 | 0.190
        Median             | 0.762 | 0.762 | -0.119 | 0.048
        """),
    ),
    Table(
        "text:exp3_ranking",
        "Numbers in the text on ranking, language models",
        VALUE,
        rows_of("""
        Systems with a positive ISO-FD correlation             | 9 of 9
        Systems where ISO-FD exceeds the gradient norm         | 8 of 9
        Systems where ISO-FD exceeds the parameter write       | 8 of 9
        Systems where ISO-FD exceeds exact one-step            | 5 of 9
        Systems where exact one-step exceeds ISO-FD            | 4 of 9
        Pooled rank correlation, exact one-step                | 0.791
        Pooled rank correlation, ISO-FD                        | 0.733
        Partial correlation of ISO-FD, one-step held fixed     | 0.310
        R² of one-step ranks                                   | 0.626
        R² of one-step and ISO-FD ranks                        | 0.662
        """),
    ),
    Table(
        "text:exp3_signs",
        "Signed extrema at full scale, language models",
        VALUE,
        rows_of("""
        Positive extrema             | 51 of 72
        Negative extrema             | 21 of 72
        Signs that ISO-FD recovers   | 65 of 72
        """),
    ),
    Table(
        "text:exp3_hybrids",
        "Largest response of hybrid states, language models",
        ("m without its v", "m and v together"),
        rows_of("""
        410M, WikiText-103 | 50.322 | 0.01084
        1B, WikiText-103   | 8.5748 | 0.00886
        1.4B, WikiText-103 | 26.339 | 0.00847
        """),
    ),
    Table(
        "text:exp3_statements",
        "What the text says in words, language models",
        VALUE,
        rows_of("""
        Smallest median cosine over the local scales              | > 0.9998
        Smallest median cosine over the model sizes               | > 0.999
        The valid share falls with every larger scale             | no
        Local NRMSE grows with every larger model                 | no
        Validity at α = 1 varies more by domain than by size      | yes
        Median ρ of ISO-FD and of exact one-step are equal        | yes
        Full-state responses on WikiText-103 are of order 0.01    | yes
        """),
    ),
    Table(
        "text:exp3_cost",
        "Run time of a system in seconds, language models",
        ("Seconds",),
        rows_of("""
        0.41B       | about 464
        1.0B        | about 645
        1.4B        | about 941
        All systems | about 5849
        """),
    ),
)
