"""The c10d backend ``"shm"``: collectives over shared memory, for ranks on one host.

From the bottom up: layout.py (what lies where), semaphore.py (how ranks synchronise), segment.py and rendezvous.py (how
they come to share memory), fingerprint.py and health.py (what a rank says of itself, and how it learns what is wrong),
rounds.py (how ranks agree and move), tensors.py, reduction.py and collectives.py (what is moved: the verbs), p2p.py
(send and receive), shared_tensors.py (memory that needs no copy), memory_engine.py (all of it, as an engine). What
other engines (``comm/hosts``, ``comm/mpi.py``) share with it: engine.py (the verbs), work.py and group.py (order and
completion), process_group.py (torch's interface), register.py (torch's registry).

*What it needs*: Linux, ranks of one user that see each other's processes, memfd (kernel 3.17) and /proc. No port, no
file, nothing in /dev/shm; one descriptor per peer process while a group is open.

*Memory*: taken when first written. Per rank of a group: three stages (512 KiB each; ``LOCKSTEP_SHM_CHUNK``) once it
moves large tensors, a few pages otherwise; and two more of that size per ordered pair of ranks that send to each other.
Tensors from ``allocate_tensor`` are counted by the rank that asks for them. All of it is given back when the group is
destroyed and the last tensor on it is gone, and in any case when the processes end.

*Limits*: a group over "shm" carries CPU tensors only (``"cpu:shm,cuda:nccl"`` can't be one group: torch hands the whole
group to a backend written in Python). Integer averages and reductions of 8-bit floats are refused, as over gloo.
"""
