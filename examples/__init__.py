"""Whole training jobs, written with lockstep's public names only.

Run one from the repository's root: ``lockstep run -n 2 -m examples.digits``.
"""
