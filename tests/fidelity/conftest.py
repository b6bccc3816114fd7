"""Spark for the fidelity suite, with Delta, which the session of the other tests lacks."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

import poundlock as lock


@pytest.fixture(scope="session")
def spark() -> SparkSession:
    settings = {"spark.ui.enabled": "false", "spark.sql.session.timeZone": "UTC"}
    session = lock.session("local[2]", delta=True, parallelism=2, conf=settings)
    session.sparkContext.setLogLevel("ERROR")
    return session
