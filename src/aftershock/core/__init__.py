"""Tensors in, tensors out: the dynamics of AdamW, exact and linearized. Imports torch only."""
