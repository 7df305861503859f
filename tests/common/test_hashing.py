"""The seed of Python's hashes: one for all that the command starts, and told as it is."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from lockstep.common import hashing

TOLD = """import os; os.environ['PYTHONHASHSEED'] = '42'
from lockstep.common.hashing import get_hash_seed; print(get_hash_seed())"""


@pytest.mark.parametrize(("given", "told"), [("", "random"), ("random", "random"), ("0", "0"), ("7", "7")])
def test_the_seed_is_told_as_the_process_began_with_it(given, told):
    environment = {**os.environ, "PYTHONHASHSEED": given}
    assert subprocess.check_output([sys.executable, "-c", TOLD], env=environment, text=True).strip() == told


@pytest.mark.parametrize(("given", "becomes"), [(None, True), ("", True), ("random", True), ("0", False), ("7", False)])
def test_the_command_becomes_one_with_a_fixed_seed_unless_it_has_one(monkeypatch, given, becomes):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if given is not None:
        monkeypatch.setenv("PYTHONHASHSEED", given)
    done = []
    monkeypatch.setattr(
        hashing, "os", SimpleNamespace(environ=os.environ, name="posix", execv=lambda *to: done.append(to))
    )
    hashing.fix_hash_seed()
    assert done == ([(sys.executable, [sys.executable, *sys.orig_argv[1:]])] if becomes else [])
    assert os.environ["PYTHONHASHSEED"] == ("0" if becomes else given)


def test_what_is_spawned_has_the_seed_that_it_is_given_and_this_process_its_own(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with hashing.set_hash_seed_for_children("7"):
        assert subprocess.check_output([sys.executable, "-c", TOLD], text=True).strip() == "7"
    assert "PYTHONHASHSEED" not in os.environ


def test_two_starts_of_the_command_go_through_a_set_in_one_order(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    code = (
        "import lockstep.cli, lockstep.__main__ as program\n"
        "lockstep.cli.main = lambda: print([*set('abcdefghijklmnopqrstuvwxyz')])\n"
        "program.start()\n"
    )
    one, other = (subprocess.check_output([sys.executable, "-c", code], text=True) for _ in range(2))
    assert one == other


def test_ranks_whose_sets_have_another_order_are_warned_of():
    assert hashing.make_hash_seed_warning([hashing.get_sample_hash(), hashing.get_sample_hash()]) == ""
    assert "or start the ranks with PYTHONHASHSEED=0, as lockstep launch does" in hashing.make_hash_seed_warning(
        [hashing.get_sample_hash(), "7"]
    )


def test_what_ssh_starts_on_another_host_has_a_fixed_seed(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    line = [sys.executable, "-m", "lockstep.common.follow_parent", sys.executable, "-c", TOLD]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as there:
        assert there.stdout.read().strip() == "0"


def test_a_resume_with_another_seed_is_told_how_to_keep_the_first():
    assert hashing.make_changed_seed_warning("0", "random").endswith("; to keep it, start with PYTHONHASHSEED=0")
    assert "was random when" in hashing.make_changed_seed_warning("random", "0")
    assert "to keep it" not in hashing.make_changed_seed_warning("random", "0")
