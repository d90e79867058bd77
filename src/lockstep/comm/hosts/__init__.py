"""The c10d backend ``"hierarchical"``: shared memory inside a host, gloo between hosts; for CPU tensors.

grouping.py (which ranks share a host), between.py (what one rank sends to ranks of other hosts, and what hosts tell
each other when something is wrong), messages.py (send and receive), local.py (the ranks of one host, over
``comm/shm``), engine.py (the verbs). lockstep.init() takes it where the ranks can't all share memory and some host has
several of them.
"""
