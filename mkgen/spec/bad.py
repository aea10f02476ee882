"""A stand-in for a value that could not be read.

One mistake must not hide the others, nor breed false ones. So a field that cannot be read becomes `BAD`,
which spreads through arithmetic as a NaN does; the moment a check wants to decide something with it, it
raises `Poison`, and only that check is skipped.
"""
from __future__ import annotations


class Poison(Exception):
    """A check asked about a value that could not be read; that mistake has been reported already."""


class Bad:
    """See the module's docstring. There is one instance, `BAD`."""

    def _spread(self, *args, **kwargs):
        return self

    def _stop(self, *args, **kwargs):
        raise Poison

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __abs__ = __call__ = _spread
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __getitem__ = _spread
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __iter__ = __len__ = __contains__ = _stop
    __hash__ = __str__ = __format__ = __int__ = __index__ = __float__ = _stop

    def __repr__(self) -> str:
        return "BAD"

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return self


BAD = Bad()
