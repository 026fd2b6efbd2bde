"""No option takes nan or an infinite number."""

import click
import pytest
from click.testing import CliRunner

from shoal.node.cli.main import cli


def float_options(command, path=()):
    """Every option of a float in a range, with the words of its command."""
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from float_options(inner, (*path, name))
        return
    for option in command.params:
        if isinstance(option.type, click.FloatRange):
            yield path, option


OPTIONS = [
    pytest.param(*found, id=" ".join((*found[0], found[1].opts[0]))) for found in float_options(cli)
]


@pytest.mark.parametrize("number", ["nan", "inf"])
@pytest.mark.parametrize(("path", "option"), OPTIONS)
def test_numbers_must_be_finite(path, option, number):
    """Faults: `tune --minutes nan` was a bug in shoal, and `verify odds --gain nan` said nan."""
    shown = CliRunner().invoke(cli, [*path, option.opts[0], number])
    assert shown.exit_code == 2
    assert number in shown.output.splitlines()[-1]
