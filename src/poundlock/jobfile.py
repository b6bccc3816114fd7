"""Imports job files, which define `pipeline(spark, args) -> Pipeline`, without starting a query."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, cast

from poundlock.errors import PoundlockError, UsageError

if TYPE_CHECKING:
    from poundlock.spark.pipeline.pipeline import Pipeline

Maker = Callable[[Any, Sequence[str]], "Pipeline"]


def load(path: Path) -> Maker:
    """Run a job file as an import does, and return the function that makes its pipeline.

    `pipeline` in the file may also be a Pipeline. Then the function returns that one.
    """
    if not path.is_file():
        raise UsageError(f"there is no job file {path}")
    name = f"poundlock_job_{path.stem}"  # a job called json.py must not hide another module
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent.absolute()))
    with _reading(path):
        spec.loader.exec_module(module)
    from poundlock.spark.internals import send_whole

    send_whole(module)  # tasks could not import it
    return _maker(path, getattr(module, "pipeline", None))


def open_pipeline(path: Path, arguments: Sequence[str] = ()) -> Pipeline:
    """Make the pipeline of a job file in a small Spark session, without starting it."""
    make = load(path)
    from poundlock.spark.pipeline.pipeline import Pipeline
    from poundlock.spark.session import session

    spark = session("local[1]", conf={"spark.ui.enabled": "false"})
    with _reading(path):
        made = make(spark, list(arguments))
    if not isinstance(made, Pipeline):
        raise UsageError(
            f"pipeline() of {path} returned {type(made).__name__}: make it return a Pipeline"
        )
    return made


def _maker(path: Path, found: Any) -> Maker:
    from poundlock.spark.pipeline.pipeline import Pipeline

    if isinstance(found, Pipeline):
        return lambda spark, args: found
    if found is None:
        raise UsageError(f"{path} does not define pipeline(spark, args): add it")
    if not callable(found):
        raise UsageError(
            f"pipeline of {path} is of type {type(found).__name__}: make it a function "
            "pipeline(spark, args), or a Pipeline"
        )
    make = cast("Maker", found)
    signature = inspect.signature(make)
    try:
        signature.bind(None, [])
    except TypeError:
        raise UsageError(
            f"pipeline of {path} takes {signature}, but is called with (spark, args): make it take "
            "the session and a list of the other arguments"
        ) from None
    return make


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Run code of a job file. It cannot start a query, and its errors become `UsageError`."""
    from poundlock.spark.internals import STARTS
    from poundlock.spark.pipeline.pipeline import Pipeline

    def refuse(*_: object, **__: object) -> NoReturn:
        raise UsageError(
            f"{path} starts a query when it is loaded. Put start() inside an "
            "`if __name__ == '__main__'` block"
        )

    starting = [(Pipeline, "start"), *STARTS]
    before = [getattr(kind, name) for kind, name in starting]
    try:
        for kind, name in starting:
            setattr(kind, name, refuse)
        yield
    except PoundlockError:
        raise  # its message already says what to do
    except (Exception, SystemExit) as error:
        line = _line(path, error.__traceback__)
        raise UsageError(
            f"{path}{line} failed when it was loaded: {type(error).__name__}: {error}"
        ) from error
    finally:
        for (kind, name), method in zip(starting, before, strict=True):
            setattr(kind, name, method)


def _line(path: Path, trace: TracebackType | None) -> str:
    """Return the line of the file at which the error happened, if it is known."""
    found = ""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path.absolute()):
            found = f", line {trace.tb_lineno},"
        trace = trace.tb_next
    return found
