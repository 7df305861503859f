"""`python -m lockstep` is the same command as `lockstep`."""

from lockstep.cli import main

if __name__ == "__main__":
    main()
