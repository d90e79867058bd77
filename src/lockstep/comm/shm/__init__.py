"""The c10d backend ``"shm"``: collectives over shared memory, for ranks on one host.

From the bottom up: layout.py (what lies where), semaphore.py (how ranks synchronise), segment.py and rendezvous.py (how
they come to share memory), health.py (how a rank learns what is wrong), rounds.py (how ranks agree and move),
collectives.py (the verbs), p2p.py (send and receive), shared_tensors.py (memory that needs no copy), memory_engine.py
(all of it, as an engine). What the engines have in common is in ``comm/group``.

*What it needs*: Linux, ranks of one user that see each other's processes, memfd (kernel 3.17) and /proc. No port, no
file, nothing in /dev/shm; one descriptor per peer process while a group is open.

*Memory*: taken when first written. Per rank of a group: three stages (512 KiB each; ``LOCKSTEP_SHM_CHUNK``) once it
moves large tensors, a few pages otherwise; and two more of that size per ordered pair of ranks that send to each other.
Tensors from ``allocate_tensor`` are counted by the rank that asks for them. All of it is given back when the group is
destroyed and the last tensor on it is gone, and in any case when the processes end.

*Limits*: a group over "shm" carries CPU tensors only (``"cpu:shm,cuda:nccl"`` can't be one group: torch hands the whole
group to a backend written in Python). Reductions of 8-bit floats are refused, as over gloo, and so are averages of bool
and of unsigned integers of 16 bits and more.
"""
