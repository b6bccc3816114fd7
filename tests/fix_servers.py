"""Real servers beside Kafka, for the tests that need them: each started once per session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from poundlock.servers import mariadb, opensearch, postgres, valkey


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[postgres.Postgres]:
    """Shared. A test that hurts a server starts one of its own: `running()`."""
    with postgres.running(tmp_path_factory.mktemp("postgres")) as server:
        yield server


@pytest.fixture(scope="session")
def mariadb_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mariadb.MariaDB]:
    with mariadb.running(tmp_path_factory.mktemp("mariadb")) as server:
        yield server


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[valkey.Valkey]:
    with valkey.running(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="session")
def opensearch_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[opensearch.Node]:
    with opensearch.running(tmp_path_factory.mktemp("opensearch")) as server:
        yield server
