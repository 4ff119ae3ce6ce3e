"""From the command line to `Settings`: every mistake in one sentence that names the option or the file."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reknit.app.cli.arguments import parse
from reknit.app.cli.options import OPTIONS, UsageError
from reknit.app.cli.parsing import Asked, asked
from reknit.app.settings import Settings
from tests.support.command import refusal, run


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "s.py"
    path.write_text("import os; os.write(1, b'ran\\n')")
    return path


def ask(*argv: str, **environ: str) -> Asked:
    return asked(parse(argv if "s.py" in argv else (*argv, "s.py"), environ), environ)


def config(*argv: str, **environ: str) -> Settings:
    return ask(*argv, **environ).settings


def notices(*argv: str, **environ: str) -> tuple[str, ...]:
    return ask(*argv, **environ).notices


def refused(*argv: str, **environ: str) -> str:
    with pytest.raises(UsageError) as caught:
        config(*argv, **environ)
    return str(caught.value)


# ---- what is meant ----


def test_the_defaults() -> None:
    """A script and nothing else: one worker, no restart, torchrun's numbers."""
    found = config()
    assert found.command == (sys.executable, "-u", "s.py")
    assert (found.local_world_size, found.role, found.grace_s) == (1, "default", 30.0)
    assert found.terms.restarts.max_restarts == 0
    assert (found.terms.min_nodes, found.terms.max_nodes) == (1, 1)
    assert found.signals == (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    assert found.log_dir == ""
    assert (found.streams.redirects, found.streams.tee, found.streams.shown) == (0, 0, frozenset())
    assert len(found.run_id) == 16
    assert found.run_id != config().run_id, "unnamed jobs have different names, unlike torchrun's `none`"


def test_each_way_to_name_the_program() -> None:
    """docs/torchelastic.md#command: Python and the script, a module, or the thing itself."""
    assert config("s.py", "-x", "1").command == (sys.executable, "-u", "s.py", "-x", "1")
    assert config("-m", "a.b", "s.py").command == (sys.executable, "-u", "-m", "a.b", "s.py")
    assert config("--no-python", "true", "s.py").command == ("true", "s.py")
    assert config(PYTHON_EXEC="/bin/sh").command == ("/bin/sh", "-u", "s.py")
    assert config(PYTHON_EXEC="").command[0] == sys.executable


def test_omp_threads_are_set_for_several_workers_only() -> None:
    """n workers with n threads each would fight for the same cores (docs/torchelastic.md#threads)."""
    assert config("--nproc-per-node=2").env["OMP_NUM_THREADS"] == "1"
    assert notices("--nproc-per-node=2") == ("OMP_NUM_THREADS=1 for every worker, because it was not set",)
    assert "OMP_NUM_THREADS" not in config("--nproc-per-node=1").env
    assert "OMP_NUM_THREADS" not in config("--nproc-per-node=2", OMP_NUM_THREADS="4").env


def test_the_grace_has_torchelastics_variable_too() -> None:
    """The option beats it (docs/torchelastic.md#agent-environment), and a wrong one is named as it was spelled."""
    assert config(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7").grace_s == 7
    assert config("--shutdown-timeout=3", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7").grace_s == 3
    assert refused(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="x").startswith("TORCH_ELASTIC_SHUTDOWN_TIMEOUT=x: ")


def test_the_watchdog_for_timers_has_torchelastics_variables() -> None:
    """Only the text 1 starts it, as in torch. Whoever has set another text is told so."""
    on, path = "TORCHELASTIC_ENABLE_FILE_TIMER", "TORCHELASTIC_TIMER_FILE"
    assert config().timer_file is None
    assert config(**{on: "1"}).timer_file == ""
    assert config(**{on: "1", path: "/p"}).timer_file == "/p"
    assert config(**{on: "0"}).timer_file is None
    assert notices(**{on: "1", path: "/p"}) == notices(**{on: "0"}) == ()
    assert config(**{on: "true", path: "/p"}).timer_file is None
    assert notices(**{on: "true", path: "/p"}) == (f"{on}=true: only 1 starts the watchdog for timers",)
    assert notices(**{path: "/p"}) == (f"{path}: no watchdog for timers is started, because {on} is not 1",)


def test_progress_is_watched_if_asked_for() -> None:
    """By the option or its variable, which torch's API reads as well."""
    assert [config().hang_after_s, config("--hang-after=1.5").hang_after_s] == [None, 1.5]
    assert config(PET_HANG_AFTER="7").hang_after_s == 7
    assert refused("--hang-after=-1") == "--hang-after=-1: must be at least 1.0 seconds"
    assert refused("--hang-after=nan") == "--hang-after=nan: must be at least 1.0 seconds"
    assert refused("--hang-after=0.2") == "--hang-after=0.2: must be at least 1.0 seconds"


def test_what_is_for_many_nodes_is_accepted_and_said_to_do_nothing() -> None:
    """A torchrun command line for one node works as it is; --master-port is the most common of all."""
    notice = "--rdzv-backend, --master-port: without effect for one node"
    assert notices("--master-port=29501", "--rdzv-backend=c10d") == (notice,)
    assert refused("--node-rank=1") == "--node-rank=1: with one node it is 0"
    assert notices("--standalone", "--node-rank=1") == ("--node-rank: without effect for one node",)
    assert notices("--standalone", "--nnodes=1:2") == ("--nnodes: without effect for one node",)
    assert config("--nnodes=1", "--rdzv-backend=file", "--rdzv-endpoint=x:0").meeting is None


def test_a_misspelt_backend_is_refused_with_one_node_as_well() -> None:
    """The user finds the typing error before the job grows. As in torchrun, --standalone ignores the backend."""
    expected = "--rdzv-backend=etc: static, c10d, file or etcd expected"
    assert refused("--rdzv-backend=etc") == refused("--rdzv-backend=etc", "--nnodes=2") == expected
    assert notices("--standalone", "--rdzv-backend=etc") == ("--rdzv-backend: without effect for one node",)


def test_a_log_folder_without_output_files_holds_error_files_alone() -> None:
    """Somebody who gives --log-dir usually looks for the output there."""
    line = "--log-dir=logs: only error files and the trace go there; --redirects and --tee write the output there"
    assert notices("--log-dir=logs") == (line,)
    assert notices("--log-dir=logs", "--tee=3") == notices("--log-dir=/dev/null") == ()


def test_the_master_port_of_one_node() -> None:
    """As in torchrun: honoured with the default backend, and not where a job has a rendezvous of its own."""
    assert config("--master-port=29501").master_port == config(PET_MASTER_PORT="29501").master_port == 29501
    assert notices("--master-port=29501") == ()
    assert config().master_port == 0, "any free port"
    for other in ("--standalone", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"):
        assert config("--master-port=29501", other).master_port == 0
        (line,) = notices("--master-port=29501", other)
        assert line.endswith("--master-port: without effect for one node")


def test_the_script_may_be_the_standard_input() -> None:
    """It is read once, by the agent, and only if it is the script."""
    parsed = parse(["--nproc-per-node=2", "-", "a"], {})
    settings = asked(parsed, {}, lambda: b"print(1)").settings
    assert (settings.command, settings.stdin) == ((sys.executable, "-u", "-", "a"), b"print(1)")
    assert asked(parse(["s.py"], {}), {}, lambda: pytest.fail("it was read")).settings.stdin is None


def test_run_path_runs_the_script() -> None:
    """torchrun's --run-path beats --module and --no-python, and runs the file as Python does."""
    assert config("--run-path", "-m", "--no-python", "s.py").command == (sys.executable, "-u", "s.py")


def test_a_refusal_of_the_settings_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a value refuses by its field, the user reads the option or the variable."""

    def refuse(**fields: object) -> None:
        raise ValueError("Settings.grace_s must be a number of seconds, 0 or more, not -1")

    monkeypatch.setattr("reknit.app.cli.parsing.Settings", refuse)
    assert refused("--shutdown-timeout=3") == "--shutdown-timeout=3: must be a number of seconds, 0 or more"
    assert refused(PET_SHUTDOWN_TIMEOUT="3") == "PET_SHUTDOWN_TIMEOUT=3: must be a number of seconds, 0 or more"


def test_a_variable_is_named_as_the_variable() -> None:
    """Who never gave the flag would look for it in vain."""
    assert refused(PET_NPROC_PER_NODE="x") == "PET_NPROC_PER_NODE=x: a number, cpu, gpu, xpu or auto expected"


def test_masks_by_rank() -> None:
    """Local ranks have more than one digit on big hosts; torchrun refuses 10:3."""
    assert config("-r=3").streams.redirects == 3
    assert config("-t=0:1,10:3").streams.tee == {0: 1, 10: 3}
    assert config("--local-ranks-filter=0,2", "--nproc-per-node=3").streams.shown == {0, 2}


def test_the_prefix_template_is_passed_on() -> None:
    """It is read where it is used: the variable may be another in each worker's environment."""
    assert config("--log-line-prefix-template=b").streams.prefix == "b"


def test_signals_by_name() -> None:
    """Spaces after commas are usual in templates; an empty list handles nothing."""
    found = config("--signals-to-handle=SIGUSR1, SIGTERM").signals
    assert found == (signal.SIGUSR1, signal.SIGTERM)
    assert config("--signals-to-handle=").signals == ()


def test_what_means_nothing_on_this_node_ends_no_job() -> None:
    """torchrun goes on as well: one list may serve two systems, and nodes may have different numbers of workers."""
    assert config("--signals-to-handle=SIGNOPE,SIGTERM").signals == (signal.SIGTERM,)
    assert notices("--signals-to-handle=SIGNOPE,SIG_IGN,SIGTERM") == (
        "--signals-to-handle=SIGNOPE,SIG_IGN,SIGTERM: SIGNOPE is no signal of this system, reknit leaves it out",
        "--signals-to-handle=SIGNOPE,SIG_IGN,SIGTERM: SIG_IGN is no signal of this system, reknit leaves it out",
    )
    assert config("--local-ranks-filter=1,4").streams.shown == {1, 4}
    assert notices("--local-ranks-filter=0,4") == ("--local-ranks-filter=0,4: no worker of this node has local rank 4",)


def test_a_single_node_can_be_asked_for_in_every_way() -> None:
    """1 and 1:1 are torchrun's two spellings of the default."""
    for text in ("1", "1:1"):
        assert config(f"--nnodes={text}").terms.max_nodes == 1


def test_several_nodes_have_a_rendezvous() -> None:
    """What is judged there reaches the agent and the names of the files. test_rendezvous has the rest."""
    found = config("--nnodes=2:3", "--rdzv-backend=c10d", "--rdzv-endpoint=h", "--rdzv-id=j", "--max-restarts=2")
    assert found.meeting is not None
    assert found.run_id == "j"
    assert (found.terms.min_nodes, found.terms.max_nodes) == (2, 3)
    assert found.terms.restarts.max_restarts == 2
    assert config("--nnodes=2", "--store-timeout=7", "--node-rank=1").store_timeout_s == 7
    assert config("--nnodes=2", "--node-rank=1").rank_hint == 1


# ---- what is wrong ----


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--nproc-per-node=0", "--nproc-per-node=0: must be at least 1"),
        ("--nproc-per-node=-1", "--nproc-per-node=-1: must be at least 1"),
        ("--nproc-per-node=abc", "--nproc-per-node=abc: a number, cpu, gpu, xpu or auto expected"),
        ("--nproc-per-node=", "--nproc-per-node=: a number, cpu, gpu, xpu or auto expected"),
        ("--nproc-per-node=1.5", "--nproc-per-node=1.5: a number, cpu, gpu, xpu or auto expected"),
        ("--nproc-per-node=1000000000", "--nproc-per-node=1000000000: must be at most 10000"),
        ("--max-restarts=-1", "--max-restarts=-1: must be at least 0"),
        *(
            (
                f"--max-restarts={text}",
                f"--max-restarts={text}: N, N/steady or N/TIME expected, for example 3/600 or 3/10m",
            )
            for text in ("", "1e3", "steady", "3/", "3/soon", "3/-1", "3/10w")
        ),
        ("--shutdown-timeout=-1", "--shutdown-timeout=-1: 0 or more seconds expected"),
        ("--shutdown-timeout=nan", "--shutdown-timeout=nan: 0 or more seconds expected"),
        ("--shutdown-timeout=inf", "--shutdown-timeout=inf: 0 or more seconds expected"),
        ("--shutdown-timeout=soon", "--shutdown-timeout=soon: a number of seconds expected"),
        ("--monitor-interval=x", "--monitor-interval=x: a number of seconds expected"),
        ("--redirects=4", "--redirects=4: 0, 1, 2 or 3 expected, or RANK:N,RANK:N with such N"),
        ("--redirects=-1", "--redirects=-1: 0, 1, 2 or 3 expected, or RANK:N,RANK:N with such N"),
        ("--tee=0:4", "--tee=0:4: 0, 1, 2 or 3 expected, or RANK:N,RANK:N with such N"),
        ("--tee=0:1:2", "--tee=0:1:2: 0, 1, 2 or 3 expected, or RANK:N,RANK:N with such N"),
        ("--tee=", "--tee=: 0, 1, 2 or 3 expected, or RANK:N,RANK:N with such N"),
        ("--local-ranks-filter=0,x", "--local-ranks-filter=0,x: numbers separated by commas expected"),
        ("--local-ranks-filter=-1", "--local-ranks-filter=-1: must be local ranks, from 0"),
        ("--signals-to-handle=SIGTERM,SIGKILL", "--signals-to-handle=SIGTERM,SIGKILL: SIGKILL cannot be handled"),
        ("--standalone --nnodes=2", "--nnodes=2: --standalone means one node"),
        ("--nnodes=2:1", "--nnodes=2:1: MIN:MAX with 0 < MIN <= MAX expected"),
        ("--nnodes=0", "--nnodes=0: MIN:MAX with 0 < MIN <= MAX expected"),
        ("--nnodes=1:99999999999999999999", "--nnodes=1:99999999999999999999: at most 1000000 nodes expected"),
        ("--role=", "--role=: must be a name of 1 to 1000 bytes"),
        ("--nnodes=1:1:1", "--nnodes=1:1:1: a number or MIN:MAX expected"),
        ("--nnodes=", "--nnodes=: a number or MIN:MAX expected"),
        ("-m --no-python", "--module and --no-python exclude each other"),
    ],
)
def test_a_wrong_value_is_named(argv: str, message: str) -> None:
    """The flag, what it was given, what it takes."""
    assert refused(*argv.split()) == message


def test_a_script_that_is_not_there() -> None:
    """Python would say so, but once per worker and round."""
    assert refused("none.py", "s.py") == "script none.py does not exist"
    hint = "; did you mean --warm=torch,torch.nn?"
    assert refused("--warm", "torch,torch.nn", "s.py") == f"script torch,torch.nn does not exist{hint}"
    assert refused(".", "s.py") == "script . is a folder without __main__.py"
    with pytest.raises(UsageError, match=r"^no script; usage: reknit run"):
        asked(parse([], {}), {})
    os.makedirs("package")
    Path("package/__main__.py").touch()
    assert config("package", "s.py").command[2] == "package"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_script_that_cannot_be_read(script: Path) -> None:
    """Permissions are a usual mistake on shared disks."""
    script.chmod(0)
    assert refused() == "script s.py cannot be read"


def test_a_program_that_cannot_be_executed(script: Path) -> None:
    """Restarts would be spent on it, one report per round."""
    assert refused("--no-python", "./s.py", "s.py") == "script ./s.py cannot be executed: no permission"
    assert refused("--no-python", "./none", "s.py") == "script ./none does not exist"
    assert refused("--no-python", "no-such-program", "s.py") == "script no-such-program does not exist in PATH"
    assert refused("--no-python", "/", "s.py") == "script / does not exist"
    assert refused("--no-python", "s.py") == "script s.py does not exist in PATH; did you mean ./s.py?"
    assert refused(PYTHON_EXEC="/no/python") == "PYTHON_EXEC: /no/python does not exist"
    assert refused(PYTHON_EXEC="./s.py") == "PYTHON_EXEC: ./s.py cannot be executed: no permission"
    script.chmod(0o755)
    assert config("--no-python", "./s.py", "s.py").command[0] == "./s.py"


@given(
    st.sampled_from([o.name for o in OPTIONS if o.metavar]),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8) | st.floats().map(str),
)
def test_any_value_is_taken_or_refused_by_name(name: str, value: str) -> None:
    """No text that fits into a command line makes the judge itself fail."""
    if value in ("gpu", "xpu", "auto") or name in ("help", "log-dir"):
        return
    said = f"--{name}"
    try:
        asked(parse([f"--{name}={value}", __file__], {}), {})
    except UsageError as refusal:
        said = str(refusal)
    assert f"--{name}" in said


# ---- through the real command ----


@pytest.mark.parametrize(
    ("argv", "env", "message"),
    [
        (["--bogus", "s.py"], {}, "unknown option --bogus; see reknit run --help"),
        (
            ["--rdzv-e=2", "--rdzv-=2", "s.py"],
            {},
            "option --rdzv- may be --rdzv-backend or --rdzv-endpoint or --rdzv-id or --rdzv-conf or --rdzv-secret",
        ),
        ([], {}, "no script; usage: reknit run [options] SCRIPT [script arguments]"),
        (["none.py"], {}, "script none.py does not exist"),
        (["two\nlines.py"], {}, "script two\\nlines.py does not exist"),
        (["--no-python", "./s.py"], {}, "script ./s.py cannot be executed: no permission"),
        (["--nproc-per-node=0", "s.py"], {}, "--nproc-per-node=0: must be at least 1"),
        (["s.py"], {"PYTHON_EXEC": "/no/python"}, "PYTHON_EXEC: /no/python does not exist"),
        (["s.py"], {"PET_MODULE": "x"}, "PET_MODULE=x: 0 or 1 expected"),
        (["--log-dir=s.py", "--tee=3", "s.py"], {}, "--log-dir=s.py cannot be made: Not a directory"),
    ],
)
def test_a_refusal_is_one_line(tmp_path: Path, argv: list[str], env: dict[str, str], message: str) -> None:
    """Status 2, no traceback, no process, no worker's line."""
    assert refusal(tmp_path, *argv, env=env) == message


def test_a_name_that_is_not_text(tmp_path: Path) -> None:
    """File names are bytes. A message about one must not fail over it."""
    assert refusal(tmp_path, os.fsdecode(b"\xff.py")) == "script \\udcff.py does not exist"


def test_variables_reach_the_real_command(tmp_path: Path) -> None:
    """PET_ variables count, and leak into the workers, as in torchrun."""
    env = {"PET_NPROC_PER_NODE": "2", "PET_STANDALONE": "true"}
    status, job = run(tmp_path, "s.py", env=env)
    assert (status, job.out) == (0, "ran\nran\n")


def test_a_folder_that_has_been_deleted(tmp_path: Path, script: Path) -> None:
    """A shell may stand in a folder that is gone."""
    gone = tmp_path / "gone"
    gone.mkdir()
    command = 'cd gone && rmdir ../gone && exec "$@"'

    def from_gone(*argv: str) -> list[str]:
        return [sys.executable, "-c", f"import os; os.execvp('sh', ['sh', '-c', {command!r}, 'sh', *{argv!r}])"]

    from tests.support.command import REKNIT

    status, job = run(tmp_path, *from_gone(REKNIT, "run", str(script)))
    assert (status, job.out) == (0, "ran\n"), job.err
    gone.mkdir()
    said = refusal(tmp_path, *from_gone(REKNIT, "run", "--log-dir=logs", "--tee=3", str(script)))
    assert said == "--log-dir=logs cannot be made: No such file or directory"
