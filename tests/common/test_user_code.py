"""Whose error an error is, and what is told of the user's."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.data import DistributedSampler

import lockstep
from lockstep.common.user_code import (
    UserCode,
    convert_user_error,
    describe_code_between,
    describe_error,
    find_source_line,
    is_user_code,
)
from lockstep.core.tree import sum_pieces
from lockstep.errors import TrainingError, UserCodeError
from lockstep.parallel.pipeline.stage import _run_backward

HERE = r"\S*test_user_code\.py:\d+"


def test_files_that_are_the_users() -> None:
    assert is_user_code(__file__)
    assert is_user_code("nets.py")
    for file in (
        lockstep.__file__,
        torch.__file__,
        pytest.__file__,
        Path(torch.__file__).parent / "nn/modules/conv.py",
        Path(sys.executable).with_name("lockstep"),
    ):
        assert not is_user_code(str(file))
    for file in ("<string>", "<frozen importlib._bootstrap>", Path.__module__ and sys.modules["pathlib"].__file__):
        assert not is_user_code(str(file))


def test_a_checkout_of_torch_is_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("timm")
    module.__file__ = "/home/you/timm/timm/__init__.py"
    monkeypatch.setitem(sys.modules, "timm", module)
    assert not is_user_code("/home/you/timm/timm/models/vit.py")
    assert is_user_code("/home/you/timm/mine/vit.py")


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(0), StopIteration("x"), BaseException("x")])
def test_whatever_is_raised_becomes_one_error(error: BaseException) -> None:
    told = rf"^model m: {type(error).__name__}: \w \({HERE}\); fix it there$"
    with pytest.raises(UserCodeError, match=told) as caught, UserCode("model m"):
        _raise(error)
    assert caught.value.__cause__ is error
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("error", [TrainingError("x"), KeyboardInterrupt()])
def test_errors_meant_for_the_user_and_interrupts_pass(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, UserCode("model m"):
        raise error
    assert caught.value is error


def test_what_lockstep_raises_in_shared_code_passes() -> None:
    with pytest.raises(KeyError), UserCode("model m", shared=True):
        sum_pieces({}, 1, max)
    with pytest.raises(UserCodeError), UserCode("model m"):
        sum_pieces({}, 1, max)


def test_what_torch_raises_in_shared_code_is_the_models() -> None:
    told = r"^model m: RuntimeError: (addmm: )?mat1 and mat2 shapes cannot be multiplied"
    with pytest.raises(UserCodeError, match=told), UserCode("model m", shared=True):
        torch.nn.Sequential(torch.nn.Linear(2, 3))(torch.zeros(1, 4))


def test_what_autograd_raises_is_the_models_also_where_lockstep_runs_it() -> None:
    weight = torch.ones(2, requires_grad=True)
    outputs = weight.exp()
    edge = torch.autograd.graph.get_gradient_edge(outputs)
    outputs.detach().zero_()
    told = r"^model m: RuntimeError: one of the variables needed for gradient"
    with pytest.raises(UserCodeError, match=told), UserCode("model m", shared=True):
        _run_backward([(edge, torch.ones(2))])


def test_an_error_that_passed_no_guard_is_told_by_its_frames() -> None:
    with pytest.raises(ZeroDivisionError) as own:
        _raise(ZeroDivisionError("x"))
    found = convert_user_error(own.value)
    assert str(found).startswith("ZeroDivisionError: x (")
    with pytest.raises(KeyError) as ours:
        sum_pieces({}, 1, max)
    assert convert_user_error(ours.value) is None


def test_what_is_left_of_ddp_is_told_how_to_go() -> None:
    with pytest.raises(ValueError, match="process group") as caught:
        DistributedSampler([0])
    assert "(" in str(found := convert_user_error(caught.value))
    assert str(found).endswith("; Lockstep distributes the work")


def test_the_place_of_bad_syntax_is_in_its_file(tmp_path: Path) -> None:
    with pytest.raises(SyntaxError) as caught:
        compile("x = (", str(tmp_path / "nets.py"), "exec")
    assert find_source_line(caught.value) == f"{tmp_path}/nets.py:1"
    assert describe_error(caught.value) == f"SyntaxError: '(' was never closed ({tmp_path}/nets.py:1); fix it there"


def _raise(error: BaseException) -> None:
    raise error


def test_two_lines_are_named_in_the_order_in_which_they_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = ["for step in steps:", "    step.backward()", "    clip()", "    log()", "    step.update()", "    a()"]
    (tmp_path / "loop.py").write_text("\n".join([*code, "    b()", "run.save()", ""]))
    file = str(tmp_path / "loop.py")
    assert describe_code_between((file, 2), (file, 5)) == "between loop.py:2 and loop.py:5"
    assert describe_code_between((file, 4), (file, 6)) == "loop.py:5"
    assert describe_code_between((file, 5), (file, 2)) == "from loop.py:5 to line 2 of the next iteration"
    assert describe_code_between((file, 5), (file, 5)) == "since loop.py:5"
    assert describe_code_between((file, 8), (file, 2)) == "after loop.py:8 and before line 2"  # of two functions
    assert describe_code_between((file, 5), (f"{file}x", 2)) == "between loop.py:5 and loop.pyx:2"
