"""`reknit.elastic.launcher` and `reknit.elastic.run`: code for torch runs after its imports were changed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from reknit.elastic import run as elastic_run
from reknit.elastic.launcher import LaunchConfig
from reknit.elastic.launcher.api import _get_addr_and_port, _get_entrypoint_name
from reknit.elastic.rendezvous.api import RendezvousParameters
from tests.support import meeting
from tests.support.waiting import PATIENCE_S

WAIT_S = 120
HEAD = """
import os, sys
from {package}.launcher import LaunchConfig, elastic_launch
from {package}.errors import ChildFailedError
def config(**more):
    fields = dict(min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
                  run_id="j", max_restarts=0, monitor_interval=0.1)
    return LaunchConfig(**{{**fields, **more}})
"""


def ran(tmp_path: Path, program: str, *, torch: bool = False, env: dict[str, str] | None = None) -> str:
    """What the program prints, with reknit's imports or with torch's."""
    head = HEAD.format(package="reknit.elastic").replace("elastic.errors", "elastic.multiprocessing.errors")
    if torch:
        head = head.replace("reknit.elastic.launcher", "torch.distributed.launcher")
        head = head.replace("reknit.elastic", "torch.distributed.elastic")
    script = tmp_path / "program.py"
    script.write_text(head + program)
    found = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        cwd=tmp_path,
        env={**os.environ, **(env or {})},
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


RETURNS = """
def train(word):
    names = "RANK", "WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RUN_ID"
    return word, *(os.environ[name] for name in names)

if __name__ == "__main__":
    print(sorted(elastic_launch(config(start_method="{how}"), train)("word").items()))
"""


@pytest.mark.parametrize(
    ("package", "how"),
    [("reknit", "spawn"), ("reknit", "fork"), pytest.param("torch", "fork", marks=pytest.mark.beside_torch)],
)
def test_functions_return_by_rank(tmp_path: Path, package: str, how: str) -> None:
    """The same program with either package gives the same result."""
    wanted = str([(rank, ("word", str(rank), "2", "default_role", "j")) for rank in range(2)]) + "\n"
    assert ran(tmp_path, RETURNS.replace("{how}", how), torch=package == "torch") == wanted


FAILS = """
def train():
    if os.environ["RANK"] == "1":
        raise ValueError("no luck")
    import time
    time.sleep(600)  # it is ended with its sibling

if __name__ == "__main__":
    try:
        elastic_launch(config(), train)()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(error.name, sorted(error.failures), rank, failure.exitcode, failure.local_rank)
        print("ValueError: no luck" in str(error), "train FAILED" in str(error))
"""


def test_a_failure_names_the_rank_and_its_exception(tmp_path: Path) -> None:
    """The worker that the agent ended is not among the failures."""
    assert ran(tmp_path, FAILS) == "train [1] 1 1 1\nTrue True\n"


SPEAKS_TOO_MUCH = """
def train():
    raise ValueError("begin" + "x" * 10_000_000)

if __name__ == "__main__":
    try:
        elastic_launch(config(nproc_per_node=1), train)()
    except ChildFailedError as error:
        print("ValueError: begin" in str(error), len(str(error)) < 1_000_000)
"""


def test_a_message_that_is_too_large_is_shortened(tmp_path: Path) -> None:
    """Its beginning says what went wrong. An error file of its size would not be read at all."""
    assert ran(tmp_path, SPEAKS_TOO_MUCH) == "True True\n"


RESTARTS = """
def train(folder):
    count = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if count == "0" and os.environ["RANK"] == "0":
        os.kill(os.getpid(), 9)
    return count, os.environ["TORCHELASTIC_MAX_RESTARTS"]

if __name__ == "__main__":
    print(elastic_launch(config(max_restarts=2), train)("x"))
"""


def test_a_restart(tmp_path: Path) -> None:
    """What is returned comes from the last round."""
    assert ran(tmp_path, RESTARTS) == "{0: ('1', '2'), 1: ('1', '2')}\n"


MEETS = """
import threading
from meeting import meet

if __name__ == "__main__":
    from reknit.elastic.utils.distributed import get_free_port
    place = f"127.0.0.1:{get_free_port()}"
    found = {}
    def agent():
        two = config(min_nodes=2, max_nodes=2, rdzv_endpoint=place, nproc_per_node=1)
        found.update(elastic_launch(two, meet)())
    agents = [threading.Thread(target=agent) for _ in range(2)]
    for each in agents: each.start()
    for each in agents: each.join()
    print(found)
"""


@pytest.mark.slow
def test_two_agents_of_one_process_meet(tmp_path: Path) -> None:
    """Agents run in threads, without the signals of the process. Their workers find each other."""
    (tmp_path / "meeting.py").write_text(meeting.TEXT)
    assert ran(tmp_path, MEETS) in ("{0: 3, 1: 3}\n", "{1: 3, 0: 3}\n")


PROGRAM = """
if __name__ == "__main__":
    script = "import os; open(os.environ['RANK'], 'w').write(os.environ['TORCHELASTIC_SIGNALS_TO_HANDLE'])"
    found = elastic_launch(config(signals_to_handle="SIGTERM"), sys.executable)("-c", script)
    print(found, open("0").read(), open("1").read(), "TORCHELASTIC_SIGNALS_TO_HANDLE" in os.environ)
"""


def test_a_program_and_what_its_workers_are_told(tmp_path: Path) -> None:
    """The environment of the calling process is never written, unlike torch's."""
    assert ran(tmp_path, PROGRAM) == "{0: None, 1: None} SIGTERM SIGTERM False\n"


ENDED = """
import signal, threading
from {package}.multiprocessing import SignalException
def train(folder):
    open(os.path.join(folder, os.environ["RANK"]), "w").close()
    import time
    time.sleep(600)  # it is ended

if __name__ == "__main__":
    before = signal.getsignal(signal.SIGTERM)
    def ask():
        while not all(map(os.path.exists, "01")):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=ask).start()
    try:
        elastic_launch(config(), train)(os.getcwd())
    except SignalException as error:
        print(error.sigval.name, signal.getsignal(signal.SIGTERM) is before)
""".replace("{package}", "reknit.elastic")


def test_a_signal_ends_the_workers_and_is_raised(tmp_path: Path) -> None:
    """The handler of the program is put back."""
    assert ran(tmp_path, ENDED) == "SIGTERM True\n"


def test_the_configuration_has_the_defaults_of_torch() -> None:
    """Code leaves out what it does not need."""
    from torch.distributed.launcher import LaunchConfig as Theirs

    ours, theirs = LaunchConfig(1, 2, 3), Theirs(1, 2, 3)
    for field in fields(Theirs):
        if field.name != "logs_specs":
            assert getattr(ours, field.name) == getattr(theirs, field.name), field.name
    assert ours.logs_specs is not None
    assert LaunchConfig(1, 1, 1, rdzv_timeout=5).rdzv_configs["timeout"] == 5


def test_a_time_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is named, because nobody gave a parameter."""
    with pytest.raises(ValueError, match=r"^shutdown_timeout must be non-negative, got -1$"):  # torch's words
        LaunchConfig(1, 1, 1, shutdown_timeout=-1)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="TORCH_ELASTIC_SHUTDOWN_TIMEOUT=soon"):
        LaunchConfig(1, 1, 1)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
    monkeypatch.setenv("TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT", "8.5")
    assert LaunchConfig(1, 1, 1).shutdown_timeout == 7
    assert LaunchConfig(1, 1, 1).exit_barrier_timeout == 8.5


def test_the_name_of_an_entrypoint() -> None:
    """It stands in the first line of a failure's report."""
    assert _get_entrypoint_name(ran, []) == "ran"
    assert _get_entrypoint_name(sys.executable, ["-u", "x.py", "y"]) == "x.py"
    assert _get_entrypoint_name("trainer", ["x"]) == "trainer"
    assert _get_entrypoint_name(None, []) == ""


def test_a_static_rendezvous_fixes_the_master() -> None:
    """Workers of other launchers in the job were told the same address."""
    static = RendezvousParameters("static", "[::1]:29500", "j", 2, 2)
    assert _get_addr_and_port(static) == ("::1", 29500)
    assert _get_addr_and_port(RendezvousParameters("c10d", "h:1", "j", 2, 2)) == (None, None)
    with pytest.raises(ValueError, match="HOST:PORT"):
        _get_addr_and_port(RendezvousParameters("static", "h", "j", 2, 2))


# ---- reknit.elastic.run ----

COMMAND_LINES = [
    ["x.py", "a", "--b"],
    ["--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-endpoint=h:1", "--rdzv-id=j", "--nproc_per_node=2", "x.py"],
    ["--nnodes=2", "--node-rank=1", "--master-addr=h", "--master-port=1234", "-m", "mod", "a"],
    ["--no-python", "--max-restarts=3", "-t=3", "-r=1:2", "--role=r", "prog", "a"],
    ["--rdzv-conf=timeout=5,join_timeout=9", "--rdzv-backend=c10d", "--local-ranks-filter=0,1", "x.py"],
    ["--standalone", "--shutdown-timeout=4", "--signals-to-handle=SIGTERM", "--virtual-local-rank", "x.py"],
    ["--duplicate-stdout-filters=a,,b,c", "--event-log-handler=console", "--run-path", "x.py"],
]


@pytest.mark.parametrize("argv", COMMAND_LINES, ids=lambda argv: argv[0])
def test_options_are_parsed_as_in_torch(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs read and change the namespace before they run it."""
    from torch.distributed import run as theirs

    assert vars(elastic_run.parse_args(argv)) == vars(theirs.parse_args(argv))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torch's function writes it into this process otherwise
    ours, them = elastic_run.parse_args(argv), theirs.parse_args(argv)
    (config, cmd, args), (their_config, their_cmd, their_args) = (
        elastic_run.config_from_args(ours),
        theirs.config_from_args(them),
    )
    for field in fields(type(their_config)):
        if field.name != "logs_specs":
            assert getattr(config, field.name) == getattr(their_config, field.name), field.name
    assert args == their_args
    assert cmd == their_cmd or (cmd is elastic_run.run_script_path and their_cmd is theirs.run_script_path)


def test_variables_are_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torchrun: the option beats the variable, and the variable beats the table."""
    monkeypatch.setenv("PET_NNODES", "3")
    monkeypatch.setenv("PET_STANDALONE", "1")
    monkeypatch.setenv("PET_MAX_RESTARTS", "2")
    args = elastic_run.parse_args(["--max-restarts=4", "x.py"])
    assert (args.nnodes, args.standalone, args.max_restarts) == ("3", True, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: elastic_run.parse_min_max_nnodes("a:b"), "--nnodes=a:b"),
        (lambda: config_of("--nnodes=2:1", "x.py"), "--nnodes=2:1"),
        (lambda: config_of("--nnodes=0", "x.py"), "--nnodes=0"),
        (lambda: elastic_run.run(elastic_run.parse_args(["--nnodes=-1:1", "x.py"])), "--nnodes=-1:1"),
        (lambda: elastic_run.determine_local_world_size("many"), "--nproc-per-node=many"),
        (lambda: config_of("--max-restarts=-1", "x.py"), "--max-restarts=-1"),
        (lambda: config_of("--rdzv-conf=a", "x.py"), "--rdzv-conf: a: KEY=VALUE"),
        (lambda: config_of("--no-python", "-m", "x"), "--module and --no-python"),
        (lambda: config_of("--logs-specs=nope", "x.py"), "--logs-specs=nope"),
    ],
)
def test_what_means_nothing_is_an_error_that_names_the_option(call: Any, message: str) -> None:
    """A program shows it to its user."""
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("nnodes", ["2", "1:4", "4:2", "0", "-1:2", " 1 : 2 ", "100000"])
def test_numbers_of_nodes_are_split_as_in_torch(nnodes: str) -> None:
    """Programs use the function for their own options, and judge the numbers themselves. A job judges them later."""
    from torch.distributed.run import parse_min_max_nnodes

    assert elastic_run.parse_min_max_nnodes(nnodes) == parse_min_max_nnodes(nnodes)


def test_three_numbers_of_nodes_are_torchs_error() -> None:
    """Of its type and in its words, for which programs look."""
    from torch.distributed.run import parse_min_max_nnodes

    with pytest.raises(RuntimeError) as theirs:
        parse_min_max_nnodes("2:20:30")
    with pytest.raises(RuntimeError) as ours:
        elastic_run.parse_min_max_nnodes("2:20:30")
    assert str(ours.value) == str(theirs.value)


def config_of(*argv: str) -> object:
    return elastic_run.config_from_args(elastic_run.parse_args(argv))


def test_the_module_is_a_command(tmp_path: Path) -> None:
    """Scripts call `python -m torch.distributed.run`. There a failed job ends with 1, and a wrong option with 2."""
    (tmp_path / "w.py").write_text("import sys; sys.exit(int(sys.argv[1]))")

    def status(*argv: str) -> int:
        words = [sys.executable, "-m", "reknit.elastic.run", *argv]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, check=False, timeout=PATIENCE_S).returncode

    assert [status("w.py", "0"), status("w.py", "3"), status("--no-such-option", "w.py")] == [0, 1, 2]


MAIN = """
from reknit.elastic.run import main
if __name__ == "__main__":
    try:
        main(["--nproc-per-node=2", "w.py", "1"])
    except ChildFailedError as error:
        print("failed", error.get_first_failure()[1].exitcode)
    main(["--nproc-per-node=2", "w.py", "0"])
    print("back")
"""


def test_main_runs_in_this_process_and_raises(tmp_path: Path) -> None:
    """The command would exit instead. A program goes on."""
    (tmp_path / "w.py").write_text(
        "import os, sys\nassert os.environ['OMP_NUM_THREADS'] == '1'\nsys.exit(int(sys.argv[1]))"
    )
    environ = {"OMP_NUM_THREADS": ""}
    script = MAIN.replace("import main\n", "import main\nos.environ.pop('OMP_NUM_THREADS')\n")
    assert ran(tmp_path, script, env=environ) == "failed 1\nback\n"


def test_run_path_runs_the_file_as_main(tmp_path: Path) -> None:
    """`--run-path`: the script is run by a function worker."""
    (tmp_path / "w.py").write_text("import sys\nif __name__ == '__main__': open('made', 'w').write(str(sys.argv))\n")
    program = "from reknit.elastic.run import main\nif __name__ == '__main__': main(['--run-path', 'w.py', 'a'])\n"
    ran(tmp_path, program)
    assert (tmp_path / "made").read_text() == "['w.py', 'a']"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
