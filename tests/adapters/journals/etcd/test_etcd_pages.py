"""The batch scripts of docs/slurm.md and the manifests of examples/etcd.yaml, run as they stand there.

There is no Slurm here. `SRUN` plays its part: it starts a command on each host, and knows the options that the page
uses. A host is a loopback address.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from reknit.adapters.journals.etcd.gateway import Cluster, Gateway, put
from tests.support.command import REKNIT, Run
from tests.support.etcd import patiently
from tests.support.etcd_hosts import LOOPBACK, SCRIPT
from tests.support.stores import free_port, needs_torch
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[4]
MANIFEST = ROOT / "examples" / "etcd.yaml"
SRUN = f"""#!{sys.executable}
# Starts the command on each host, hands on SIGUSR1, makes SIGKILL of SIGTERM, and ends with the highest status.
import os, signal, subprocess, sys
words, options = sys.argv[1:], {{}}
while words[0].startswith("--"):
    name, _, value = words.pop(0)[2:].partition("=")
    options[name] = value
known = {{"nodes", "ntasks", "nodelist", "overlap", "cpus-per-task", "no-kill", "kill-on-bad-exit"}}
assert options.keys() <= known, options
hosts = options.get("nodelist", os.environ["HOSTS"]).split(",")
assert options.get("nodes", options.get("ntasks")) in (None, str(len(hosts)))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGTERM])
tasks = [
    subprocess.Popen(words, env={{**os.environ, "SLURMD_NODENAME": host}}, preexec_fn=lambda:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1, signal.SIGTERM]))
    for host in hosts
]
def hand_on(signum, frame):
    for task in tasks:
        task.send_signal(signal.SIGKILL if signum == signal.SIGTERM else signum)
for signum in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(signum, hand_on)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1, signal.SIGTERM])
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames $SLURM_JOB_NODELIST" ] && echo "$HOSTS" | tr , '\\n'
"""
ONE_REKNIT = f"""#!/bin/sh
# One worker on each host instead of eight. A host is known by its address.
shift
exec {REKNIT} run "$@" --node-id="$SLURMD_NODENAME" --local-addr="$SLURMD_NODENAME"
"""
TRAIN = """
import os
os.write(1, f"trained by {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n".encode())  # in one piece
"""


def batch_script(anchor: str) -> str:
    """The first batch script after this anchor."""
    after = (ROOT / "docs" / "slurm.md").read_text().partition(f'<a id="{anchor}"></a>')[2]
    return after.partition("```sh\n")[2].partition("```")[0]


def job_with_a_free_port() -> int:
    """The page computes the port from the id of the job."""
    while not 20000 <= (port := free_port()) < 30000:
        pass
    return (port - 20000) // 2


def fit(script: str) -> str:
    """The script with fewer workers and shorter times. All else is as on the page."""
    assert "--nproc-per-node=8" in script
    script = script.replace("--nproc-per-node=8", "--nproc-per-node=1 --rdzv-conf=last_call_timeout=600")
    return script.replace("29400", str(free_port()))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["c10d", "etcd"])
def test_the_batch_script_runs_a_job_and_leaves_nothing(tmp_path: Path, form: str) -> None:
    """People copy it."""
    if form == "c10d":
        needs_torch()
    if form == "etcd" and shutil.which("etcd") is None:
        pytest.skip("etcd is not installed")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("reknit", ONE_REKNIT)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    shutil.copy(SCRIPT, tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "batch.sh").write_text(fit(batch_script(form)))
    environment = {
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOSTS": ",".join([*LOOPBACK, "127.0.0.14"]),
        "SLURM_JOB_NODELIST": "node[0-3]",
        "SLURM_JOB_ID": str(job_with_a_free_port()),
        "SLURM_CPUS_PER_TASK": "1",
    }
    before = sorted(path.name for path in tmp_path.iterdir())
    words = [sys.executable, "-c", "import os; os.execvp('bash', ['bash', 'batch.sh'])"]
    with Run(tmp_path, *words, env=environment) as job:
        status = job.end()
    assert status == 0, job.err
    assert sorted(re.findall(r"trained by (\d of 4)", job.out)) == ["0 of 4", "1 of 4", "2 of 4", "3 of 4"]
    assert (" serves at " in job.err) == (form == "etcd")
    left = {path.name for path in tmp_path.iterdir()} - set(before)
    assert not [name for name in left if name.startswith("etcd-")], "the members have removed their data"


def test_the_manifests_start_a_cluster(tmp_path: Path) -> None:
    """Three members with the command of the StatefulSet. Names of the DNS become addresses."""
    yaml = pytest.importorskip("yaml")
    if shutil.which("etcd") is None or shutil.which("setpriv") is None:
        pytest.skip("etcd or setpriv is not installed")
    service, members, budget = yaml.safe_load_all(MANIFEST.read_text())
    assert [part["kind"] for part in (service, members, budget)] == ["Service", "StatefulSet", "PodDisruptionBudget"]
    assert members["spec"]["serviceName"] == service["metadata"]["name"]
    (container,) = members["spec"]["template"]["spec"]["containers"]
    ports = dict(zip(("2379", "2380"), (free_port(), free_port()), strict=True))
    with ExitStack() as stack:
        for i in range(members["spec"]["replicas"]):
            command = [_here(word, i, ports, tmp_path) for word in container["command"]]
            guarded = ["setpriv", "--pdeathsig", "KILL", *command]
            process = stack.enter_context(subprocess.Popen(guarded))
            stack.callback(process.send_signal, signal.SIGKILL)
        endpoints = [(host, ports["2379"]) for host in LOOPBACK]
        gateway = stack.enter_context(closing(Gateway(Cluster(endpoints), PATIENCE_S)))
        assert patiently(gateway.transact, [], [put("/k", b"v")], []).is_met


def _here(word: str, i: int, ports: dict[str, int], path: Path) -> str:
    word = word.replace("$(POD_NAME)", f"etcd-{i}").replace("0.0.0.0", LOOPBACK[i]).replace("/data", str(path / f"{i}"))
    word = re.sub(r"etcd-(\d)\.etcd", lambda found: LOOPBACK[int(found[1])], word)
    return re.sub(r"2379|2380", lambda found: str(ports[found[0]]), word)


def test_the_pages_name_what_the_manifests_make() -> None:
    """The script, the manifests and the pages say the same of etcd."""
    yaml = pytest.importorskip("yaml")
    _, members, _ = yaml.safe_load_all(MANIFEST.read_text())
    (container,) = members["spec"]["template"]["spec"]["containers"]
    options = re.search(r"^OPTIONS = \((.*?)^\)", SCRIPT.read_text(), re.S | re.M)
    assert options is not None
    assert set(re.findall(r'"(--\S+)"', options[1])) <= set(container["command"])
    places = ",".join(f"etcd-{i}.etcd:2379" for i in range(members["spec"]["replicas"]))
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    assert f"--rdzv-endpoint={places}\n" in page
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.S)
    parts = [part for block in blocks for part in yaml.safe_load_all(block)]
    assert [part["kind"] for part in parts if "kind" in part] == ["Service", "Job"]
