"""The suite that every sink must pass, upon every sink of ours: see `poundlock.compliance`."""

from __future__ import annotations

from poundlock.compliance.requirements import *  # noqa: F403
