"""The `lockstep` command, also available as `python -m lockstep`."""

import os

from lockstep.common.collection import reduce_garbage_collection
from lockstep.common.hashing import fix_hash_seed
from lockstep.errors import EXIT_INTERRUPTED


def start() -> None:
    """Run the command with a fixed hash seed, unless PYTHONHASHSEED is set."""
    try:
        fix_hash_seed()
        reduce_garbage_collection()

        from lockstep.cli import main  # imported late, because fix_hash_seed may replace this process
        from lockstep.common.follow_parent import follow_srun

        follow_srun(os.environ)
    except KeyboardInterrupt:  # while importing, before a command can report it
        raise SystemExit(EXIT_INTERRUPTED) from None
    main()


if __name__ == "__main__":
    start()
