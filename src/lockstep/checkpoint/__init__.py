"""Training on disk: complete checkpoints or none, in formats that hold data and never code."""
