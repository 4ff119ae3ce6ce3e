"""Python imports this module in every zygote and in every worker that tells what it has imported, just before it runs
the program of its command line (`program.py`).

Python calls the module `sitecustomize` and finds it by PYTHONPATH. It stands alone in its folder, so that this variable
makes nothing else importable. A worker that starts cold imports nothing here that Python has not imported by itself: a
module beside its script may have the same name.
"""

import atexit
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_VARIABLE = "REKNIT_ZYGOTE"
_LEARNS = "learns:"
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
    if what.startswith(_LEARNS):
        _tell_at_the_end(what[len(_LEARNS) :])
    elif what:
        _tell_at_the_end(*_hold(what))


def _hold(stage: str) -> "tuple[str, list[str]]":
    """Be a zygote. Returns in workers only, what `hold` returns. Whatever goes wrong ends the process: it must not run
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
        found = program.hold(stage, loaded)
        is_worker = True
        return found
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


def _tell_at_the_end(path: str, known: "list[str] | None" = None) -> None:
    """When this process ends, write the names of the modules of Python and of installed packages that it has imported
    into this file. Empty: write nothing. `known`: modules that were imported for it. None: there are none."""
    if not path:
        return
    before = set(sys.modules) if known else set()
    own, standard = os.getpid(), os.path.dirname(os.path.abspath(os.__file__)) + os.sep

    def tell() -> None:
        if os.getpid() != own:
            return  # this is a fork of the worker
        names = dict.fromkeys(known or [])
        for name, module in [*sys.modules.items()]:
            if name in before or not isinstance(name, str):
                continue
            try:
                # Not `getattr`: a module may load itself when it is asked for an attribute.
                origin = object.__getattribute__(module, "__dict__")["__spec__"].origin
            except (AttributeError, KeyError):
                continue
            if isinstance(origin, str) and ("-packages" + os.sep in origin or origin.startswith(standard)):
                names[name] = None
        try:
            with open(path, "w") as file:
                file.write("\n".join(names))
        except (OSError, UnicodeError):
            pass  # it would only have been faster the next time

    atexit.register(tell)


_be_asked()
if getattr(sys.modules.get(__name__), "__file__", __file__) == __file__:
    # Python goes on with the module that it would have found without this one. If there is none, the error says so, as
    # Python expects. In a worker of a zygote, the zygote has imported that module already.
    sys.modules.pop(__name__, None)
    import sitecustomize  # type: ignore[import-not-found] # noqa: F401  # it need not exist
