"""Which optimizers of other packages are accepted as inner ones: those that go on from where a
round has moved the model.
"""

import pytest
import torch

from bench.optimizers import model, of_pytorch_optimizer, of_torch, of_torchao
from shoal.optim.outer import inner as inner_module
from shoal.optim.outer.inner import check_inner

GO_BACK = {
    "a2grad",
    "accsgd",
    "dadaptadagrad",
    "dadaptsgd",
    "ftrl",
    "lbfgs",
    "madgrad",
    "ranger",
    "ranger21",
    "schedulefreeadamw",
    "schedulefreeradam",
    "schedulefreesgd",
    "srmm",
    "Lookahead(AdamW)",
    "ScheduleFreeWrapper(AdamW)",
    "TRAC(AdamW)",
}


def refused(made, caplog):
    """Return the names of those refused, of those that could be made, and of the classes that could
    not be tried.
    """
    names, known = set(), set()
    for name, make in made:
        try:
            inner = make(model())
        except (ImportError, ValueError):  # of a package that lacks another, or wants processes
            continue
        known.add(name)
        try:
            check_inner(inner)
        except ValueError:
            names.add(name)
    untried = {record.args[0] for record in caplog.records if record.name == inner_module.__name__}
    return names, known, untried


def test_those_of_torch(caplog):
    inner_module._say_untried.cache_clear()
    names, known, untried = refused(of_torch(), caplog)
    assert names == {"LBFGS"}
    assert len(known) == 13
    assert not untried


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
def test_those_of_pytorch_optimizer(caplog):
    pytest.importorskip("pytorch_optimizer", reason="pytorch_optimizer is not installed")
    torch.manual_seed(0)
    names, known, untried = refused(of_pytorch_optimizer(), caplog)
    assert names == GO_BACK
    assert len(known) > 120
    assert untried <= {"LOMO", "AdaLOMO"}  # which step within their own backward pass


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
def test_those_of_torchao(caplog):
    pytest.importorskip("torchao", reason="torchao is not installed")
    names, known, untried = refused(of_torchao(), caplog)
    assert not names
    assert len(known) == 6
    assert not untried
