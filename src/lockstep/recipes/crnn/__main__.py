"""``python -m lockstep.recipes.crnn``."""

from lockstep.recipes.crnn.main import main

if __name__ == "__main__":
    main()
