"""Batches are the same whoever draws them, workers leave no trace in results or in positions, and
end with the node.
"""

import os
import random
import select
import signal
import subprocess
import sys
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from shoal.node.batches import Batches, iterator_of
from shoal.node.checkpoint import store as checkpoint
from shoal.node.task import Shard, Task
from shoal.node.tasks.guarded import Guarded
from shoal.node.tasks.text import TextTask
from shoal.node.training.loader import Loader, LoadingError, _in_pieces
from shoal.node.user_code import UserCodeError
from shoal.swarm.settings.training import TrainSettings
from tests.support.trainer_loops import trainer

SHARD = Shard(0, 1, 0)
TOO_MANY = 12  # batches, more than are drawn ahead


class Counted(Batches):
    """Batches with a position, which they change in place, and always in the same memory."""

    def __init__(self):
        self.place, self.memory = {"next": 0}, torch.zeros(2, 3)

    def __next__(self):
        self.memory.fill_(self.place["next"])
        self.place["next"] += 1
        return self.memory

    def state_dict(self):
        return self.place

    def load_state_dict(self, state):
        self.place = dict(state)


class Squares(Dataset):
    def __getitem__(self, number):
        return {"x": torch.full((2, 2), number**2)}


class Few(Squares):
    def __len__(self):
        return 5


class Stream(IterableDataset):
    def __iter__(self):
        return (torch.tensor([float(n)]) for n in range(100))


def generated():
    generator = torch.Generator().manual_seed(3)
    while True:
        yield torch.randn(4, 9, generator=generator)[:, :-1], "a name", np.ones(2)


def shuffled(kind, workers):
    data = torch.arange(10.0).unsqueeze(1)
    return kind(
        data,
        batch_size=3,
        shuffle=True,
        num_workers=workers,
        generator=torch.Generator().manual_seed(1),
    )


KINDS = {
    "generator": generated,
    "position": Counted,
    "numbered": Squares,
    "numbered with an end": Few,
    "stream": Stream,
    "loader": lambda: shuffled(DataLoader, 0),
    "loader with workers": lambda: shuffled(DataLoader, 1),
    "stateful loader": lambda: shuffled(StatefulDataLoader, 0),
    "text in epochs": lambda: TextTask(context=8, batch=2, order="epochs", data=__file__).batches(
        SHARD
    ),
    "text": lambda: TextTask(context=8, batch=2).batches(SHARD),
}


class Own(Task):
    def __init__(self, make):
        self.batches = lambda shard: make()


def loader(make, workers=0, step=0):
    task = Own(make)
    return Loader(
        task,
        task.batches_from(SHARD, step) if step else iterator_of(task.batches(SHARD), SHARD),
        workers=workers,
    )


def flat(batch):
    if isinstance(batch, dict | tuple | list):
        return [
            leaf
            for item in (batch.values() if isinstance(batch, dict) else batch)
            for leaf in flat(item)
        ]
    return [batch]


def first(made, count=TOO_MANY):
    try:
        return [
            [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in flat(batch)]
            for batch in islice(made, count)
        ]
    finally:
        made.close()


def assert_same(found, wanted):
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        for a, b in zip(one, other, strict=True):
            if isinstance(a, torch.Tensor):
                assert torch.equal(a, b)
                assert (a.dtype, a.stride()) == (b.dtype, b.stride())
            else:
                assert type(a) is type(b)
                assert np.all(a == b)


def children():
    return set(map(int, open(f"/proc/self/task/{os.getpid()}/children").read().split()))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [1, 3])
def test_batches_are_the_same_whoever_draws_them(kind, workers):
    assert_same(first(loader(KINDS[kind], workers)), first(loader(KINDS[kind])))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_from_a_step_are_those_after_it(kind, workers):
    assert_same(first(loader(KINDS[kind], workers, step=7), 5), first(loader(KINDS[kind]))[7:])


def test_workers_draw_numbered_batches():
    """Several workers draw numbered batches and none draws those before a step."""

    class Who(Dataset):
        def __getitem__(self, number):
            assert number >= 1000
            return torch.tensor([number, os.getpid()])

    found = first(loader(Who, 3, step=1000))
    assert [int(batch[0][0]) for batch in found] == [*range(1000, 1000 + TOO_MANY)]
    assert len({int(batch[0][1]) for batch in found}) == 3


def test_iterator_or_own_loader_limits_workers():
    """One worker draws from an iterator and none where the task has its own."""
    assert loader(generated, 3).workers == 1
    assert loader(KINDS["loader with workers"], 3).workers == 0
    assert loader(KINDS["loader"], 3).workers == 1


@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    "kind", ["position", "loader", "loader with workers", "stateful loader", "text in epochs"]
)
@pytest.mark.parametrize("saving", [0, 1])
@pytest.mark.parametrize("loading", [0, 1])
@pytest.mark.parametrize("at", [0, 1, 6])
def test_position_is_the_last_batch_trained(kind, saving, loading, at):
    """Position is that of the last batch and has no trace of workers."""
    made = loader(KINDS[kind], saving)
    list(islice(made, at))
    state = made.state_dict()
    made.close()
    task = Own(KINDS[kind])
    batches = iterator_of(task.batches(SHARD), SHARD)
    batches.load_state_dict(state)
    assert_same(
        first(Loader(task, batches, workers=loading), 9), first(loader(KINDS[kind]), at + 9)[at:]
    )
    if kind == "position":
        assert state == {"next": at}


def test_a_position_is_none_where_there_is_none():
    assert loader(generated, 1).state_dict() is None


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_leave_global_randomness_alone(workers):
    """Global random numbers are left to the model and those of workers are fixed."""

    def drawing():
        while True:
            yield torch.rand(1), np.random.rand(1), np.array([random.random()])

    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    found = first(loader(generated, workers)), first(loader(Squares, workers))
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1], before[2]) == (np.random.get_state()[1].tolist(), random.getstate())
    assert found
    if workers:
        assert_same(first(loader(drawing, workers)), first(loader(drawing, workers)))


def test_pinned_batch_is_contiguous(monkeypatch):
    """A pinned view with gaps would be copied to a GPU by way of memory that is not pinned, and
    waited for.
    """
    held = torch.arange(24.0).view(4, 6)
    batch = {
        "inputs": held[:, :-1],
        "whole": held,
        "images": torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
    }
    (inputs, whole, images) = _in_pieces(batch).values()
    assert inputs.is_contiguous()
    assert torch.equal(inputs, held[:, :-1])
    assert whole is held
    assert images is batch["images"]


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 1])
def test_text_batches_reach_the_device_unwaited(workers, tmp_path):
    """Batches of the built in task reach the device without a wait."""
    (tmp_path / "text.txt").write_text("the quick brown fish swims over the lazy shoal " * 2000)
    task = TextTask(data=str(tmp_path), context=16, batch=4)
    loader = Loader(
        task, iterator_of(task.batches(Shard(0, 1, 0)), Shard(0, 1, 0)), workers=workers, pin=True
    )
    try:
        batch = next(loader)
    finally:
        loader.close()
    assert [(tensor.is_pinned(), tensor.is_contiguous()) for tensor in batch] == [(True, True)] * 2


def test_a_view_is_sent_without_its_storage():
    def views():
        everything = torch.arange(1_000_000)
        while True:
            yield everything[10:20], torch.zeros(1).expand(5), everything.unfold(0, 3, 1)[:4]

    (batch,) = first(loader(views, 1), 1)
    assert [leaf.tolist() for leaf in batch] == [
        [*range(10, 20)],
        [0.0] * 5,
        [[n, n + 1, n + 2] for n in range(4)],
    ]
    assert all(leaf.untyped_storage().nbytes() <= 8 * 16 for leaf in next(iter(loader(views, 1))))


def failing(where):
    class Failing(Counted):
        def __next__(self):
            if where == "next" and self.place["next"] == 3:
                raise ValueError("no such file")
            return super().__next__()

        def state_dict(self):
            if where == "state" and self.place["next"] >= 1:
                raise ValueError("no such file")
            return super().state_dict()

    task = Own(Failing)
    return Guarded(task, "Mine")


@pytest.mark.parametrize("where", ["next", "state"])
def test_worker_error_reads_as_the_users_own(where):
    """An error in a worker is the user's own in the same sentence."""
    said = []
    for workers in (0, 1):
        task = failing(where)
        made = Loader(task, task.batches(SHARD), workers=workers)
        with pytest.raises(UserCodeError) as caught:
            [made.state_dict() for _ in made]
        made.close()
        said.append(str(caught.value))
        assert "no such file" in caught.value.trace
        assert "shoal/node" not in caught.value.trace.splitlines()[1]
    assert said[0] == said[1]
    assert said[0].startswith(
        f"Your task 'Mine' failed in batches(){'.state_dict()' if where == 'state' else ''}: "
        "ValueError"
    )


class Learnt(Task):
    """A task whose model has dropout, so that a random number more or less shows."""

    def __init__(self, kind):
        self.batches = lambda shard: KINDS[kind]()

    def model(self):
        return torch.nn.Sequential(
            torch.nn.Linear(1, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
        )

    def loss(self, model, batch):
        return model(flat(batch)[0].float().mean().reshape(1, 1)).square().mean()


def learning(kind, workers, state=None):
    made = trainer(Learnt(kind), TrainSettings(steps=14, seed=1), method="noloco", workers=workers)
    if state is not None:
        made.resume(state)
    return made


@pytest.mark.thinned(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("before", "after"), [(1, 0), (0, 2)])
def test_worker_run_resumes_bit_equal(tmp_path, kind, before, after):
    """A run with workers resumes bit by bit with any number of them."""
    whole = learning(kind, 0)
    whole.run()
    begun = learning(kind, before)
    for _ in range(7):
        begun.step()
    checkpoint.save(tmp_path, 7, begun.state())
    begun.close()
    torch.manual_seed(99)
    again = learning(kind, after, checkpoint.load(tmp_path)[1])
    again.run()
    again.close()
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_batches_that_end_end():
    made = loader(lambda: iter([torch.ones(1)] * 3), 1)
    assert len(list(made)) == 3


def test_a_task_that_draws_with_its_model_has_no_workers():
    task = Own(generated)
    task.draws_with_model = True
    with pytest.raises(LoadingError, match=r"set train\.workers to 0"):
        Loader(task, generated(), workers=1)


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_workers_are_forked_on_linux_alone(monkeypatch, system):
    monkeypatch.setattr(sys, "platform", system)
    with pytest.raises(LoadingError, match=r"safe on Linux alone: set train\.workers to 0"):
        loader(generated, 1)
    assert len(list(islice(loader(generated, 0), 2))) == 2


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_workers_end_with_the_loader():
    """Worker's end when the loader is closed and one that is killed is named."""
    before = children()
    made = loader(generated, 1)
    next(made)
    (worker,) = children() - before
    os.kill(
        worker, signal.SIGINT
    )  # Ctrl-C reaches the whole group, and the node ends its workers itself
    os.kill(worker, signal.SIGHUP)
    list(islice(made, TOO_MANY))
    made.close()
    assert children() == before
    made = loader(generated, 1)
    next(made)
    (worker,) = children() - before
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(
        LoadingError, match=r"A worker that draws batches was ended .*train.workers=0.*--shm-size"
    ):
        list(made)
    assert children() == before


NODE = """
import os, sys, time
from shoal.node.task import Task
from shoal.node.training.loader import Loader

def slow():
    yield 1
    while True:
        time.sleep(1000)

made = Loader(Task(), slow(), workers=1)
next(made)
print(open(f"/proc/self/task/{os.getpid()}/children").read(), flush=True)
time.sleep(1000)
"""


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(os, "pidfd_open"), reason="pidfd_open")
def test_workers_end_with_a_killed_node():
    """A worker ends with a node that is killed even in the middle of a batch."""
    with subprocess.Popen([sys.executable, "-c", NODE], stdout=subprocess.PIPE) as node:
        worker = os.pidfd_open(int(node.stdout.readline()))
        node.kill()
        assert select.select([worker], [], [], 60)[0]
        os.close(worker)


def unpicklable():
    yield torch.ones(2)
    while True:
        yield {"x": torch.ones(2), "function": lambda: 1}


class Unpicklable(Few):
    def __getitem__(self, number):
        return lambda: number


class NoPosition(Counted):
    def state_dict(self):
        return {"function": lambda: 1}


def too_large():
    import resource  # a file in shared memory may be as small as /dev/shm

    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    while True:
        yield torch.ones(1 << 20)


class Taken:
    """What can be sent, and fails where it is received."""

    def __reduce__(self):
        return int, ("no number",)


UNSENT = {
    "a function": (
        unpicklable,
        r"A worker cannot send what it drew \(\w+: Can't pickle local object .*train.workers=0",
    ),
    "a position": (
        NoPosition,
        r"A worker cannot send what it drew \(\w+: Can't pickle local object .*train.workers=0",
    ),
    "too large": (
        too_large,
        r"A worker cannot send what it drew \(RuntimeError: .*train.workers=0.*docker run "
        r"--shm-size",
    ),
    "received": (
        lambda: iter([Taken()] * 9),
        r"A batch of a worker cannot be taken \(ValueError: invalid literal .*train.workers=0",
    ),
    "own loader": (
        lambda: DataLoader(Unpicklable(), None, num_workers=1),
        r"A worker cannot send .*num_workers=0",
    ),
    "own stateful": (
        lambda: StatefulDataLoader(Unpicklable(), None, num_workers=1),
        r"A worker cannot send .*num_workers=0",
    ),
}


@pytest.mark.parametrize("kind", UNSENT)
def test_what_a_worker_cannot_send_ends_the_wait_for_it(kind):
    make, said = UNSENT[kind]
    task = Guarded(Own(make), "Mine")
    made = Loader(task, task.batches(SHARD), workers=1)
    with pytest.raises(LoadingError, match=said) as caught:
        list(made)
    made.close()
    assert "\n" not in str(caught.value)


def test_own_loaders_worker_error_is_named():
    """An error in a worker of the task's own loader is named."""

    class Fails(Few):
        def __getitem__(self, number):
            raise ValueError("no such file")

    task = Guarded(Own(lambda: DataLoader(Fails(), None, num_workers=1)), "Mine")
    with pytest.raises(
        UserCodeError, match=r"^Your task 'Mine' failed in batches\(\): ValueError: .*no such file"
    ):
        next(Loader(task, task.batches(SHARD)))
