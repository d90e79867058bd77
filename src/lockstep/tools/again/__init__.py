"""Any step of a recorded run again: which samples it had (samples.py), and what they are (shown.py).

If only the run's program knows an answer, it is run again: program.py starts it once more, in one process and up to the
place that a request names, and within.py is that process.
"""
