"""aftershock beside its neighbours, on the same models and windows."""
