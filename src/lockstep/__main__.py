"""`lockstep`, as a command and as `python -m lockstep`."""

import os

from lockstep.common.hashing import fix_hash_seed
from lockstep.errors import EXIT_INTERRUPTED


def start() -> None:
    """Run the command, with a fixed order of sets."""
    try:
        fix_hash_seed()

        from lockstep.cli import main  # only now: this process may have been another
        from lockstep.common.follow_parent import follow_srun

        follow_srun(os.environ)
    except KeyboardInterrupt:  # while this loads: there is no command yet that would report it
        raise SystemExit(EXIT_INTERRUPTED) from None
    main()


if __name__ == "__main__":
    start()
