"""The table of options, with torchrun as the oracle."""

from __future__ import annotations

import pytest

from reknit.app.cli.options import OPTIONS


def test_what_torchrun_has_too_means_the_same() -> None:
    """A drop-in: no option is missing; same names, short forms, variables, kinds and defaults."""
    run = pytest.importorskip("torch.distributed.run")
    theirs = {a.option_strings[-1].lstrip("-").replace("_", "-"): a for a in run.get_args_parser()._actions[:-2]}
    ours = {option.name: option for option in OPTIONS}
    assert theirs.keys() <= ours.keys()
    for name in theirs.keys() & ours.keys() - {"help"}:
        option, action = ours[name], theirs[name]
        assert f"--{name}" in action.option_strings
        assert option.variable == f"PET_{action.dest.upper()}"
        assert (not option.short) == (not any(len(s) == 2 for s in action.option_strings))
        assert bool(option.metavar) == (action.nargs is None), "a flag there is a flag here"
        # 1:1; a literal "none"; None for 30; None for 29500; 0, which is no wish here.
        if name not in ("nnodes", "rdzv-id", "shutdown-timeout", "master-port", "node-rank"):
            assert option.default == str(action.default or "") or not option.metavar or action.default == 0
