"""``lockstep verify``: run a script on one rank and on several, compare what they train, and say why it differs.

``runs.py`` starts the runs; in each rank ``observed.py`` runs the script under ``observe.py``, which records the parts
of each step (``records.py``). The rest is arithmetic: ``compare.py`` measures and judges, ``reasons.py`` finds out why,
``report.py`` words the result. After each run ``putback.py`` undoes the script's changes to files. Runs that are not
verified import nothing of this room.
"""
