"""The c10d backend ``"hierarchical"``: shared memory inside a host, gloo between hosts; for CPU tensors.

grouping.py (which ranks share a host), between.py (what one rank sends to ranks of other hosts, and what hosts tell
each other when something is wrong), messages.py (send and receive), engine.py (the verbs; over ``comm/shm`` inside each
host). lockstep.init() takes it where the ranks can't share memory and some host has several of them.
"""
