"""`python -m coremill` is the same as the `coremill` command."""

from coremill.cli import main

if __name__ == "__main__":
    main()
