"""Why a worker failed, from its error file, its traceback and its end."""
