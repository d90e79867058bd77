"""Training on disk: whole checkpoints or none, in formats that hold data and never code."""
