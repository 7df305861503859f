"""The command line of scripts that generate pages."""

import argparse
from collections.abc import Sequence


def parse_check(description: str | None, arguments: Sequence[str] | None = None) -> bool:
    """Parse `arguments`, by default those of the process. Return whether `--check` is one of them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is not up to date")
    return bool(parser.parse_args(arguments).check)
