"""The version and the folder of this package."""

from pathlib import Path
from typing import Final

__version__ = "0.2.0"
PACKAGE: Final = Path(__file__).parent.parent
