"""Whole training jobs, written with lockstep's public names only. Run one with ``lockstep run -n 2 -m …``."""
