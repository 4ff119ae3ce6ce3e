"""The command line as text: torchrun's names, spellings, variables and precedence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reknit.app.cli.arguments import Parsed, help_text, parse
from reknit.app.cli.options import OPTIONS, Option, UsageError

VALUED = [option for option in OPTIONS if option.metavar]
FLAGS = [option for option in OPTIONS if not option.metavar]


def some_text(option: Option) -> str:
    """A value that the option takes and that is not its default."""
    for text in ("v", "2", "SIGUSR1", "inherit", "never", "json"):
        try:
            if option.read(text) != option.read(option.default):
                return text
        except ValueError:
            continue
    raise AssertionError(option.name)


def ask(*argv: str, **environ: str) -> Parsed:
    return parse(argv, environ)


def refused(*argv: str, **environ: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse(argv, environ)
    return str(caught.value)


# ---- spellings ----


@pytest.mark.parametrize("option", VALUED, ids=lambda option: option.name)
def test_every_spelling_of_a_value(option: Option) -> None:
    """People copy their torchrun lines: dashes, underscores, with = or without."""
    name, text = option.name, some_text(option)
    value = option.read(text)
    for spelling in {f"--{name}", f"--{name.replace('-', '_')}"}:
        for words in ((f"{spelling}={text}",), *([] if option.bare else [(spelling, text)])):
            assert (ask(*words, "s")[name], ask(*words, "s").texts[name]) == (value, text)
    if short := option.short:
        for words in ((f"-{short}", text), (f"-{short}{text}",), (f"-{short}={text}",)):
            assert ask(*words, "s")[name] == value


@pytest.mark.parametrize("option", FLAGS, ids=lambda option: option.name)
def test_every_spelling_of_a_flag(option: Option) -> None:
    """A flag takes no value, and the word after it is the script."""
    name = option.name
    for spelling in {f"--{name}", f"--{name.replace('-', '_')}"}:
        parsed = ask(spelling, "s")
        assert (parsed[name], parsed.script) == (True, "s")
        assert refused(f"{spelling}=1", "s") == f"--{name} takes no value"


def test_a_value_may_hold_anything() -> None:
    """Only the first = belongs to us, and a value may look like an option: it was asked for."""
    assert ask("--rdzv-id=a=b", "s")["rdzv-id"] == "a=b"
    assert ask("--role", "-x", "s")["role"] == "-x"
    assert refused("--max-restarts", "-1", "s") == "--max-restarts=-1: must be at least 0"
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
    name, variable, text = option.name, option.variable, some_text(option)
    default = option.read(option.default)
    assert ask("s", **{variable: text})[name] == option.read(text)
    if not option.bare:  # its default cannot be typed
        assert ask(f"--{name}={option.default}", "s", **{variable: text})[name] == default
    assert ask("s")[name] == default


@pytest.mark.parametrize(
    ("value", "is_set"),
    [
        ("1", True),
        ("true", True),
        ("True", True),
        ("YES", True),
        ("on", True),
        ("2", True),
        ("00", False),
        ("0", False),
        ("false", False),
        ("no", False),
        ("", False),
    ],
)
def test_a_flag_from_the_environment(value: str, is_set: bool) -> None:
    """PET_STANDALONE=true crashes torchrun; here it means what it says."""
    assert ask("s", PET_STANDALONE=value)["standalone"] is is_set


def test_a_flag_variable_that_means_nothing_is_named() -> None:
    """A typing error in a job's template must not pass as either."""
    assert refused("s", PET_NO_PYTHON="maybe") == "PET_NO_PYTHON=maybe: 0 or 1 expected"


@pytest.mark.parametrize(
    ("value", "warm"), [("1", True), ("true", True), ("0", False), ("", False), ("torch,numpy", ("torch", "numpy"))]
)
def test_an_option_with_and_without_a_value_is_both_in_the_environment(value: str, warm: object) -> None:
    """A flag, or what it names."""
    assert ask("s", PET_WARM=value)["warm"] == warm


def test_help_is_asked_for_by_hand() -> None:
    """A stray PET_HELP must not keep jobs from running."""
    assert ask("s", PET_HELP="1")["help"] is False
    assert ask("-h")["help"] is True
    assert ask("--help-all", PET_MAX_RESTARTS="x")["help-all"] is True, "a wrong variable keeps nobody from the help"


def test_variables_of_no_option_are_named() -> None:
    """`PET_NPROC=8` starts one worker, and nobody would see why."""
    assert ask("s", PET_NPROC="8", PET_EMPTY="").notices == ("PET_NPROC: without effect, there is no option --nproc",)


# ---- what is wrong ----


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--nproc-per-nodes=2", "s"], "unknown option --nproc-per-nodes; did you mean --nproc-per-node?"),
        (["--maxrestarts", "2"], "unknown option --maxrestarts; did you mean --max-restarts?"),
        (["--print-completion", "bash"], "unknown option --print-completion: torchrun has it, reknit does not"),
        (["--master=h"], "option --master may be --master-addr or --master-port"),
        (["--qqqqqqqqqqq"], "unknown option --qqqqqqqqqqq; see reknit run --help"),
        (["-x"], "unknown option -x"),
        (["-mv", "s"], "unknown option -mv"),
        (["--role"], "--role needs a value: --role=NAME"),
        (["-t"], "--tee needs a value: --tee=N"),
        (["--warm=", "s"], "--warm= names nothing: --warm=MODULE,…, or --warm alone"),
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


# ---- prefixes ----


def test_a_prefix_that_only_one_option_has() -> None:
    """torchrun's parser takes prefixes, and people use them; two spellings of one option are not two options."""
    assert ask("--nproc=2", "s")["nproc-per-node"] == 2
    assert ask("--nproc_per=2", "s")["nproc-per-node"] == 2
    assert ask("--max-r", "3", "s")["max-restarts"] == {"max_restarts": 3}
    assert ask("--role=a", "s")["role"] == "a", "a whole name is never a prefix of another"


def test_the_scripts_words_are_not_judged() -> None:
    """`--n` would be ambiguous among our options. torchrun refuses this line on Python 3.11."""
    assert ask("s.py", "--n", "3", "--max_restarts").args == ("--n", "3", "--max_restarts")


# ---- what has no meaning here ----


@pytest.mark.parametrize("option", [option for option in OPTIONS if option.no_effect], ids=lambda option: option.name)
def test_what_has_no_meaning_here_is_accepted_with_one_line(option: Option) -> None:
    """No option of torchrun ends a job that does not need it; and nobody waits in vain for its effect."""
    words = f"--{option.name}={option.default}" if option.metavar else f"--{option.name}"
    assert ask(words, "s").notices == (f"--{option.name}: without effect: {option.no_effect}",)
    variable = {option.variable: option.default or "1"}
    assert ask("s", **variable).notices == (f"{option.variable}: without effect: {option.no_effect}",)
    assert ask("s").notices == ()


@pytest.mark.parametrize(
    "words",
    [
        "--start-method=fork",
        "--event-log-handler=console",
        "--logs-specs=default",
        "--numa-binding=node",
        "--use-env",
        "--use_env",
        "--run-path",
        "--duplicate-stdout-filters=a,b",
        "--monitor-interval=5",
    ],
)
def test_a_job_of_torchrun_is_not_refused(words: str) -> None:
    """Command lines are copied with all that somebody once put into them."""
    assert ask(words, "s").script == "s"


def test_a_flag_that_is_off_changes_nothing() -> None:
    """Templates of job managers write out every variable."""
    assert ask("s", PET_RUN_PATH="0", PET_VIRTUAL_LOCAL_RANK="0").notices == ()


# ---- the help text ----


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")


def test_the_help_text_fits_one_screen() -> None:
    """What most people need, at one look; every option that it leaves out is in the other text."""
    lines = help_text().splitlines()
    assert len(lines) <= 40
    assert all(len(line) <= 80 for line in lines)
    assert "--help-all" in help_text()


def test_the_whole_help_text_names_every_option() -> None:
    """It is made from the table, so that it cannot lie."""
    text = " ".join(help_text(shows_all=True).split())
    for option in OPTIONS:
        assert f"--{option.name}" in text
        assert option.help in text
        assert option.default in text


def test_the_help_text_has_the_many_under_a_heading_of_their_own() -> None:
    """Who runs one node need not read how several meet."""
    one, _, many = help_text(shows_all=True).partition("Several nodes:")
    for option in OPTIONS:
        if option.only_for_many:
            assert f"--{option.name} {option.metavar}" in many, option.name
            assert f"--{option.name} {option.metavar}" not in one, option.name
