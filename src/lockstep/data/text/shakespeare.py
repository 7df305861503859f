"""The Tiny Shakespeare dataset with 1,115,394 characters, included in Lockstep. For credits, see SHAKESPEARE.md."""

import bz2
import hashlib
from pathlib import Path
from typing import Final

from lockstep.data.base import DataSet
from lockstep.data.request import DataRequest
from lockstep.data.text.files import Options, make_text_dataset, split_text
from lockstep.data.validation_split import get_validation_fraction
from lockstep.errors import DataError, TrainingError, convert_error

_FILE: Final = Path(__file__).with_name("shakespeare.txt.bz2")
_SHA256: Final = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def open_data(request: DataRequest, options: Options) -> DataSet:
    """Open the dataset. The options are the same as for the dataset `text`."""
    fraction = get_validation_fraction("shakespeare", options.validation)
    return make_text_dataset(request.name, *split_text(load_shakespeare().decode(), fraction), options)


def load_shakespeare(file: Path = _FILE) -> bytes:
    """Return the text as ASCII bytes. Raises TrainingError if `file` can't be read or contains a different text."""
    # bz2 raises ValueError for truncated data.
    with convert_error(TrainingError, (OSError, ValueError), str(file), "; reinstall Lockstep"):
        text = bz2.decompress(file.read_bytes())
    if (digest := hashlib.sha256(text).hexdigest()) != _SHA256:
        raise DataError(f"{file}: expected a text with sha256 {_SHA256}, got {digest}; reinstall Lockstep")
    return text
