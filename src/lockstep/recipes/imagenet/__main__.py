"""``python -m lockstep.recipes.imagenet``."""

from lockstep.recipes.imagenet.main import main

if __name__ == "__main__":
    main()
