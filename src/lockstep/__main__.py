"""`python -m lockstep` is the same command as `lockstep`."""

import os

from lockstep.cli import main
from lockstep.tether import tie

if __name__ == "__main__":
    tie(os.environ)
    main()
