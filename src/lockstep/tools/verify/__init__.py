"""``lockstep verify``: run a script on one rank and on several, compare what they train, and say why it differs.

``runs.py`` starts the runs; in each rank ``observed.py`` runs the script under ``observe.py``, which writes down
(``records.py``) what each step was made of. The rest is arithmetic: ``compare.py`` measures and judges, ``reasons.py``
finds out why, ``report.py`` says it. After each run ``putback.py`` undoes what the script has written. Runs that are
not verified import nothing of this room.
"""
