"""``python -m examples.gpt``."""

from examples.gpt.main import main

if __name__ == "__main__":
    main()
