"""Experiment 1 on pretrained language models."""
