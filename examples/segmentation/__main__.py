"""``python -m examples.segmentation``."""

from examples.segmentation.main import main

if __name__ == "__main__":
    main()
