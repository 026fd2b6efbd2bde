"""Outer settings of tests that want one exchange a round, waited for: of the whole model, and with
the same bits each time.
"""

from shoal.optim import method_named
from shoal.swarm.settings.outer import OuterSettings


def blocking(**settings):
    """Return settings whose exchanges are waited for, whatever the default is; those of methods
    without a partner, or without a lag, as they are.
    """
    method = method_named(settings.get("method", "noloco"))
    overlaps = method.group == "pair" and "lag" in method.knobs
    return OuterSettings(**{**({"lag": 0} if overlaps else {}), **settings})
