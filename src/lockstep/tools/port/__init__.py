"""Rewrites a script for lockstep: a diff that a person reads, and line by line what changed, what stays and why.

Note [How a script is ported]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The script is never run or imported, and neither is torch. Its text is parsed once, by libcst, whose tree keeps where
each token stands; names are resolved to what was imported (``script.py``). What an expression may hold is computed
without regard to order, through assignments, arguments, returns and attributes (``values.py``): the rank, the device, a
loader, a replica. Rules look at uses of such values and at calls of libraries by their full names, and record edits of
the text and remarks (``rules/``). All text outside of an edit stays as it is, byte for byte.

A rule changes only what is known to do the same on as many ranks as before. Where that is not known, the text stays, if
it means the same under lockstep, or the whole script is refused, if it does not: a script for another library refers to
an object that is gone once it is ported, so each of these references has a rule or is a reason to refuse.
"""
