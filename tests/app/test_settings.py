"""Settings as people write them by hand: short if little is asked for, and refused where a value is out of range."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest
from attrs import evolve

from reknit.adapters.keeper.output.streams import StreamSettings
from reknit.app.settings import HealthCheck, Meeting, Settings
from reknit.core.job.entries import RestartPolicy, Terms

MANY = Terms(min_nodes=2, max_nodes=4)
C10D = Meeting("c10d", endpoints=(("node0", 29400),))


def made(**fields: Any) -> Settings:
    return Settings(**{"command": ("true",), **fields})


def test_two_workers_of_one_script() -> None:
    """What a library user types first. Nothing but the command must be given."""
    settings = Settings(command=("python", "train.py"), local_world_size=2)
    assert (settings.terms, settings.meeting, settings.grace_s) == (Terms(), None, 30.0)
    assert settings.signals == (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    assert len(settings.run_id) == 16
    assert settings.run_id != Settings(command=("python", "train.py")).run_id, "unnamed jobs have different names"


def test_several_nodes() -> None:
    """How many nodes, where they meet, and under which name."""
    settings = made(terms=evolve(MANY, restarts=RestartPolicy(max_restarts=3)), meeting=C10D, run_id="job42")
    assert settings.meeting is not None
    assert settings.meeting.place == "c10d://node0:29400"


def test_what_a_file_holds_will_do() -> None:
    """JSON has lists, and no tuples."""
    settings = made(command=["python", "x.py"], signals=[15], meeting=None)
    assert (settings.command, settings.signals) == (("python", "x.py"), (15,))
    assert Meeting("etcd", endpoints=[["a", 1], ["b", 2]]).place == "etcd://a:1,b:2"


def test_the_place_of_each_backend() -> None:
    """It names the lock on a host, so two spellings of one place must not come up."""
    assert Meeting("file", folder="/shared").place == "file:///shared"
    assert Meeting("c10d", endpoints=(("fe80::1", 7),)).place == "c10d://[fe80::1]:7"


def test_a_function_in_the_place_of_a_command() -> None:
    """Exactly one of the two."""
    settings = Settings(function=print, args=["x"], start_method="fork")
    assert (settings.command, settings.args) == ((), ("x",))
    for fields, said in (
        ({"function": print, "command": ("true",)}, "Settings.command must be empty, because a function is given"),
        ({}, "Settings.command must be a program and its arguments"),
        ({"function": "print"}, "Settings.function must be a function"),
        ({"function": print, "args": "x"}, "Settings.args must be a tuple"),
        ({"function": print, "args": 3}, "Settings.args must be a tuple, not 3"),
        ({"command": ("true",), "args": (1,)}, "Settings.args must be empty, because no function is given"),
        ({"function": print, "start_method": "exec"}, "Settings.start_method must be one of spawn, fork, forkserver"),
        (
            {"function": print, "warm": True},
            "Settings.warm must be False for a function, unless start_method is 'forkserver'",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            Settings(**fields)  # type: ignore[arg-type]  # some of them are of wrong types


def test_settings_are_made_without_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedder's variables are its own. Only parsing reads any."""
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PET_NPROC_PER_NODE", "7")
    assert made().local_world_size == 1


def test_a_secret_is_not_shown() -> None:
    """Settings are printed when something is wrong."""
    assert "s3cret" not in repr(made(terms=MANY, run_id="j", meeting=evolve(C10D, secret="s3cret")))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"command": "python x.py"}, "Settings.command must be a program and its arguments, each a text of its own"),
        ({"command": ()}, "Settings.command must be a program and its arguments"),
        ({"command": ("python", 3)}, "Settings.command must be a program and its arguments"),
        ({"command": ("",)}, "Settings.command must be the name of a program first, not ('',)"),
        ({"log_dir": 3}, "Settings.log_dir must be a str, not 3"),
        ({"env": ["A=1"]}, "Settings.env must be a mapping from the names of variables to texts, not ['A=1']"),
        (
            {"env": {"SECRET": "x", "A": 1}},
            "Settings.env must be a mapping from the names of variables to texts, not {'A': 1}",
        ),
        ({"warm": 1}, "Settings.warm must be True, False or names of modules, not 1"),
        ({"warm": "torch"}, "Settings.warm must be True, False or names of modules, not 'torch'"),
        ({"warm": ["torch nn"]}, "Settings.warm must be True, False or names of modules, not ('torch nn',)"),
        ({"command": ("./job",), "warm": True}, "Settings.warm must be False: ./job is no Python, not True"),
        ({"stdin": "text"}, "Settings.stdin must be bytes, or None, not 'text'"),
        ({"local_world_size": 0}, "Settings.local_world_size must be a whole number from 1 to 10000, not 0"),
        ({"local_world_size": "2"}, "Settings.local_world_size must be a whole number from 1 to 10000, not '2'"),
        ({"local_world_size": True}, "Settings.local_world_size must be a whole number from 1 to 10000, not True"),
        ({"health": 8080}, "Settings.health must be a HealthCheck, or None, not 8080"),
        ({"grace_s": -1}, "Settings.grace_s must be a number of seconds, 0 or more, not -1"),
        ({"hang_after_s": 0}, "Settings.hang_after_s must be more than 0, or None, not 0"),
        ({"hang_after_s": "5"}, "Settings.hang_after_s must be a number of seconds, 0 or more, not '5'"),
        ({"grace_s": float("nan")}, "Settings.grace_s must be a number of seconds, 0 or more, not nan"),
        ({"store_timeout_s": "9"}, "Settings.store_timeout_s must be a number of seconds, 0 or more, not '9'"),
        ({"master_port": 65536}, "Settings.master_port must be a whole number from 0 to 65535, not 65536"),
        ({"timer_file": 1}, "Settings.timer_file must be a path, an empty text, or None, not 1"),
        ({"rank_hint": -1}, "Settings.rank_hint must be a whole number of at least 0, or None, not -1"),
        ({"signals": ("SIGTERM",)}, "Settings.signals must be numbers of signals that a process can handle"),
        ({"signals": (signal.SIGKILL,)}, "Settings.signals must be numbers of signals that a process can handle"),
        ({"run_id": "n" * 1001}, "Settings.run_id must be a name of 1 to 1000 bytes, not 'nnn"),
        ({"terms": MANY}, "Settings.meeting must be given for a job of up to 4 nodes, not None"),
        ({"meeting": "node0:29400"}, "Settings.meeting must be a Meeting, or None, not 'node0:29400'"),
        ({"meeting": C10D}, "Settings.run_id must be a name of 1 to 1000 bytes, not ''"),
        (
            {"meeting": C10D, "run_id": "j", "master_port": 1},
            "Settings.master_port must be 0 with a meeting: each round has a port of its own, not 1",
        ),
        ({"streams": StreamSettings(tee=4)}, "StreamSettings.tee must be masks from 0 to 3, not 4"),
        ({"streams": StreamSettings(redirects={0: 4})}, "StreamSettings.redirects must be masks from 0 to 3"),
        (
            {"streams": StreamSettings(shown=frozenset({-1}))},
            "StreamSettings.shown must be local ranks, from 0, not [-1]",
        ),
    ],
)
def test_nonsense_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    """The field and the value, where the mistake was made and not an hour later."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared below
        made(**fields)
    assert str(caught.value).startswith(message)


PAIRS = 'pairs of a host and a port from 1 to 65535, for example (("node0", 29400),)'


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"backend": "zoo"}, "Meeting.backend must be one of c10d, file, etcd, not 'zoo'"),
        (
            {"backend": "c10d"},
            "Meeting.endpoints must be one endpoint for c10d; a job that must outlive any host needs etcd, not ()",
        ),
        (
            {"backend": "c10d", "endpoints": (("a", 1), ("b", 1))},
            "Meeting.endpoints must be one endpoint for c10d; a job that must outlive any host needs etcd, not (",
        ),
        ({"backend": "c10d", "endpoints": (("h", 0),)}, "Meeting.endpoints must be pairs of a host and a port"),
        (
            {"backend": "c10d", "endpoints": "h:1"},
            f"Meeting.endpoints must be {PAIRS}, not 'h:1'",
        ),
        (
            {"backend": "c10d", "endpoints": ["h:1"]},
            f"Meeting.endpoints must be {PAIRS}, not ('h:1',)",
        ),
        ({"backend": "c10d", "endpoints": ("h", 1)}, f"Meeting.endpoints must be {PAIRS}, not ('h', 1)"),
        ({"backend": "c10d", "endpoints": None}, "Meeting.endpoints must be pairs of a host and a port"),
        ({"backend": "c10d", "endpoints": [["h", 1], "h"]}, "Meeting.endpoints must be pairs of a host and a port"),
        ({"backend": "etcd"}, "Meeting.endpoints must be at least one endpoint for etcd, not ()"),
        ({"backend": "file"}, "Meeting.folder must be a folder for the backend file, and empty for others, not ''"),
        ({"backend": "file", "folder": "/x", "endpoints": (("h", 1),)}, "Meeting.endpoints must be empty for file"),
        ({"backend": "c10d", "endpoints": (("h", 1),), "folder": "/x"}, "Meeting.folder must be a folder for the"),
        (
            {"backend": "etcd", "endpoints": (("h", 1),), "ssl_cert": "c"},
            "Meeting.ssl_cert must be given together with ssl_cert_key, not 'c'",
        ),
    ],
)
def test_a_place_where_nobody_could_meet(fields: dict[str, Any], message: str) -> None:
    """A wrong place would be found out after `join_timeout`, ten minutes later."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared below
        Meeting(**fields)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"port": -1}, "HealthCheck.port must be a whole number from 0 to 65535, not -1"),
        ({"port": "80"}, "HealthCheck.port must be a whole number from 0 to 65535, not '80'"),
        (
            {"port": 80, "host": "node0"},
            "HealthCheck.host must be a numeric address, for example 127.0.0.1, not 'node0'",
        ),
        ({"port": 80, "host": 7}, "HealthCheck.host must be a numeric address"),
        ({"port": 80, "timeout_s": -1}, "HealthCheck.timeout_s must be a number of seconds, 0 or more, not -1"),
    ],
)
def test_a_server_that_could_not_listen(fields: dict[str, Any], message: str) -> None:
    """A name would have to be looked up, which may take minutes."""
    with pytest.raises(ValueError, match=re.escape(message)):
        HealthCheck(**fields)
