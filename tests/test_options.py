"""The command line as text: torchrun's names, spellings, variables and precedence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reknit.app.options import OPTIONS, Option, Parsed, UsageError, help_text, parse

VALUED = [option for option in OPTIONS if option.metavar]
FLAGS = [option for option in OPTIONS if not option.metavar]

MISSING = {
    # Function workers, logs and placement: not there yet.
    "start-method", "event-log-handler", "run-path", "duplicate-stdout-filters", "duplicate-stderr-filters",
    "logs-specs", "numa-binding", "virtual-local-rank",
}  # fmt: skip
"""torchrun's options that a user misses here. One that is added goes from this list."""


def ask(*argv: str, **environ: str) -> Parsed:
    return parse(argv, environ)


def refused(*argv: str, **environ: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse(argv, environ)
    return str(caught.value)


# ---- torchrun is the oracle ----


def test_what_torchrun_has_too_means_the_same() -> None:
    """A drop-in: same names, same short forms, same variables, same kind, same defaults."""
    run = pytest.importorskip("torch.distributed.run")
    theirs = {a.option_strings[-1].lstrip("-").replace("_", "-"): a for a in run.get_args_parser()._actions[:-2]}
    ours = {option.name: option for option in OPTIONS}
    assert theirs.keys() - ours.keys() == MISSING
    for name in theirs.keys() & ours.keys() - {"help"}:
        option, action = ours[name], theirs[name]
        assert f"--{name}" in action.option_strings
        assert option.variable == f"PET_{action.dest.upper()}"
        assert (not option.short) == (not any(len(s) == 2 for s in action.option_strings))
        assert bool(option.metavar) == (action.nargs is None), "a flag there is a flag here"
        # 1:1; a literal "none"; None for 30; None for 29500; 0, which is no wish here.
        if name not in ("nnodes", "rdzv-id", "shutdown-timeout", "master-port", "node-rank"):
            assert option.default == str("" if action.default is None else action.default) or not option.metavar


# ---- spellings ----


@pytest.mark.parametrize("option", VALUED, ids=lambda option: option.name)
def test_every_spelling_of_a_value(option: Option) -> None:
    """People copy their torchrun lines: dashes, underscores, with = or without."""
    name = option.name
    for spelling in {f"--{name}", f"--{name.replace('-', '_')}"}:
        assert ask(f"{spelling}=v", "s")[name] == "v"
        assert ask(spelling, "v", "s")[name] == "v"
    if short := option.short:
        for words in ((f"-{short}", "v"), (f"-{short}v",), (f"-{short}=v",)):
            assert ask(*words, "s")[name] == "v"


@pytest.mark.parametrize("option", FLAGS, ids=lambda option: option.name)
def test_every_spelling_of_a_flag(option: Option) -> None:
    """A flag takes no value, and the word after it is the script."""
    name = option.name
    for spelling in {f"--{name}", f"--{name.replace('-', '_')}"}:
        parsed = ask(spelling, "s")
        assert (parsed[name], parsed.script) == ("1", "s")
        assert refused(f"{spelling}=1", "s") == f"--{name} takes no value"


def test_a_value_may_hold_anything() -> None:
    """Only the first = belongs to us, and a value may look like an option: it was asked for."""
    assert ask("--rdzv-id=a=b", "s")["rdzv-id"] == "a=b"
    assert ask("--role", "-x", "s")["role"] == "-x"
    assert ask("--max-restarts", "-1", "s")["max-restarts"] == "-1", "judged later, by name"
    assert ask("--role=", "s")["role"] == ""


def test_the_last_one_wins() -> None:
    """Scripts append their own options to a default line."""
    assert ask("--role=a", "--role=b", "s")["role"] == "b"


# ---- where our options end ----


def test_everything_after_the_script_is_the_scripts() -> None:
    """The script's own --role must not become ours."""
    parsed = ask("--role=a", "s.py", "--role=b", "--", "-h")
    assert (parsed["role"], parsed.script, parsed.args) == ("a", "s.py", ("--role=b", "--", "-h"))


def test_two_dashes_end_our_options() -> None:
    """For a script whose name starts with a dash; and a lone dash is no option at all."""
    assert ask("--", "-s.py", "--").script == "-s.py"
    assert ask("--", "-s.py", "--").args == ("--",)
    assert ask("-", "a").script == "-"
    assert ask("--").script == ask().script == ""


# ---- variables ----


@pytest.mark.parametrize("option", VALUED, ids=lambda option: option.name)
def test_a_default_comes_from_the_environment(option: Option) -> None:
    """Cluster operators set PET_ variables; the command line beats them, they beat the table."""
    name, variable = option.name, option.variable
    assert ask("s", **{variable: "e"})[name] == "e"
    assert ask(f"--{name}=c", "s", **{variable: "e"})[name] == "c"
    assert ask("s")[name] == option.default


@pytest.mark.parametrize(
    ("value", "is_set"),
    [
        ("1", "1"),
        ("true", "1"),
        ("True", "1"),
        ("YES", "1"),
        ("on", "1"),
        ("0", ""),
        ("false", ""),
        ("no", ""),
        ("", ""),
    ],
)
def test_a_flag_from_the_environment(value: str, is_set: str) -> None:
    """PET_STANDALONE=true crashes torchrun; here it means what it says."""
    assert ask("s", PET_STANDALONE=value)["standalone"] == is_set


def test_a_flag_variable_that_means_nothing_is_named() -> None:
    """A typing error in a job's template must not pass as either."""
    assert refused("s", PET_NO_PYTHON="maybe") == "PET_NO_PYTHON=maybe: 0 or 1 expected"


def test_help_is_asked_for_by_hand() -> None:
    """A stray PET_HELP must not keep jobs from running."""
    assert ask("s", PET_HELP="1")["help"] == ""
    assert ask("-h")["help"] == "1"


def test_variables_of_no_option_are_named() -> None:
    """`PET_NPROC=8` starts one worker, and nobody would see why."""
    assert ask("s", PET_NPROC="8", PET_EMPTY="").notices == ("PET_NPROC: without effect, there is no option --nproc",)
    assert refused("s", PET_NUMA_BINDING="node") == "PET_NUMA_BINDING: torchrun has it, reknit does not"


# ---- what is wrong ----


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--nproc-per-nod=2", "s"], "unknown option --nproc-per-nod; did you mean --nproc-per-node?"),
        (["--max_restart", "2"], "unknown option --max_restart; did you mean --max-restarts?"),
        (["--qqqqqqqqqqq"], "unknown option --qqqqqqqqqqq; see reknit run --help"),
        (["-x"], "unknown option -x"),
        (["-mv", "s"], "unknown option -mv"),
        (["--role"], "--role needs a value: --role=NAME"),
        (["-t"], "--tee needs a value: --tee=N"),
        (["--=x"], "unknown option --"),
    ],
)
def test_a_wrong_option_is_named(argv: list[str], message: str) -> None:
    """One line that says which word is wrong, and if possible which was meant."""
    assert refused(*argv).startswith(message)


@given(st.lists(st.text(max_size=12) | st.sampled_from([f"--{o.name}" for o in OPTIONS] + ["--", "-m", "-r3"])))
def test_whatever_is_typed_is_parsed_or_refused(argv: list[str]) -> None:
    """No word makes the parser itself fail, and no word of the script's is lost."""
    try:
        parsed = parse(argv, {})
    except UsageError:
        return
    assert [parsed.script, *parsed.args] == argv[len(argv) - len(parsed.args) - 1 :] or not parsed.script


def test_the_help_text_names_every_option() -> None:
    """It is made from the table, so that it cannot lie."""
    text = help_text()
    for option in OPTIONS:
        assert f"--{option.name}" in text
        assert option.help in text
    assert all(len(line) <= 140 for line in text.splitlines())


def test_the_help_text_has_the_many_under_a_heading_of_their_own() -> None:
    """Who runs one node need not read how several meet."""
    one, _, many = help_text().partition("For several nodes")
    for option in OPTIONS:
        assert f"--{option.name}\n" in (many if option.only_for_many else one).replace("=", "\n"), option.name
