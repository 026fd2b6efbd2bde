"""Peers that are threads of one process."""

from tests.swarm.training.conftest import unhurried

__all__ = ["unhurried"]
