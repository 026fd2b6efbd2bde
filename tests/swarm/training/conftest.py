"""Peers that are threads of one process."""

from tests.support.unhurried import unhurried

__all__ = ["unhurried"]
