"""Libraries that people train with, on lockstep, each against one process; run by make ecosystem."""
