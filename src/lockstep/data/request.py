"""The section of a recipe that is passed to a dataset, and the keys that each dataset supports."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal, Self

FILES_SIZE: Final = 224  # default side length in pixels of images from files
NATIVE_SIZE: Final[Mapping[str, int]] = {"digits": 8, "cifar10": 32, "cifar100": 32, "mnist": 28, "fashion_mnist": 28}
# The options of `synthetic` with their defaults.
SYNTHETIC: Final[Mapping[str, int]] = {"samples": 4096, "validation_samples": 1024, "classes": 10, "channels": 3}
_FILE_DATASETS: Final = ("folder", "webdataset")
_SKIPPING_DATASET: Final = "chat"  # in addition to _FILE_DATASETS

OnError = Literal["raise", "skip"]


@dataclass(frozen=True)
class DataRequest:
    """The name, location and sample transforms of a dataset. The fields have the same names as in `recipe.data`."""

    name: str
    root: str = "data"
    download: bool = True
    on_error: OnError = "raise"
    options: Mapping[str, Any] = field(default_factory=dict)
    collate: str | None = None  # the import path of a function
    image_size: int | None = None
    resize_size: int | None = None
    resized_crop: bool = False
    resized_crop_scale: tuple[float, float] = (0.08, 1.0)
    exif: bool = True

    @property
    def changes_size(self) -> bool:
        """Whether the dataset crops or resizes its images, because the files can have different sizes."""
        return self.name in _FILE_DATASETS

    @property
    def location(self) -> dict[str, Any]:
        """The keys `root` and `download`, without those that have their default."""
        location = {"root": self.root, "download": self.download}
        return {key: value for key, value in location.items() if value != getattr(DataRequest, key)}

    def without_download(self) -> Self:
        """Return the request of a dataset that is already on this machine.

        The request of your own function stays the same, because `download` would be an argument of the function.
        """
        return self if ":" in self.name else replace(self, download=False)


def make_data_request(data: Mapping[str, Any]) -> DataRequest:
    """Create a request from the plain values of the section `recipe.data`. Missing keys get their defaults."""
    values = {key.name: data[key.name] for key in fields(DataRequest) if key.name in data}
    low, high = data["augment"]["resized_crop_scale"]
    return DataRequest(**values, resized_crop=data["augment"]["resized_crop"], resized_crop_scale=(low, high))


def find_unsupported_keys(request: DataRequest) -> Iterator[str]:
    """Yield an error for each key that the dataset doesn't support, and for each contradiction between keys."""
    if request.changes_size:
        yield from _find_contradictions(request)
        return
    name, file_datasets = request.name, " and ".join(_FILE_DATASETS)
    if request.image_size not in (None, NATIVE_SIZE.get(name)) and name != "synthetic":
        yield f"image_size: {request.image_size} is not supported, since {_explain_image_size(name)}; remove it"
    if request.resize_size is not None:
        yield f"resize_size: {request.resize_size} is only supported by the datasets {file_datasets}; remove it"
    if request.resized_crop:
        yield f"augment.resized_crop: true is only supported by the datasets {file_datasets}; remove it"
    if not request.exif:
        yield f"exif: false is only supported by the datasets {file_datasets}; remove it"
    if request.on_error == "skip" and name != _SKIPPING_DATASET:
        advice = ", and catch errors in your dataset" if ":" in name else ""
        yield (
            f"on_error: skip is only supported by the datasets {', '.join(_FILE_DATASETS)} and {_SKIPPING_DATASET}; "
            f"remove it{advice}"
        )


def _explain_image_size(name: str) -> str:
    if ":" in name:
        return "your function sets the size"
    native = NATIVE_SIZE.get(name)
    return f"the images are {native}x{native}" if native else "the dataset has no images"


def _find_contradictions(request: DataRequest) -> Iterator[str]:
    size, scale = request.image_size or FILES_SIZE, request.resized_crop_scale
    if request.resize_size is not None and request.resize_size < size:
        yield f"resize_size: {request.resize_size} is smaller than image_size={size}; use at least {size}"
    if not 0 < scale[0] <= scale[1] <= 1:
        yield (
            f"augment.resized_crop_scale: {list(scale)} is not a range of area fractions; "
            f"set [min, max] with 0 < min <= max <= 1, such as [0.08, 1.0]"
        )
