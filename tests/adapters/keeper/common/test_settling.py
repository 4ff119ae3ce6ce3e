"""Descriptors that change places between two processes."""

from __future__ import annotations

import os

from reknit.adapters.keeper.common.settling import apart, descriptors
from tests.support.alone import run_alone


def test_descriptors_that_change_places_are_first_put_apart() -> None:
    """One `dup2` after the other would overwrite what the next one copies."""
    one, other = os.pipe()
    try:
        with apart({one: other, other: one, 99: one}) as numbers:
            inodes = {number: os.fstat(fd).st_ino for number, fd in numbers.items()}
            assert inodes == {number: os.fstat(fd).st_ino for number, fd in {one: other, other: one, 99: one}.items()}
            assert numbers[other] > 99, "above all numbers of the new process"
            moved = {*numbers.values()} - {one, other}
        assert not moved & descriptors(), "they are closed at the end"
    finally:
        os.close(one)
        os.close(other)


def test_a_forked_process_settles_as_one_that_was_started() -> None:
    """Its environment, its group and its descriptors, and no others."""
    script = """
        import os
        from reknit.adapters.keeper.common.settling import descriptors, settle
        read_end, write_end = os.pipe()
        foreign = os.open("/dev/null", os.O_RDONLY)
        if os.fork() == 0:
            settle({"ONLY": "this"}, {1: write_end, 50: write_end}, -1, {read_end, write_end, foreign})
            print(dict(os.environ), os.getpgid(0) == os.getpid(), sorted(descriptors()), flush=True)
            os._exit(0)
        os.wait()
        os.write(1, os.read(read_end, 1000))
    """
    assert run_alone(script) == "{'ONLY': 'this'} True [0, 1, 2, 50]\n"
