"""What happens to the journal in a folder when its bytes change: by a disk, a person or another program.

Agents that have read the right bytes go on. No two agents with different entries at the same position both go on."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.file.journal import FileJournal
from reknit.adapters.journals.folds import MANY
from reknit.adapters.runtime.ports import Refused
from reknit.core.job.entries import Entry, Filler, Node, NodeId
from reknit.core.job.job import Job
from reknit.core.job.reasons import Refusal
from tests.support.journals import entry, everything

ME, PEER = Node(NodeId("me")), Node(NodeId("peer"))


def opened(path: Path) -> FileJournal:
    return FileJournal(str(path), Envelope("job"), poll_s=0.001)


class Agent:
    """Reads and appends like an agent, and ends when it is refused."""

    def __init__(self, path: Path, name: str) -> None:
        self.journal = opened(path)
        self.name = name
        self.position = 0
        self.entries: list[Entry] = []
        self.count = 0
        self.refused: Refused | None = None

    def read(self) -> None:
        def look() -> None:
            batch = self.journal.read(self.position, 0.0)
            assert batch.base is None
            self.position = batch.position
            self.entries += batch.entries

        self.attempt(look)

    def append(self) -> None:
        self.count += 1
        self.attempt(lambda: self.journal.append(f"{self.name}-{self.count}", entry(self.name, self.count)))

    def attempt(self, call: Callable[[], None]) -> None:
        if self.refused is None:
            try:
                call()
            except Refused as e:
                self.refused = e


def several(path: Path, count: int) -> list[Agent]:
    """Agents that have said one entry each, and have read all of them."""
    agents = [Agent(path, name) for name in "abcdefgh"[:count]]
    for agent in agents:
        agent.append()
    for agent in agents:
        agent.read()
    return agents


def overwrite(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


# ---- the shortest histories ----


def test_damage_behind_all_readers_stops_only_those_who_come_later(tmp_path: Path) -> None:
    """Forty bytes in the middle of the file: the agents that have read them go on, and say so to nobody. An agent that
    comes later would fold another job."""
    agents = several(tmp_path, 3)
    path = tmp_path / "job" / "journal"
    overwrite(path, path.stat().st_size // 2, 40 * b"#")
    agents[0].append()
    for agent in agents:
        agent.read()
    assert [agent.refused for agent in agents] == [None, None, None]
    assert agents[0].entries == agents[1].entries == agents[2].entries
    assert len(agents[0].entries) == 4
    for late in (Agent(tmp_path, "late"), Agent(tmp_path, "later")):
        late.read()
        assert late.refused is not None
        assert late.refused.refusal is Refusal.IDENTITY
        assert f"of {path}" in str(late.refused)
    silent = Agent(tmp_path, "silent")
    silent.append()
    assert silent.refused is not None
    agents[1].append()
    agents[2].read()
    assert agents[2].refused is None


def test_damage_of_the_last_record_stops_only_those_who_have_not_read_it(tmp_path: Path) -> None:
    """No later record tells of it. If the next writer vouched for the damage, the agents that were right had to end."""
    right, late = several(tmp_path, 2)
    right.append()
    right.read()
    path = tmp_path / "job" / "journal"
    overwrite(path, path.stat().st_size - 200, 40 * b"#")
    before = path.read_bytes()
    late.read()
    assert late.refused is not None
    other = Agent(tmp_path, "other")
    other.append()
    assert other.refused is not None
    assert path.read_bytes() == before
    right.append()
    right.read()
    assert right.refused is None
    assert len(right.entries) == 4


def test_a_line_of_another_program_ends_nobody(tmp_path: Path) -> None:
    """It is a `Filler` for all, as soon as a record vouches for it. Before, nobody can know what it was."""
    agents = several(tmp_path, 2)
    with open(tmp_path / "job" / "journal", "ab") as file:
        file.write(b"hello\n")
    for agent in agents:
        agent.read()
        assert len(agent.entries) == 2
    agents[0].append()
    agents += [Agent(tmp_path, "late")]
    for agent in agents:
        agent.read()
        assert agent.refused is None
        assert agent.entries == [entry("a", 1), entry("b", 1), Filler(), entry("a", 2)]


def test_agents_go_on_when_the_header_is_damaged(tmp_path: Path) -> None:
    """They know the journal by the last line that they have read. Nobody else can join."""
    agents = several(tmp_path, 2)
    overwrite(tmp_path / "job" / "journal", 5, b"#####")
    for agent in agents:
        agent.append()
        agent.journal.beat(ME, 1, ())
    for agent in agents:
        agent.read()
        assert agent.refused is None
        assert len(agent.entries) == 4
    late = Agent(tmp_path, "late")
    late.read()
    assert late.refused is not None
    assert late.refused.refusal is Refusal.IDENTITY


@pytest.mark.parametrize("target", ["no-such-file", "a-folder", "journal", "another-file"])
def test_a_journal_that_was_replaced_by_a_link_is_another_one(tmp_path: Path, target: str) -> None:
    """Wherever the link leads."""
    agents = several(tmp_path, 2)
    path = tmp_path / "job" / "journal"
    path.unlink()
    (path.parent / "a-folder").mkdir()
    (path.parent / "another-file").write_text("a line of another program\n")
    path.symlink_to(path.parent / target)
    agents[0].read()
    agents[1].append()
    for agent in agents:
        assert agent.refused is not None
        assert agent.refused.refusal is Refusal.IDENTITY


def _is_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("")


def _is_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _is_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("name", "harm", "words"),
    [
        ("", _is_a_file, "no folder (Not a directory)"),
        ("beats", _is_a_file, "no folder (Not a directory)"),
        ("lock", _is_a_folder, "no file (Is a directory)"),
        ("lock", _is_a_pipe, "no file (a pipe, a socket or a device)"),
        ("lock", lambda path: (path.unlink(), path.symlink_to("nowhere")), "no file (a link that leads nowhere)"),
        ("journal", _is_a_folder, "no file (Is a directory)"),
        ("journal", _is_a_pipe, "no file (a pipe, a socket or a device)"),
    ],
)
def test_what_stands_in_the_place_of_a_file_or_folder_is_named(
    tmp_path: Path, name: str, harm: Callable[[Path], object], words: str
) -> None:
    """The operator looks at what the line names. And a named pipe holds up whoever opens it."""
    (agent,) = several(tmp_path, 1)
    path = tmp_path / "job" / name
    harm(path)
    calls = {"beats": [lambda: agent.journal.beat(ME, 1, ())], "lock": [agent.append]}
    for call in calls.get(name, [agent.append, agent.read, lambda: agent.journal.beat(ME, 1, ())]):
        agent.refused = None
        agent.attempt(call)
        assert agent.refused is not None
        assert agent.refused.refusal is Refusal.IDENTITY
        assert f"cannot be used: {path} is {words}: another program has replaced it" in str(agent.refused)


@pytest.mark.parametrize("name", ["fold", "lock"])
def test_a_reader_waits_for_no_pipe(tmp_path: Path, name: str) -> None:
    """The fold and the note beside the lock are a help. A reader can do without them."""
    (agent,) = several(tmp_path, 1)
    for _ in range(MANY + 1):
        agent.append()
    (tmp_path / "job" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "job" / name)
    agent.read()
    assert agent.refused is None
    assert len(agent.entries) == MANY + 2


def test_a_file_that_was_cut_off_and_grew_again_is_another_journal(tmp_path: Path) -> None:
    """Also if it has the same length, and nobody knows what the end was."""
    one, other = several(tmp_path, 2)
    path = tmp_path / "job" / "journal"
    size = path.stat().st_size
    one.append()
    one.read()
    os.truncate(path, size)
    (tmp_path / "job" / "lock").unlink()
    other.append()
    assert other.refused is None
    one.read()
    assert one.refused is not None
    other.read()
    assert other.entries == [entry("a", 1), entry("b", 1), entry("b", 2)]


def test_a_writer_that_has_not_read_the_lost_end_does_not_write(tmp_path: Path) -> None:
    """The agents that have read the end would see another history."""
    one, other = several(tmp_path, 2)
    path = tmp_path / "job" / "journal"
    size = path.stat().st_size
    one.append()
    os.truncate(path, size)
    other.append()
    assert other.refused is not None
    assert path.stat().st_size == size


@pytest.mark.parametrize("harm", [b"", b"#", 400 * b"\0", b'"seen":"1 2","mac":""}'])
def test_a_damaged_note_beside_the_lock_harms_nobody(tmp_path: Path, harm: bytes) -> None:
    """It only helps to notice damage. So does a note of another journal."""
    agents = several(tmp_path, 2)
    (tmp_path / "job" / "lock").write_bytes(harm)
    for agent in agents:
        agent.append()
        agent.read()
        assert agent.refused is None


def test_a_damaged_fold_harms_nobody(tmp_path: Path) -> None:
    """And a fold of other entries is none."""
    one = opened(tmp_path)
    for i in range(MANY + 1):
        one.append(str(i), entry("a", i))
    one.publish(one.read(0, 0.0).position, Job())
    fold = tmp_path / "job" / "fold"
    good = fold.read_bytes()
    assert opened(tmp_path).read(0, 0.0).base == Job()
    for bad in (b"", good[:-1], good.replace(b'digest":"', b'digest":"0'), b"\0" * 100, 100 * b"x\n"):
        fold.write_bytes(bad)
        assert len(everything(opened(tmp_path))) == MANY + 1
    fold.unlink()
    fold.mkdir()
    assert len(everything(opened(tmp_path))) == MANY + 1
    one.publish(one.read(0, 0.0).position, Job())


def test_counters_that_were_damaged_or_removed_come_back_with_the_next_beat(tmp_path: Path) -> None:
    """Otherwise the node would be silent for ever."""
    one = opened(tmp_path)
    one.beat(ME, 1, ())
    path = tmp_path / "job" / "beats" / "me.0"
    for harm in (b"#" * 10, b"#" * 200, b"", b"\n\n"):
        path.write_bytes(harm)
        assert one.beat(ME, 7, [PEER]) == {ME: 7}
    path.unlink()
    path.parent.rmdir()
    assert one.beat(ME, 8, [PEER]) == {ME: 8}


# ---- any damage ----


def harm(dice: random.Random, path: Path) -> str:
    """Change the file in one way. Returns the way."""
    data = path.read_bytes()
    at, end = sorted(dice.choices(range(len(data) + 1), k=2))
    lines = data.split(b"\n")[:-1] or [b""]
    i, j = sorted(dice.choices(range(len(lines)), k=2))
    noise = dice.choice([dice.randbytes(dice.randint(1, 60)), bytes(dice.randint(1, 300)), b"hello\n", b"\n"])
    match way := dice.choice(["overwrite", "cut", "insert", "delete", "zeros", "swap", "without", "twice", "append"]):
        case "overwrite":
            data = (data[:at] + noise + data[at + len(noise) :])[: max(len(data), 1)]
        case "cut":
            data = data[:at]
        case "insert":
            data = data[:at] + noise + data[at:]
        case "delete":
            data = data[:at] + data[end:]
        case "zeros":
            data = data[:at] + bytes(len(data) - at)
        case "append":
            data += noise
        case _:
            if way == "swap":
                lines[i], lines[j] = lines[j], lines[i]
            elif way == "without":
                del lines[i:j]
            else:
                lines.insert(j, lines[i])
            data = b"".join(line + b"\n" for line in lines)
    path.write_bytes(data)
    return way


@pytest.mark.parametrize("seed", range(60))
def test_agents_that_go_on_have_read_the_same(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens to the file, and wherever the readers are. Sometimes the lock is removed as well."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr("reknit.adapters.journals.file.turn.REST_S", 0.0)
    dice = random.Random(seed)
    agents = several(tmp_path, 3)
    path = tmp_path / "job" / "journal"
    for step in range(40):
        if step in (12, 24):
            harm(dice, path)
            if dice.random() < 0.3:
                (tmp_path / "job" / "lock").unlink(missing_ok=True)
            agents.append(Agent(tmp_path, "xy"[step == 24]))
        agent = dice.choice(agents)
        agent.append() if dice.random() < 0.5 else agent.read()
        if dice.random() < 0.3:
            for agent in agents:
                agent.read()
            going = [agent for agent in agents if agent.refused is None]
            assert len({(agent.position, tuple(agent.entries)) for agent in going}) <= len({a.position for a in going})
    for agent in agents:
        agent.append()
    for agent in agents * 2:
        agent.read()
    # Who goes on has read all there is, and the same as everybody else who goes on.
    going = [agent for agent in agents if agent.refused is None]
    assert len({(agent.position, tuple(agent.entries)) for agent in going}) <= 1
    for agent in going:
        said = [entry(agent.name, i + 1) for i in range(agent.count)]
        assert [e for e in agent.entries if e in said] == said
    assert all("\n" not in str(agent.refused) for agent in agents)
