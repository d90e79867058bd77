"""``python -m tests.ecosystem.alone program.py …``: the program as ``python program.py …`` runs it."""

import runpy
import sys

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
