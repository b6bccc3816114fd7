"""Deliberate protocol bugs in the code under test. The model must catch each of them.

A surviving mutant shows that the model is too weak: fix the model then, never the mutant.
"""

from . import checkpoint, coordinator, log, systems
from .planting import MUTANTS, Mutant

__all__ = ["MUTANTS", "Mutant", "checkpoint", "coordinator", "log", "systems"]
