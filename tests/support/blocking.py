"""Outer settings of tests that want one exchange a round, waited for: of the whole model, and with
the same bits each time.
"""

from shoal.optim import method_named
from shoal.swarm.settings.outer import OuterSettings


def blocking(**settings):
    """Return settings whose exchanges are waited for, whatever the default is; those of methods
    without a partner as they are.
    """
    pair = method_named(settings.get("method", "noloco")).group == "pair"
    return OuterSettings(**{**({"lag": 0} if pair else {}), **settings})
