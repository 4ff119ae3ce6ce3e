"""From the text of one option to its value. A reader raises `ValueError`, whose text says what is expected."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import Any

from reknit.adapters.keeper.common.environment import TIMER_FILE

ENABLE_FILE_TIMER = "TORCHELASTIC_ENABLE_FILE_TIMER"
HEALTH_CHECK_PORT = "TORCHELASTIC_HEALTH_CHECK_PORT"
MOST_PORTS = 65535
MOST_GROUPS = 2**32 - 2
MOST_NODES = 1_000_000
"""A larger number is a typing error."""
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
"""Words for yes and no, in lower case."""
DEVICES = ("cpu", "gpu", "xpu", "auto")
"""Words that stand for a number of workers. See `devices`."""


def text(value: str) -> str:
    return value


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """A whole number from `least` to `most`."""

    def read(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            raise ValueError("a whole number expected") from None
        return _within(number, least, most)

    return read


def restarts(value: str) -> dict[str, Any]:
    """Fields of `RestartPolicy`: `3`, or `3/steady`, or `3/600` or `3/10m` if a round is steady after 600 seconds."""
    count, slash, steady = value.partition("/")
    try:
        policy: dict[str, Any] = {"max_restarts": int(count)}
        if slash:
            policy["renews"] = True
        if slash and steady != "steady":
            policy["steady_s"] = _duration(steady)
    except ValueError:
        raise ValueError("N, N/steady or N/TIME expected, for example 3/600 or 3/10m") from None
    _within(policy["max_restarts"], 0, None)
    return policy


def modules(value: str) -> bool | tuple[str, ...]:
    """Names of modules: `torch,transformers`. `1` or `true`: True. Empty, `0` or `false`: False."""
    if value.lower() in TRUE or value.lower() in FALSE:
        return value.lower() in TRUE
    names = tuple(name.strip() for name in value.split(","))
    if not all(all(map(str.isidentifier, name.split("."))) for name in names):
        raise ValueError("names of modules expected, for example torch,transformers")
    return names


def _within(number: int, least: int, most: int | None) -> int:
    if number < least:
        raise ValueError(f"must be at least {least}")
    if most is not None and number > most:
        raise ValueError(f"must be at most {most}")
    return number


def group(value: str) -> int:
    """The number of a group of users, from its name or number."""
    if value.isdecimal():
        return _within(int(value), 0, MOST_GROUPS)
    import grp  # slow to import on some hosts, and rarely needed

    try:
        return grp.getgrnam(value).gr_gid
    except KeyError:
        raise ValueError("this host knows no such group") from None


def optional(read: Callable[[str], float | int]) -> Callable[[str], float | int | None]:
    """Like `read`, and None for an empty text, the default of an option without a default value."""
    return lambda value: read(value) if value else None


def workers(most: int) -> Callable[[str], int | str]:
    """A number of workers, or one of `DEVICES`."""

    def read(value: str) -> int | str:
        if value in DEVICES:
            return value
        try:
            number = int(value)
        except ValueError:
            raise ValueError("a number, cpu, gpu, xpu or auto expected") from None
        return _within(number, 1, most)

    return read


def nodes(value: str) -> tuple[int, int]:
    """The smallest and the largest number of nodes, from `N` or `MIN:MAX`."""
    low, colon, high = value.partition(":")
    try:
        least, most = int(low), int(high if colon else low)
    except ValueError:
        raise ValueError("a number or MIN:MAX expected") from None
    if not 0 < least <= most:
        raise ValueError("MIN:MAX with 0 < MIN <= MAX expected")
    if most > MOST_NODES:
        raise ValueError(f"at most {MOST_NODES} nodes expected")
    return least, most


def seconds(value: str) -> float:
    number = _number(value)
    if not 0 <= number < float("inf"):
        raise ValueError("0 or more seconds expected")
    return number


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError("a number of seconds expected") from None


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def age(value: str) -> float:
    """Seconds, from `90s`, `30m`, `12h` or `7d`. A number without a unit is refused, except 0: somebody who writes 7
    means days, and 7 seconds would remove nearly every job."""
    try:
        age_s = _duration(value)
    except ValueError:
        raise ValueError("a time such as 90s, 30m, 12h or 7d expected") from None
    if age_s and value[-1] not in _UNITS:
        raise ValueError("a unit is missing: s, m, h or d, for example 7d")
    return age_s


def _duration(value: str) -> float:
    """Seconds, from `90`, `90s`, `30m`, `12h` or `7d`."""
    unit = value[-1:] if value[-1:] in _UNITS else ""
    return seconds(value.removesuffix(unit)) * _UNITS.get(unit, 1)


def seconds_from(least: float, most: float) -> Callable[[str], float]:
    def read(value: str) -> float:
        number = _number(value)
        if not number >= least:  # so that NaN is refused as well
            raise ValueError(f"must be at least {least} seconds")
        if number > most:
            raise ValueError(f"must be at most {most:.0f} seconds")
        return number

    return read


def port(value: str) -> int:
    """A port number. 0 is allowed and means any free port."""
    if not (value.isdecimal() and len(value) <= len(str(MOST_PORTS)) and int(value) <= MOST_PORTS):
        raise ValueError(f"a port is a number up to {MOST_PORTS}")
    return int(value)


def one_of(*words: str) -> Callable[[str], str]:
    def read(value: str) -> str:
        if value not in words:
            raise ValueError(f"{' or '.join(filter(None, (', '.join(words[:-1]), words[-1])))} expected")
        return value

    return read


def truth(value: str) -> bool:
    """A truth value as torchelastic reads it in `--rdzv-conf`."""
    if value.lower() in ("1", "true", "t", "yes", "y"):
        return True
    if value.lower() in ("0", "false", "f", "no", "n"):
        return False
    raise ValueError("true or false expected")


def masks(value: str) -> int | Mapping[int, int]:
    """One mask for all workers (`3`), or masks by local rank (`0:1,1:3`). In a mask 1 is stdout and 2 is stderr.

    torchrun takes only local ranks of one digit. Here they may have more digits.
    """
    try:
        if ":" not in value:
            return _mask(int(value))
        pairs = [pair.split(":") for pair in value.split(",")]
        return {int(rank): _mask(int(mask)) for rank, mask in pairs}
    except ValueError:
        raise ValueError("0, 1, 2 or 3 expected, or RANK:N,RANK:N with such N") from None


def _mask(number: int) -> int:
    if number not in (0, 1, 2, 3):
        raise ValueError(number)
    return number


def ranks(value: str) -> frozenset[int]:
    try:
        return frozenset(int(rank) for rank in value.split(",")) if value else frozenset()
    except ValueError:
        raise ValueError("numbers separated by commas expected") from None


def signals(value: str) -> tuple[int, ...]:
    """Numbers of the named signals. SIGKILL and SIGSTOP are refused: no process can handle them. A name that this
    system does not know is left out, as in torchrun: see `unknown_signals`."""
    numbers = []
    for name in _words(value):
        number = getattr(signal, name, None)
        if not isinstance(number, signal.Signals):
            continue
        if number in (signal.SIGKILL, signal.SIGSTOP):
            raise ValueError(f"{name} cannot be handled")
        numbers.append(int(number))
    return tuple(numbers)


def timer_file(environ: Mapping[str, str]) -> str | None:
    """`Settings.timer_file`, as the two variables of torchelastic say it (docs/torchelastic.md#timers)."""
    return environ.get(TIMER_FILE, "") if environ.get(ENABLE_FILE_TIMER) == "1" else None


def unknown_signals(value: str) -> tuple[str, ...]:
    """The names in this list that are no signals of this system."""
    return tuple(name for name in _words(value) if not isinstance(getattr(signal, name, None), signal.Signals))


def _words(value: str) -> list[str]:
    return [word for word in (part.strip() for part in value.split(",")) if word]
