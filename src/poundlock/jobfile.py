"""A job file: Python that defines `def pipeline(spark, args) -> Pipeline`. Nothing starts on import."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poundlock.errors import UsageError

if TYPE_CHECKING:
    from poundlock.spark.pipeline import Pipeline


def load(path: Path) -> Callable[[Any, Sequence[str]], Pipeline]:
    """Return the function of a job file that makes its pipeline. Runs the file, as an import does."""
    if not path.is_file():
        raise UsageError(f"there is no job file {path}")
    name = f"poundlock_job_{path.stem}"  # a job called json.py must not hide another module
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent.absolute()))
    spec.loader.exec_module(module)
    from poundlock.spark.internals import send_whole

    send_whole(module)  # tasks could not import it
    function: Any = getattr(module, "pipeline", None)
    if function is None:
        raise UsageError(f"{path} does not define pipeline(spark, args)")
    return function


def open_pipeline(path: Path, arguments: Sequence[str] = ()) -> Pipeline:
    """Make the pipeline of a job file, in a small session of our own. Nothing is started."""
    function = load(path)
    from poundlock.spark.pipeline import Pipeline
    from poundlock.spark.session import session

    made = function(session("local[1]", conf={"spark.ui.enabled": "false"}), list(arguments))
    if not isinstance(made, Pipeline):
        raise UsageError(f"pipeline() of {path} returned {type(made).__name__}, not a Pipeline")
    return made
