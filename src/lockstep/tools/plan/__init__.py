"""``lockstep runs plan``: what a run would take on other machines, reckoned from a trace."""
