"""Labelled results in, labelled results out: summaries, certificates, and the theory of the paper."""
