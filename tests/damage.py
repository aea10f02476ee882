"""Kinds of damage to a plan, by name. Each takes (plan, random) and damages one place of it, or gives None if there is none.

A kind damages only what cannot be harmless; where that depends on the place, it chooses among the harmful ones.
"""

import damage_batches
import damage_copies
import damage_shared
import damage_work
from damage_tools import KINDS

__all__ = ["KINDS", "damage_batches", "damage_copies", "damage_shared", "damage_work"]
