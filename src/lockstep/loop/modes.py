"""The modes of a placed model's modules, training or evaluation, which checkpoints of a loop of the user's own keep."""

from collections.abc import Callable, Iterable, Sequence
from typing import final

from torch import nn

from lockstep.common.own_code import calling, refusal

__tracebackhide__ = True  # a test shows the user's line, which broke the contract, and not ours


@final
class Modes:
    """Saves and restores which modules of a model are in evaluation mode, by their names; the model itself is "".

    A resumed run restores them where the script stood at the save: right before its first step, since the script sets
    modes anywhere before that, or at the end of a loop over `run.steps` that was complete.
    """

    def __init__(self, model: nn.Module, placed: Sequence[str]) -> None:
        self._modules = dict(model.named_modules())
        names = [*self._modules]  # parents before their children
        self._sizes = [_subtree_size(names, place) for place in range(len(names))]
        self.placed = [*placed]  # the modules that were in evaluation mode when the script called run.place
        self._restored: frozenset[str] | None = None  # modes to restore
        self._saved: frozenset[str] | None = None  # modes of a save in this step
        self._saved_at = ""  # the line of that save
        self._changed_late: dict[str, bool] = {}  # modes that were set after that save

    def evaluating(self) -> list[str]:
        """Return the names of the modules in evaluation mode."""
        return evaluating(self._modules.items())

    def summary(self) -> str:
        """Return which modules are in evaluation mode, in words: of those within each other the outermost.

        It tells any two sets of modules apart.
        """
        resting = [not module.training for module in self._modules.values()]
        if not any(resting):
            return "none"
        names, found, place = [*self._modules], [], 0
        while place < len(names):
            name, size = names[place] or "the whole model", self._sizes[place]
            whole = all(resting[place : place + size])
            if resting[place]:
                found.append(name if whole else f"{names[place] or 'the model'} without its parts")
            place += size if whole else 1
        return ", ".join(found)

    def load(self, saved: Sequence[str] | None, placed: Sequence[str] | None, warn: Callable[[str], None]) -> None:
        """Take over the modes of a checkpoint; those of earlier versions have none."""
        if saved is None:
            return
        self._restored = frozenset(saved)
        if placed is not None and [*placed] != self.placed:
            warn(
                "run.place: modules of the model are in another mode than when the run began: the run keeps the modes "
                "that were saved, and the change has no effect; set modes within the loop, or choose another dir"
            )

    def note_save(self) -> None:
        """Note the modes that a checkpoint keeps."""
        self._saved = frozenset(self.evaluating())
        self._saved_at = calling()

    def restore(self) -> None:
        """Put modules into the modes of the checkpoint, once."""
        if self._restored is not None:
            for name, module in self._modules.items():
                module.training = name not in self._restored
            self._restored = None
        self._saved = None  # a save between two loops, after which a resumed script runs the same lines

    def end_step(self) -> None:
        """Note the modes that the script set in this step after it saved."""
        if self._saved is not None:
            changed = self._saved.symmetric_difference(self.evaluating())
            self._changed_late = {name: self._modules[name].training for name in changed}
            self._saved = None

    def check(self, step: int) -> None:
        """Raise UsageError if a mode that was set after a save is still in effect: a resumed run would not have it.

        A loop that sets its modes at the head of each step may change them after a save.
        """
        late, self._changed_late = self._changed_late, {}
        for name, training in late.items():
            if self._modules[name].training is training:
                raise refusal(
                    f"step {step}: {name or 'the model'} was put into {'training' if training else 'evaluation'} after "
                    f"run.save, so that a resumed run would leave it out",
                    "set modes first, and save then",
                    self._saved_at,
                )


def evaluating(modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """Return the names of the modules in evaluation mode."""
    return [name for name, module in modules if not module.training]


def _subtree_size(names: Sequence[str], place: int) -> int:
    """Return how many of these names, from a place, are those of a module and of what is within it."""
    prefix = f"{names[place]}." if names[place] else ""
    return 1 + next(
        (more for more, name in enumerate(names[place + 1 :]) if not name.startswith(prefix)), len(names) - place - 1
    )
