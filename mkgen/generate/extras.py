"""Libraries that only some commands need."""
from __future__ import annotations

import importlib
from types import ModuleType

from mkgen.errors import MkgenError


def need(name: str, what: str) -> ModuleType:
    """The module, or an error that says how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise MkgenError(f"the library {name} is not installed\n  why: it is needed to {what}\n"
                         f"  fix: pip install 'mkgen[generate]', or in a checkout: pip install -e '.[generate]'") from None
