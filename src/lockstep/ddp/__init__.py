"""Replicas in processes: gradients averaged over the ranks during backward.

The order of calls: ``api`` and ``wrapper`` (what users see) -> ``replica`` (one module in the group) ->
``hooks`` (autograd's events) -> ``reducer`` (a state machine) -> ``bucket`` (memory). ``plan`` is pure.
"""
