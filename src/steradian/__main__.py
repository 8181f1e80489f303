"""`python -m steradian` is the command line."""

from steradian.cli import main

if __name__ == "__main__":
    main()
