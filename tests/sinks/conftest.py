"""The fixtures that several test files share. Each server starts once."""

from __future__ import annotations

from fix_mysql import mysql_server, place
from fix_opensearch import make_search, search_client, search_server
from fix_postgres import db, postgres_node, shared
from fix_redis import make_redis, redis_client, redis_server

__all__ = [
    "db",
    "make_redis",
    "make_search",
    "mysql_server",
    "place",
    "postgres_node",
    "redis_client",
    "redis_server",
    "search_client",
    "search_server",
    "shared",
]
