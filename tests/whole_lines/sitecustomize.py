"""What each Python of a lesson begins with in the tests: a line and its end are written at once.

torchrun starts its ranks with -u, which writes them apart, so that lines of two ranks mix.
"""

import io
import sys

if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
