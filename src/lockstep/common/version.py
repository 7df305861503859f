"""The version of this package, and where it lies."""

from pathlib import Path
from typing import Final

__version__ = "0.1.0"
PACKAGE: Final = Path(__file__).parent.parent
