"""A process group: what torch calls, in which order it runs, and what an engine has to do for it.

From the bottom up: fingerprint.py and failures.py (what a rank says of itself, and what ends a group), tensors.py and
reduction.py (what is moved and combined), meeting.py (how the ranks of a new group meet), work.py, engine.py (the
verbs) and group.py (order and completion), process_group.py (torch's interface), register.py (torch's registry). The
engines: ``comm/shm``, ``comm/hosts``, ``comm/mpi.py``.
"""
