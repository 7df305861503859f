"""Which framework a configuration is of, and the recipe that it becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Final, final

from lockstep.config import write
from lockstep.config.document import Document, Place, dotted
from lockstep.config.elsewhere import distribuuuu, hugging_face, pycls, yacs
from lockstep.config.elsewhere.translation import Translated
from lockstep.config.load import Loaded, load_text, read
from lockstep.config.naming import drop_foreign
from lockstep.config.overrides import apply
from lockstep.errors import ConfigError, UsageError

_OURS: Final = ("recipe.", "placement.", "run.")


@final
@dataclass(frozen=True)
class Imported:
    """A configuration of the framework `of`, translated, with the overrides in our words that came with it."""

    of: str
    file: str
    translated: Translated

    @property
    def missing(self) -> list[str]:
        """The keys that a recipe needs, and a configuration of Accelerate or the Trainer does not have."""
        recipe = self.translated.values.get("recipe", {})
        return [f"recipe.{name}" for name in ("model", "data", "batch", "optimizer") if name not in recipe]

    def to_yaml(self) -> str:
        """Write it as a recipe, or as what it has of one."""
        missing = f" A recipe needs {', '.join(self.missing)}, too." if self.missing else ""
        return self.translated.to_yaml(f"From {self.file}, a configuration of {self.of}.{missing}")

    def loaded(self) -> Loaded:
        """Return the configuration; ConfigError as for any recipe."""
        name = FilePath(self.file).stem
        loaded = load_text(self.to_yaml(), f"{self.file}, as imported", name)
        return replace(loaded, notes=[*loaded.notes, *self.translated.remarks()])


def import_file(file: str, words: Sequence[str], gpus: int) -> Imported:
    """Translate a file with `words` behind it: pairs KEY VALUE of its framework, and our overrides a.b=value.

    `gpus` is the number of GPUs that it is meant for, where the file gives a batch for each and no number of them.
    """
    overrides = [word for word in words if word.startswith(_OURS) and "=" in word]
    given = yacs.read(read(file), [word for word in words if word not in overrides])
    typed = given.values
    if hugging_face.OF_ACCELERATE in typed:
        of, translated = hugging_face.ACCELERATE, hugging_face.accelerate(typed)
    elif any(key in typed for key in hugging_face.OF_TRAINER):
        of, translated = hugging_face.TRAINER, hugging_face.trainer(typed, gpus)
    elif "MODEL.TYPE" in typed:
        named = any(word.startswith("recipe.model") for word in overrides)
        settings = given.over(pycls.DEFAULTS, pycls.NAME)
        of, translated = pycls.NAME, pycls.translate(settings, typed, named)
    elif any(key in distribuuuu.DEFAULTS or key in distribuuuu.OLDER for key in typed):
        given = given.renamed(distribuuuu.OLDER)
        settings = given.over(distribuuuu.DEFAULTS, distribuuuu.NAME)
        of, translated = distribuuuu.NAME, distribuuuu.translate(settings, given.values, gpus)
    else:
        raise UsageError(
            f"{file}: its keys are not those of Distribuuuu, pycls, Accelerate or the Trainer; a recipe of ours is "
            f"given without --cfg: lockstep train {file}"
        )
    return Imported(of, file, _overridden(translated, overrides))


def _overridden(translated: Translated, overrides: Sequence[str]) -> Translated:
    """Return it with our overrides set, where a recipe is written out."""
    places = {path: Place(translated.origins[dotted(path)]) for path, _ in write.leaves(translated.values)}
    before = Document(translated.values, {(): Place(""), **places}, [])
    document = apply(before, overrides)
    if document.problems:
        raise ConfigError([str(each) for each in document.problems])
    dropped = drop_foreign(before, document)
    origins = {dotted(path): str(document.places[path]) for path, _ in write.leaves(document.values)}
    return replace(translated, values=document.values, origins=origins, notes=(*translated.notes, *dropped))
