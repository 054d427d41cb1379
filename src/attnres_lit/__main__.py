"""`python -m attnres_lit`."""

from attnres_lit.cli import main

if __name__ == "__main__":
    main()
