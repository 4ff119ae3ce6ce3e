"""What an agent knows of one life of a journal in a TCPStore. Each new life begins with a new `Course`."""

from __future__ import annotations

from reknit.adapters.journals.history import Life, Prefix
from reknit.adapters.journals.tcpstore.keys import Keys


class Course:
    """The attributes of the reader are used by the reader's thread alone, and those of the writer by the writer's."""

    def __init__(self, keys: Keys, life: Life, header: bytes, *, starts_over: bool) -> None:
        self.life = life
        self.header = header
        self.starts_over = starts_over
        """This agent has read another journal before, and the next read must tell it to begin anew."""
        self.has_other_base = False
        """This life may begin with another fold than the one before ended with. So the next read must tell the fold."""
        self.is_telling = False
        """The reader has read what these two ask for. The agent has yet to fold it."""
        self.keys = keys.of(life.name)
        self.prefix: Prefix | None = Prefix(life.position, life.digest)
        """What was read. None: reading began in the middle, so there is no digest."""
        self.seen = ""
        """`prefix` as it stands in records. The reader writes it, and the writer reads it."""
        self.is_entered = False
        """The reader has read from this life."""
        # The reader's:
        self.crowd = 1
        """The largest number of entries that was waited for lately. As many may still be coming."""
        self.is_read = False
        """The last look found no entry after those that were read. So the next read waits at once, and does not look
        before."""
        self.known_taken = (0, 0.0)
        """A number of taken slots, and the monotonic time at which this reader first saw that number."""
        self.claims: set[int] = set()
        """Claims of this reader that it has not kept yet. Each is the position of the fold before."""
        # The writer's:
        self.taken: tuple[str, int, bytes] | None = None
        """A token, the slot that was taken for it and may not be filled yet, and the record that fills it. None: there
        is no such slot."""

    def taken_in(self) -> None:
        """The agent has folded what was read last. A link may drop what was read before, and read it again."""
        if self.is_telling:
            self.has_other_base = self.has_other_base and self.starts_over
            self.starts_over = self.is_telling = False
