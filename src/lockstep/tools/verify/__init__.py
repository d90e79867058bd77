"""``lockstep verify``: run a script on one rank and on several, compare what they train, and say why it differs.

``runs.py`` starts the runs; in each rank ``observed.py`` runs the script under ``observe.py``, which writes down
(``records.py``) what each step was made of. From there on all is arithmetic: ``compare.py`` measures and judges,
``reasons.py`` finds out why, ``report.py`` says it. What the script writes, ``putback.py`` undoes after each run. Runs
that are not verified import nothing of this room.
"""
