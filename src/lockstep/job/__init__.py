"""What the launcher and the ranks of a job share in the job's folder. Never imports torch.

A rank stores where it is (flight.py) in a page of shared memory (page.py) that the launcher looks at, and the launcher
keeps the clock (hang.py). The ranks agree there on a step to stop at (stop.py). files.py knows the folder's files.
"""
