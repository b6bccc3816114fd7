"""The fixtures of the tests that are split over several files: each server starts once."""

from __future__ import annotations

from fix_mysql import mysql_server, place
from fix_postgres import db, postgres_node, shared

__all__ = ["db", "mysql_server", "place", "postgres_node", "shared"]
