"""The counterpart of `torch.distributed.run` for programs: `run(parse_args([...]))` runs an agent in this process.

It raises where a command would exit. The command itself is `reknit run`, which is faster and reports in one line. As in
torch, the module is a command as well: `python -m reknit.elastic.run`. It shows the traceback of what `run` raises. The
options are those of torchrun. See docs/options.md for what they mean.
"""

from __future__ import annotations

import os
import sys
import uuid
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reknit.app.cli.options import OPTIONS, Option
from reknit.app.input import devices, readers
from reknit.app.settings import MOST_WORKERS
from reknit.elastic.launcher.api import LaunchConfig, elastic_launch
from reknit.elastic.multiprocessing.errors import record
from reknit.elastic.utils.logging import get_logger

from .multiprocessing import DefaultLogsSpecs, LogsSpecs, Std
from .utils import macros

logger = get_logger(__name__)


def _listed(text: str) -> list[str]:
    """A list with commas. Two commas are one comma within a word."""
    return [word.replace("\0", ",") for word in text.replace(",,", "\0").split(",") if word]


_OWN = {
    "admission",
    "fence-after",
    "hang-after",
    "start-timeout",
    "warm",
    "help",
    "help-all",
    "log-line-prefix-template",
    "node-id",
    "output",
    "dry-run",
    "log-times",
    "no-trace",
    "log-format",
    "quiet",
    "stdin",
    "rdzv-secret",
    "store-timeout",
    "use-env",
    "verbose",
}
"""Options of `reknit run` that `torch.distributed.run` does not have."""
_TYPES: Mapping[str, Callable[[str], Any]] = {
    "max-restarts": int,
    "monitor-interval": float,
    "node-rank": int,
    "master-port": int,
    "shutdown-timeout": int,
    "duplicate-stdout-filters": _listed,
    "duplicate-stderr-filters": _listed,
}
"""By option: the type of its value. The others are texts."""
_DEFAULTS: Mapping[str, Any] = {
    "duplicate-stdout-filters": [],
    "duplicate-stderr-filters": [],
    "local-addr": None,
    "log-dir": None,
    "logs-specs": None,
    "master-port": None,
    "nnodes": "1:1",
    "node-rank": 0,
    "numa-binding": None,
    "rdzv-id": "none",
    "shutdown-timeout": None,
}
"""By option: its default, where torch's is another than that of `reknit run`."""
_DEFAULT_MASTER_PORT = 29500


def get_args_parser() -> ArgumentParser:
    """A parser with the options of torchrun. Its defaults come from the variables `PET_<NAME>`, as in torch."""
    parser = ArgumentParser(prog="reknit.elastic.run", description="An elastic job, run in this process")
    for option in OPTIONS:
        if option.name not in _OWN:
            _add(parser, option)
    parser.add_argument("training_script", help="the script, the module or the program")
    parser.add_argument("training_script_args", nargs=REMAINDER)
    return parser


def _add(parser: ArgumentParser, option: Option) -> None:
    spellings = dict.fromkeys((f"--{option.name}", f"--{option.name.replace('-', '_')}"))
    short = [f"-{option.short}"] if option.short else []
    text = os.environ.get(option.variable)
    dest, help_text = option.name.replace("-", "_"), option.help.replace("%", "%%")
    names = [*short, *spellings]
    if not option.metavar:
        parser.add_argument(*names, action="store_true", default=bool(int(text or "0")), dest=dest, help=help_text)
        return
    default = _DEFAULTS.get(option.name, option.default) if text is None else text
    kind = _TYPES.get(option.name, str)
    parser.add_argument(*names, type=kind, default=default, metavar=option.metavar, dest=dest, help=help_text)


def parse_args(args: Sequence[str] | None) -> Namespace:
    """The options of a command line. None: this program's own. As argparse does, this ends the program if an option is
    wrong."""
    return get_args_parser().parse_args(args)


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """`2` is (2, 2), and `1:4` is (1, 4). Splits any numbers, as torch does: `config_from_args` judges them. Raises
    `ValueError`, for more than two numbers `RuntimeError` as torch."""
    if nnodes.count(":") > 1:
        raise RuntimeError(f'nnodes={nnodes} is not in "MIN:MAX" format')
    least, colon, most = nnodes.partition(":")
    try:
        return int(least), int(most if colon else least)
    except ValueError:
        raise ValueError(f"--nnodes={nnodes}: a number or MIN:MAX expected") from None


def _nodes(nnodes: str) -> tuple[int, int]:
    """The numbers of nodes of a job."""
    parse_min_max_nnodes(nnodes)
    try:
        return readers.nodes(nnodes)
    except ValueError as error:
        raise ValueError(f"--nnodes={nnodes}: {error}") from None


def determine_local_world_size(nproc_per_node: str) -> int:
    """Workers on this node: the number, or the number of CPUs or devices (`cpu`, `gpu`, `xpu`, `auto`). Raises
    `ValueError`."""
    try:
        asked_for = readers.workers(MOST_WORKERS)(nproc_per_node)
        return asked_for if isinstance(asked_for, int) else devices.count(asked_for, os.environ)
    except Exception as error:
        raise ValueError(f"--nproc-per-node={nproc_per_node}: {error}") from None


def get_rdzv_endpoint(args: Namespace) -> str:
    """The endpoint that was given. For a static rendezvous without one, it is the master's address and port."""
    if args.rdzv_backend == "static" and not args.rdzv_endpoint:
        return f"{args.master_addr}:{args.master_port}"
    return str(args.rdzv_endpoint)


def get_use_env(args: Namespace) -> bool:
    """Whether workers find their local rank in the environment only. True unless an older parser says otherwise."""
    return bool(getattr(args, "use_env", True))


def _get_logs_specs_class(logs_specs_name: str | None) -> type[LogsSpecs]:
    """The class of this name in the entry point group `torchrun.logs_specs`. None: `DefaultLogsSpecs`."""
    if logs_specs_name is None:
        return DefaultLogsSpecs
    from importlib.metadata import entry_points

    found = [*entry_points(group="torchrun.logs_specs", name=logs_specs_name)]
    if logs_specs_name == "default":
        return DefaultLogsSpecs
    if not found:
        raise ValueError(f"--logs-specs={logs_specs_name}: no such name in the entry points torchrun.logs_specs")
    loaded: type[LogsSpecs] = found[0].load()
    return loaded


def _rdzv_configs(text: str) -> dict[str, Any]:
    configs: dict[str, Any] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        key, _, value = (word.strip() for word in item.partition("="))
        if not (key and value):
            raise ValueError(f"--rdzv-conf: {item}: KEY=VALUE expected")
        configs[key] = value
    return configs


def config_from_args(args: Namespace) -> tuple[LaunchConfig, Callable[..., Any] | str, list[str]]:
    """The configuration, the entrypoint and its arguments. Raises `ValueError` for what means nothing, and
    `RuntimeError` as `parse_min_max_nnodes` does."""
    min_nodes, max_nodes = _nodes(args.nnodes)
    if args.max_restarts < 0:
        raise ValueError(f"--max-restarts={args.max_restarts}: 0 or more")
    nproc_per_node = determine_local_world_size(args.nproc_per_node)
    configs = _rdzv_configs(args.rdzv_conf)
    if args.rdzv_backend == "static":
        configs["rank"] = args.node_rank
    filter_ = args.local_ranks_filter
    config = LaunchConfig(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        nproc_per_node=nproc_per_node,
        run_id=args.rdzv_id,
        role=args.role,
        rdzv_endpoint=get_rdzv_endpoint(args),
        rdzv_backend=args.rdzv_backend,
        rdzv_configs=configs,
        max_restarts=args.max_restarts,
        monitor_interval=args.monitor_interval,
        start_method=args.start_method,
        log_line_prefix_template=os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        local_addr=args.local_addr,
        event_log_handler=args.event_log_handler,
        signals_to_handle=args.signals_to_handle,
        duplicate_stdout_filters=args.duplicate_stdout_filters,
        duplicate_stderr_filters=args.duplicate_stderr_filters,
        virtual_local_rank=args.virtual_local_rank,
        shutdown_timeout=args.shutdown_timeout,
        logs_specs=_get_logs_specs_class(args.logs_specs)(
            log_dir=args.log_dir,
            redirects=Std.from_str(args.redirects),
            tee=Std.from_str(args.tee),
            local_ranks_filter={*readers.ranks(filter_)} if filter_ else None,
        ),
        # As in torch, but for the workers only. Otherwise each worker would start as many threads as there are cores.
        env={"OMP_NUM_THREADS": "1"} if nproc_per_node > 1 and "OMP_NUM_THREADS" not in os.environ else {},
    )
    return config, *_entrypoint(args)


def _entrypoint(args: Namespace) -> tuple[Callable[..., Any] | str, list[str]]:
    if args.run_path:
        return run_script_path, [args.training_script, *args.training_script_args]
    local_rank = [] if get_use_env(args) else [f"--local-rank={macros.local_rank}"]
    words = [args.training_script, *local_rank, *args.training_script_args]
    if args.no_python:
        if args.module:
            raise ValueError("--module and --no-python exclude each other")
        return words[0], words[1:]
    return os.getenv("PYTHON_EXEC", sys.executable), ["-u", *(["-m"] if args.module else []), *words]


def run_script_path(training_script: str, *training_script_args: str) -> None:
    """Run a script as `__main__` in this process. `--run-path` gives this function to the workers."""
    import runpy

    sys.argv = [training_script, *training_script_args]
    runpy.run_path(training_script, run_name="__main__")


def run(args: Namespace) -> None:
    """Run the job that these options ask for, until it has ended. Raises as `elastic_launch`."""
    is_alone = parse_min_max_nnodes(args.nnodes)[1] == 1
    is_plain = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None
    if args.standalone or (is_plain and is_alone):
        args.rdzv_backend = "c10d"
        args.rdzv_endpoint = "localhost:0"
        args.rdzv_id = str(uuid.uuid4())
    if args.master_port is None:
        args.master_port = _DEFAULT_MASTER_PORT
    config, entrypoint, words = config_from_args(args)
    elastic_launch(config=config, entrypoint=entrypoint)(*words)


@record
def main(args: Sequence[str] | None = None) -> None:
    """Parse a command line, and run its job. None: this program's own."""
    run(parse_args(args))


if __name__ == "__main__":
    main()
