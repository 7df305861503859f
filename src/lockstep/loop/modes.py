"""Saves the training or evaluation mode of each module in the checkpoints of a custom loop."""

from collections.abc import Callable, Iterable, Sequence
from typing import final

from torch import nn

from lockstep.common.user_code import find_calling_line, make_refusal

__tracebackhide__ = True  # let pytest hide these frames, so that it shows the line of user code


@final
class ModuleModes:
    """Saves and restores which modules are in evaluation mode, by name. The name of the model itself is "".

    A resumed run restores the modes right before its first step, because the script may set modes anywhere before this
    step. If no step is left, the run restores the modes at the end of the loop over `run.steps`.
    """

    def __init__(self, model: nn.Module, initial_names: Sequence[str]) -> None:
        self._modules = dict(model.named_modules())
        names = [*self._modules]  # parents before their children
        self._subtree_sizes = [_count_subtree_modules(names, index) for index in range(len(names))]
        # Names of the modules that were in evaluation mode when the script called run.place.
        self.initial_names = [*initial_names]
        # Names of the modules to set to evaluation mode at the first step.
        self._modules_to_set_eval: frozenset[str] | None = None
        self._saved: frozenset[str] | None = None  # names of the modules in evaluation mode at the save in this step
        self._saved_at = ""  # the line of the save
        self._late_changes: dict[str, bool] = {}  # `training` of each module whose mode was set after the save

    def list_eval_module_names(self) -> list[str]:
        """Return the names of the modules in evaluation mode."""
        return list_eval_module_names(self._modules.items())

    def summarize(self) -> str:
        """Return a string that identifies which modules are in evaluation mode, to compare it across ranks.

        If a module and all of its submodules are in evaluation mode, the string only contains the name of the module.
        """
        in_evaluation = [not module.training for module in self._modules.values()]
        if not any(in_evaluation):
            return "none"
        names, descriptions, index = [*self._modules], [], 0
        while index < len(names):
            name, size = names[index] or "the whole model", self._subtree_sizes[index]
            is_whole = all(in_evaluation[index : index + size])
            if in_evaluation[index]:
                descriptions.append(name if is_whole else f"{names[index] or 'the model'} without its submodules")
            index += size if is_whole else 1
        return ", ".join(descriptions)

    def load(
        self, saved_names: Sequence[str] | None, saved_initial_names: Sequence[str] | None, warn: Callable[[str], None]
    ) -> None:
        """Load the names of the modules that were in evaluation mode at the save, and at `run.place`.

        Both are None if the checkpoint was saved by an earlier Lockstep version.
        """
        if saved_names is None:
            return
        self._modules_to_set_eval = frozenset(saved_names)
        if saved_initial_names is not None and [*saved_initial_names] != self.initial_names:
            warn(
                "run.place: modules of the model are in a different mode than at the start of the run, but the run "
                "keeps the saved modes; set modes within the loop, or choose a different dir"
            )

    def record_save(self) -> None:
        """Record the modes that a checkpoint saves now."""
        self._saved = frozenset(self.list_eval_module_names())
        self._saved_at = find_calling_line()

    def restore(self) -> None:
        """Set the modules to the modes of the checkpoint. Only the first call after `load` changes the modes."""
        if self._modules_to_set_eval is not None:
            for name, module in self._modules.items():
                module.training = name not in self._modules_to_set_eval
            self._modules_to_set_eval = None
        self._saved = None  # after a save between two loops, a resumed script runs the lines after the save again

    def end_step(self) -> None:
        """If the script saved in this step, record the modes that it set after the save."""
        if self._saved is not None:
            changed_names = self._saved.symmetric_difference(self.list_eval_module_names())
            self._late_changes = {name: self._modules[name].training for name in changed_names}
            self._saved = None

    def check_late_changes(self, step: int) -> None:
        """Raise UsageError if a mode set after a save is still in effect, because a resumed run would lose it.

        The check runs at the first forward pass of a step, so a loop that sets its modes at the start of each step
        passes.
        """
        late_changes, self._late_changes = self._late_changes, {}
        for name, training in late_changes.items():
            if self._modules[name].training is training:
                raise make_refusal(
                    f"step {step}: {name or 'the model'} was switched to {'training' if training else 'evaluation'} "
                    f"mode after run.save, so a resumed run would lose the change",
                    "set modes before run.save",
                    self._saved_at,
                )


def list_eval_module_names(modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """Return the names of the modules in evaluation mode."""
    return [name for name, module in modules if not module.training]


def _count_subtree_modules(names: Sequence[str], index: int) -> int:
    """Return the number of modules in the subtree at position `index`, including its root."""
    prefix = f"{names[index]}." if names[index] else ""
    return 1 + next(
        (offset for offset, name in enumerate(names[index + 1 :]) if not name.startswith(prefix)),
        len(names) - index - 1,
    )
