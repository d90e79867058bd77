"""Evaluate the checkpoints of a run beside training: which comes next (choice), the user's script, started once
(attempt), with low priority (priority), and the loop that follows the run (follow).

Note [Beside training]
~~~~~~~~~~~~~~~~~~~~~~
Training must not notice that somebody evaluates. The evaluator only reads the run's folder, and writes into a folder of
its own there (Note [Results beside checkpoints] in ``checkpoint/evaluations.py``). It takes no lock that training asks
for, and holds no checkpoint: one that is removed while the script reads it is said in a line. The script runs as a job
of its own, by the launcher, with what is left of the cores.

Note [The end of a run]
~~~~~~~~~~~~~~~~~~~~~~~
A run goes on as long as a job owns its folder. When none does, it may have ended, or have been killed, or be about to
be started again by a scheduler. It has ended if it says so (``lineage.json``: all epochs are done) since this evaluator
has begun; an older word may be of a run that is about to be resumed for more epochs. In all other cases the evaluator
waits for an owner for a limited time (``--patience``). An owner in a store that gives no sign of life for as long as
another job would have to wait for its lease (Note [Lease] in ``checkpoint/lease.py``) counts as none. Whether there is
an owner is asked before the folder is looked at, so that the last checkpoint is seen.
"""
