"""Look at the machines of a job before it starts: what is wrong, and what to do about it.

::

    lockstep doctor  ──pipe or ssh──  hosted.py on each host  ──  the checks, in the order of its CHECKS
    visit.py                                                  ──  child.py: torch's own words, a job of two ranks

Findings are data (findings.py). A check looks at one machine and returns its findings; faults between machines
(between.py) are found by comparing their answers. torch is imported in processes of its own (torch_facts.py and
trial.py), which have a limit, and never in the launcher. ``lockstep doctor --env`` (environment.py) prints the facts
that a bug report needs, from the same source.
"""
