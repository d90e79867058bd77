"""One file per collective: how it moves through rounds. Each works on flat tensors, and knows nothing of torch's API.

A *flat* tensor is one-dimensional and contiguous (tensors.py makes them). Every function must call ``sync()`` at least
once, also for no elements: the first one carries the fingerprint.
"""
