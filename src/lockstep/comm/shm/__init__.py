"""The c10d backend ``"shm"``: collectives over shared memory, for ranks on one host.

From the bottom up: layout.py (what lies where), semaphore.py (how ranks synchronise), segment.py and rendezvous.py (how
they come to share memory), peers.py and failure.py (how they learn that something is wrong), fingerprint.py and
rounds.py (how they agree and move), collectives/ (one file each), executor.py and work.py (order and completion),
group.py, process_group.py (torch's interface), register.py (torch's registry).
"""
