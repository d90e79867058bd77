"""``python -m examples.crnn``."""

from examples.crnn.main import main

if __name__ == "__main__":
    main()
