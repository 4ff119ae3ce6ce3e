"""Who is blamed for a hang: each kind of `hung.py`, three ranks, on one node and on two. Rank 1 is to blame.

    python benchmarks/hangs.py                       # all kinds on one node, about five minutes
    python benchmarks/hangs.py --nodes 2 --only all_reduce,culprit_loops

Where py-spy is not installed, the figures are those of faulthandler and the kernel.
One warm job plays all kinds, one in each round. "right": rank 1 is named. "cannot tell": the report says so, whomever
it names. "wrong": another rank is named.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
HANG_AFTER_S = 3


def kinds() -> list[str]:
    env = os.environ | {"RANK": "0", "WORLD_SIZE": "3", "HANGS_FOLDER": ""}
    command = [sys.executable, "-c", "import hung; print(*hung.KINDS)"]
    return subprocess.run(command, cwd=HERE, env=env, capture_output=True, text=True, check=True).stdout.split()


def play(names: list[str], nodes: int) -> str:
    """What the first node says."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"HANGS": ",".join(names), "HANGS_FOLDER": folder}
        argv = [
            str(BIN / "reknit"),
            "run",
            f"--max-restarts={len(names) - 1}",
            "--warm",
            f"--hang-after={HANG_AFTER_S}",
        ]
        argv += ["--start-timeout=60", "--shutdown-timeout=1", "--log-times=never"]
        if nodes == 2:
            argv += ["--nnodes=2", "--rdzv-backend=file", f"--rdzv-endpoint={folder}/job", "--rdzv-id=hangs"]
        runs = []
        for node, workers in enumerate([3] if nodes == 1 else [2, 1]):
            own = [] if nodes == 1 else [f"--node-id=n{node}", f"--node-rank={node}"]
            with open(f"{folder}/err{node}", "wb") as err:
                command = [*argv, *own, f"--nproc-per-node={workers}", str(HERE / "hung.py")]
                runs.append(subprocess.Popen(command, env=env, stderr=err, stdout=err))
        for run in runs:
            run.wait()
        return Path(f"{folder}/err0").read_text(errors="replace")


def verdict(said: str) -> str:
    """What one round's lines say."""
    blamed = re.findall(r"rank (\d+) on node \S+ holds up the others", said)
    if blamed:
        return "right" if blamed[-1] == "1" else "wrong"
    if re.search(r"ranks [\d,-]+ hold up the others", said):
        return "wrong"
    if "cannot be told" in said or "all of them stand there" in said:
        return "cannot tell"
    failed = re.findall(r"rank (\d+) on node \S+ (?:failed|hung):", said)
    return "no report" if not failed else "right" if failed[-1] == "1" else "wrong"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=1, choices=(1, 2))
    parser.add_argument("--only", default="")
    parser.add_argument("--show", action="store_true", help="what is said of each kind that is not blamed rightly")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else kinds()
    said = play(names, args.nodes)
    rounds = re.split(r"^reknit: round \d+(?: \(.*\))?: .*$", said, flags=re.MULTILINE)[1:]
    count: Counter[str] = Counter()
    for at, name in enumerate(names):
        lines = rounds[at] if at < len(rounds) else ""
        found = verdict(lines)
        count[found] += 1
        print(f"{name:45} {found}")
        if args.show and found != "right":
            print("\n".join(f"    | {line}" for line in lines.splitlines()[:40]))
    print(f"{len(names)} kinds: " + ", ".join(f"{n} {what}" for what, n in count.most_common()))


if __name__ == "__main__":
    main()
