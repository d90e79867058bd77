"""torch's names for a group's operations, translated into collectives over rounds: one file per kind."""
