"""``python -m lockstep``: the ``lockstep`` command."""

from lockstep.cli import main

if __name__ == "__main__":
    main(prog_name="lockstep")
