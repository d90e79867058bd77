"""Replicas in processes: gradients averaged over the ranks during backward.

The order of calls: ``api`` and ``wrapper`` (what users see) -> ``replica`` (one module in the group, which hears of
autograd's events from ``hooks``) -> ``synchroniser`` (``every_step`` or ``in_rounds``) -> ``reducer`` (a state machine)
-> ``backward`` (the one under way) -> ``bucket`` (memory) and the riders (``rider``: what travels with the gradients).
``layout`` makes the reducer and its buckets.
"""
