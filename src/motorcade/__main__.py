"""`python -m motorcade` is `motorcade`."""

from motorcade.cli import main

if __name__ == "__main__":
    main()
