"""Thin adapters: the flight recorder inside other people's training loops."""
