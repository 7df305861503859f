"""`python -m lockstep` is the same command as `lockstep`."""

import os

from lockstep.cli import main
from lockstep.follow_parent import follow_srun

if __name__ == "__main__":
    follow_srun(os.environ)
    main()
