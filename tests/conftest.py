"""Shared fixtures. What a folder of tests needs is in README.md beside this file."""

from __future__ import annotations

pytest_plugins = ["tests.fix_kafka", "tests.fix_servers", "tests.fix_trial"]
