"""Schedulers that have an interface of their own in Python: each file needs what it is named after."""
