"""The flight recorder: a live run's last steps, kept so that any of them can be replayed and explained."""
