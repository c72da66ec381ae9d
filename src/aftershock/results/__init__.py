"""Labelled results: summaries, certificates, statistics, provenance, files."""
