"""``python -m tfcluster`` is the ``tfcluster`` command."""

from tfcluster.cli import main

if __name__ == "__main__":
    main()
