"""Files as a source. It is Spark's own, whose checkpoint records what it has read.

A directory that our Files sink or Spark's own file sink wrote has a manifest. Spark reads only the
files in the manifest, so rows of uncommitted batches are never seen. Spark uses a manifest only if the
directory itself is read, so other paths into such a directory are rejected.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from poundlock.errors import UsageError
from poundlock.sinks.files.manifest import METADATA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_AGE = "maxFileAge"  # Spark's default silently skips files a week older than the newest
_PATTERN = re.compile(r"[*?\[\]{}\\]")  # the characters of Hadoop's patterns


def read_files(
    spark: SparkSession,
    path: str | os.PathLike[str],
    *,
    format: str = "parquet",
    schema: Any = None,
    **options: Any,
) -> DataFrame:
    """Open a directory as a streaming DataFrame of its existing files and then of new ones.

    It can be replayed as long as no file is changed or deleted.

    Args:
        path: A directory, or a pattern of directories that have no manifest.
        format: "parquet", "json", "csv", "orc", "avro" or "text".
        schema: A schema for Spark. If None, that of the existing files.
        options: Other options of Spark, such as maxFilesPerTrigger.
    """
    place = os.fspath(path)
    _check_manifest(spark, place)
    given = {key: _spelled(value) for key, value in options.items()}
    if not any(key.lower() == _AGE.lower() for key in given):
        given[_AGE] = "36500d"
    if schema is None and format != "text":
        schema = _schema(spark, place, format, given)
    reader = spark.readStream.format(format).options(**given)
    if schema is not None:
        reader = reader.schema(schema)
    return reader.load(place)


def _check_manifest(spark: Any, place: str) -> None:
    """Reject a path with which Spark would ignore a manifest and read uncommitted rows."""
    hadoop = spark._jvm.org.apache.hadoop.fs
    path = hadoop.Path(place)
    system = path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())
    path, pattern = system.makeQualified(path), _PATTERN.search(place)
    if pattern:
        found = [status.getPath() for status in system.globStatus(path) or ()]
    else:
        found = []
        path = path.getParent()
    above = set[str]()
    for directory in (*found, path):
        while directory is not None and str(directory) not in above:
            above.add(str(directory))
            try:
                there = system.exists(hadoop.Path(directory, METADATA))
            except Exception as error:
                if directory in found or type(error).__name__ != "Py4JJavaError":
                    raise
                break  # not readable, so this user wrote nothing above it either
            if there:
                raise UsageError(
                    f"{directory} has a manifest ({METADATA}), but Spark ignores it when {place} "
                    "is read, and would also return uncommitted rows. Read the directory itself, "
                    "and filter with where()"
                )
            directory = directory.getParent()


def _schema(spark: Any, path: str, format: str, options: dict[str, str]) -> Any:
    """Return the schema of the existing files, which a stream needs before its first batch."""
    try:
        found = spark.read.format(format).options(**options).load(path).schema
    except Exception as error:
        if type(error).__name__ != "AnalysisException":  # pyspark's, which is not ours to import
            raise
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"the schema of {path} cannot be read from its files ({reason}). Give schema=, or "
            "wait for the first file before you start"
        ) from error
    if not found.fields:
        raise UsageError(f"{path} has no files to take a schema from: give schema=")
    return found


def _spelled(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
