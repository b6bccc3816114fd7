"""Files as a source: Spark's own, which remembers in its checkpoint what it has read.

A directory that our Files sink wrote (or Spark's own file sink) has a manifest, and then only the files
that it names are read: rows of batches that are not committed are never seen. Spark follows a manifest
only where the directory itself is read, so what would go past one is refused.
"""

from __future__ import annotations

import os
import re
from typing import Any

from poundlock.errors import UsageError
from poundlock.sinks.files.manifest import METADATA

_AGE = "maxFileAge"  # Spark's default passes over files a week older than the newest, in silence
_PATTERN = re.compile(r"[*?\[\]{}\\]")  # what Hadoop takes for one


def read_files(
    spark: Any,
    path: str | os.PathLike[str],
    *,
    format: str = "parquet",
    schema: Any = None,
    **options: Any,
) -> Any:
    """Open a directory as a streaming DataFrame: what is there, then what is added.

    It can be replayed as long as no file is changed or deleted: files are to be written once.

    Args:
        path: A directory, or a pattern of directories that have no manifest.
        format: "parquet", "json", "csv", "orc", "avro" or "text".
        schema: As Spark takes it. None: that of the files which are there now.
        options: Any further option of Spark's, such as maxFilesPerTrigger.
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
    """Refuse a path by which Spark would read past a manifest, and see what is not committed."""
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
                break  # we may not look so far up, and nothing above is written by whoever runs this
            if there:
                raise UsageError(
                    f"{directory} has a manifest ({METADATA}), which Spark passes over if {place} is "
                    "read, and rows that are not committed would be seen: read the directory itself, "
                    "and filter with where()"
                )
            directory = directory.getParent()


def _schema(spark: Any, path: str, format: str, options: dict[str, str]) -> Any:
    """Return the schema of the files that are there: a stream must know it from its first batch on."""
    try:
        found = spark.read.format(format).options(**options).load(path).schema
    except Exception as error:
        if type(error).__name__ != "AnalysisException":  # pyspark's, which is not ours to import
            raise
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"the schema of {path} is not to be had from its files ({reason}). Give schema=, or start "
            "when there is a first file"
        ) from error
    if not found.fields:
        raise UsageError(f"{path} has no files to take a schema from: give schema=")
    return found


def _spelled(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
