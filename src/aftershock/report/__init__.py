"""Labelled results as pictures and as one self-contained page."""
