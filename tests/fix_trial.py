"""Spark and a judge of Kafka, for tests that run pipelines in their own process (see `trial`)."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

import oracle
import poundlock as lock
from poundlock.servers.kafka import Cluster


@pytest.fixture(scope="session")
def spark() -> SparkSession:
    """One session for all: it lives as long as the process."""
    session = lock.session("local[2]", conf={"spark.ui.enabled": "false"})
    session.sparkContext.setLogLevel("ERROR")
    return session


@pytest.fixture(scope="session")
def kafka(kafka_server: Cluster) -> oracle.Kafka:
    """The shared broker, seen by clients that are not ours."""
    return oracle.Kafka(kafka_server.client_settings())
