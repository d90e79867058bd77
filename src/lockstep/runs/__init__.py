"""What a run leaves of itself: how it went (run.json), and how the ranks' time went second by second (series-0.bin).

The launcher writes it (record.py) into the folder of the run's logs; the commands read it (history.py).
"""
