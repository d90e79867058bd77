"""``python -m examples.imagenet``."""

from examples.imagenet.main import main

if __name__ == "__main__":
    main()
