"""Python imports this module in every zygote, just before it runs the program of its command line (`program.py`).

Python calls the module `sitecustomize` and finds it by PYTHONPATH. It stands alone in its folder, so that this variable
makes nothing else importable.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_VARIABLE = "REKNIT_ZYGOTE"
_SOCKET = 8


def _be_asked() -> None:
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _HERE]
    sys.path_importer_cache.pop(_HERE, None)
    what = os.environ.pop(_VARIABLE, "")
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)[1:]
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    else:
        os.environ.pop("PYTHONPATH", None)
    if what:
        _hold(what)


def _hold(stage: str) -> None:
    """Be a zygote. Returns in workers only. Whatever goes wrong ends the process: it must not run
    the program by mistake."""
    is_worker, zygote = False, os.getpid()
    try:
        if sys.version_info < (3, 11):  # noqa: UP036  # this is the Python of the workers
            raise RuntimeError("Python 3.11 or newer is needed")
        loaded = set(sys.modules)
        root = _HERE
        for _ in range(5):  # hook, zygote, keeper, adapters, reknit, and the folder that holds the package
            root = os.path.dirname(root)
        before = [*sys.path]
        sys.path.append(root)
        from reknit.adapters.keeper.zygote import program

        sys.path[:] = before
        # The script may import reknit from another place, in another version.
        for name in set(sys.modules) - loaded:
            if name.partition(".")[0] == "reknit":
                del sys.modules[name]
        program.hold(stage, loaded)
        is_worker = True
    except KeyboardInterrupt:
        import signal

        signal.signal(signal.SIGINT, signal.SIG_DFL)  # as Python does when nobody has handled it
        os.kill(os.getpid(), signal.SIGINT)
        raise
    except BaseException as error:
        if os.getpid() == zygote:
            _say_why(error)
        else:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
        raise
    finally:
        if not is_worker:
            os._exit(70)


def _say_why(error: BaseException) -> None:
    """Tell the keeper why there can be no zygote. It says so in one line."""
    import json

    message = {"fails": f"{type(error).__name__}: {error}"}
    try:
        os.write(_SOCKET, json.dumps(message).encode() + b"\n")
    except OSError:
        pass  # it is gone


_be_asked()
if getattr(sys.modules.get(__name__), "__file__", __file__) == __file__:
    # Python goes on with the module that it would have found without this one. If there is none, the error says so, as
    # Python expects. In a worker of a zygote, the zygote has imported that module already.
    sys.modules.pop(__name__, None)
    import sitecustomize  # type: ignore[import-not-found] # noqa: F401  # it need not exist
