"""Checks the user's code while a run starts, and warns if its results would depend on the placement.

The check runs the probe of `lockstep verify` (probe/probe.py) with a few samples. The probe changes random number
generators, global variables, and the state of models and datasets. Therefore, it runs in a separate process.
"""

import fcntl
import json
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
from torch import nn

from lockstep.common import plainfile
from lockstep.common.follow_parent import die_with_parent
from lockstep.device.fake_rank_env import remove_rank_variables
from lockstep.device.meta import build_on_meta
from lockstep.errors import LockstepError
from lockstep.models.find import OURS
from lockstep.probe.findings import NOT_DETERMINISTIC, make_findings
from lockstep.probe.probe import run_quick_probe
from lockstep.ranks.signals import get_stop_signals
from lockstep.reporting.verification import CodeFinding
from lockstep.setup.build import Setup
from lockstep.setup.user_code import get_import_paths

NOT_CHECKED: Final = "not checked"

_MAX_WAIT_S: Final = 10.0  # maximum time that a run waits for the check when it starts
_MAX_PARAMETERS: Final = 250_000_000  # maximum size of a model to check; the check holds several copies of it
_PLAIN_PACKAGES: Final = ("torch", "torchvision", "timm", "lockstep")
_PARAMETRIZATION_TYPE: Final = nn.utils.parametrize.ParametrizationList

GetFindings = Callable[[], list[CodeFinding]]


@contextmanager
def check_in_background(setup: Setup) -> Iterator[GetFindings]:
    """Check the model, the loss and the data in the background.

    Yields a function that waits for the faults and returns them. Models and datasets that are part of Lockstep aren't
    checked, and neither are models that consist of plain layers from known libraries, such as timm and torchvision. The
    check runs in a forked process, so enter this context manager before a process group exists.
    """
    if is_part_of_lockstep(setup):
        yield list
        return
    parameters = setup.summary.num_parameters
    if parameters > _MAX_PARAMETERS:
        yield lambda: [_make_unchecked_finding(f"the model has {parameters:,} parameters, more than the check copies")]
        return
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_check, args=(setup, sender), daemon=True)
    process.start()
    sender.close()
    try:
        yield lambda: _receive_findings(receiver)
    finally:
        process.kill()
        process.join()
        receiver.close()


def is_part_of_lockstep(setup: Setup) -> bool:
    """Return whether the model, the loss and the data are all part of Lockstep."""
    model = setup.recipe.model
    return not get_import_paths(setup.recipe) and model.name in OURS and model.source in ("auto", "lockstep")


def is_plain(model: nn.Module) -> bool:
    """Return whether all layers of a model are from known libraries and have no hooks, parametrizations or state.

    The running statistics of BatchNorm and InstanceNorm don't count as state, because Lockstep handles them. All other
    floating-point buffers that are saved in the state dict count as state. Buffers of any other kind are assumed to be
    constant tables. Both implementations of spectral_norm are excluded: one uses a hook, the other a parametrization.
    """
    return all(
        type(module).__module__.partition(".")[0] in _PLAIN_PACKAGES
        and not (module._forward_hooks or module._forward_pre_hooks or isinstance(module, _PARAMETRIZATION_TYPE))
        and (isinstance(module, nn.modules.batchnorm._NormBase) or not _keeps_state(module))
        for module in model.modules()
    )


def _keeps_state(module: nn.Module) -> bool:
    saved_names = module._buffers.keys() - module._non_persistent_buffers_set
    return any(buffer is not None and buffer.is_floating_point() for buffer in map(module._buffers.get, saved_names))


def _receive_findings(receiver: Connection) -> list[CodeFinding]:
    start = time.monotonic()
    try:
        if not receiver.poll(_MAX_WAIT_S):
            return [_make_unchecked_finding(f"it took more than {time.monotonic() - start:.0f} s")]
        answer = plainfile.parse_json(receiver.recv_bytes())
    except EOFError:
        return [_make_unchecked_finding("its process was killed")]
    if "failed" in answer:
        return [_make_unchecked_finding(answer["failed"])]
    return [CodeFinding(culprit, True, text) for culprit, text in answer["found"]]


def _make_unchecked_finding(reason: str) -> CodeFinding:
    text = (
        f"the check of model, loss and data for code that depends on the placement was stopped: {reason}; "
        f"run `lockstep verify`, which takes as long as it needs, or set run.probe=off to skip the check"
    )
    return CodeFinding(NOT_CHECKED, True, text)


def _run_check(setup: Setup, sender: Connection) -> None:
    """Run the check in a forked process."""
    die_with_parent()
    for number in get_stop_signals():  # the run handles signals, which the whole process group receives
        signal.signal(number, signal.SIG_IGN)
    _silence_output()
    _reopen_files()
    torch.set_num_threads(1)  # a fork doesn't copy the threads of a thread pool
    remove_rank_variables()
    answer: dict[str, Any]
    try:
        answer = {"found": [(finding.culprit, finding.text) for finding in _find_faults(setup)]}
    except LockstepError:  # the run itself reports the error
        answer = {"found": []}
    except Exception as error:  # user code may raise any exception
        answer = {"failed": f"{type(error).__name__}: {error}"}
    sender.send_bytes(json.dumps(answer).encode())


def _find_faults(setup: Setup) -> list[CodeFinding]:
    paths = get_import_paths(setup.recipe)
    forward = "model" in paths or "loss" in paths or not is_plain(build_on_meta(setup.build_blank))
    code_findings = make_findings(run_quick_probe(setup, check_samples="data" in paths, check_forward=forward))
    # Skip operations without a deterministic kernel, because torch raises an error for them during training.
    return [finding for finding in code_findings if finding.fault and finding.culprit != NOT_DETERMINISTIC]


def _silence_output() -> None:
    """Redirect stdout and stderr to /dev/null, because the run itself prints the same messages."""
    null_descriptor = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(null_descriptor, number)
    sys.stdout = sys.stderr = open(null_descriptor, "w", encoding="utf-8")  # noqa: SIM115


def _reopen_files() -> None:
    """Reopen regular files that are open for reading, so that this process doesn't share file offsets with the run."""
    with suppress(FileNotFoundError):  # not on Linux
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                _reopen_file(int(name))


def _reopen_file(descriptor: int) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode) or flags & os.O_ACCMODE != os.O_RDONLY:
        return
    new_descriptor = os.open(f"/proc/self/fd/{descriptor}", flags)
    os.lseek(new_descriptor, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
    os.dup2(new_descriptor, descriptor)
    os.close(new_descriptor)
