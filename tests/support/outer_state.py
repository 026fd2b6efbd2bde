"""All that an outer optimizer and its model hold, and the comparison of nested states."""

import copy

import torch

from tests.support.outer_training import same


def everything(run):
    return copy.deepcopy(
        [run.net.state_dict(), run.opt.state_dict(), run.opt.param_groups, run.opt.state]
    )


def by_path(value):
    """Return every leaf of a nested state by its place; parameters that are keys are numbered."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {"": value}
    keyed = {
        number if isinstance(key, torch.Tensor) else key: part
        for number, (key, part) in enumerate(value.items())
    }
    return {
        f"{key}/{path}": leaf for key, part in keyed.items() for path, leaf in by_path(part).items()
    }


def equal(first, second):
    """Compare nested states."""
    one, two = by_path(first), by_path(second)
    return one.keys() == two.keys() and all(
        same([one[path]], [two[path]])
        if isinstance(one[path], torch.Tensor)
        else one[path] == two[path]
        for path in one
    )
