"""``lockstep runs plan``: estimate from a trace what a run would take on other machines."""
