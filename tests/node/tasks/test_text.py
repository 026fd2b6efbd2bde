"""The built-in text task: what is assigned to whom, what is refused, and that the model learns."""

import pytest
import torch

from shoal.node.data.source import DataError
from shoal.node.task import Shard
from shoal.node.tasks.documents import FEW_FILES, read_documents
from shoal.node.tasks.text import EVALUATION_BYTES, TextTask

TINY = {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch": 2}


@pytest.fixture(scope="module")
def library():
    """The task on the standard library, read once."""
    return TextTask()


def test_shards_are_disjoint_complete_and_never_hold_held_out_documents(library):
    held_out = {d.name for d in library.held_out()}
    shards = [{d.name for d in library.shard_documents(Shard(i, 5, 0))} for i in range(5)]
    assert sum(map(len, shards)) == len(set().union(*shards))
    assert set().union(*shards, held_out) == {d.name for d in library.documents}
    assert not held_out & set().union(*shards)
    assert 0.05 < len(held_out) / len(library.documents) < 0.15
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_library_has_no_tests_or_packages(library):
    parts = {part for d in library.documents for part in d.name.split("/")}
    assert not parts & {"test", "tests", "site-packages", "idle_test"}
    assert all(d.name.endswith(".py") for d in library.documents)


def test_batches_depend_on_the_shard_alone(library):
    def first(shard):
        batches = library.batches(shard)
        return [next(batches) for _ in range(3)]

    a, b = first(Shard(1, 4, 7)), first(Shard(1, 4, 7))
    assert all(
        torch.equal(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)
    )
    assert not torch.equal(a[0][0], first(Shard(2, 4, 7))[0][0])
    assert not torch.equal(a[0][0], first(Shard(1, 4, 8))[0][0])


def test_batch_is_a_window_and_the_same_one_byte_later(library):
    inputs, targets = next(library.batches(Shard(0, 4, 0)))
    assert inputs.shape == targets.shape == (8, 64)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    text = b"\n".join(d.content for d in library.shard_documents(Shard(0, 4, 0)))
    assert bytes(inputs[0].tolist()) in text


def test_model_size_and_causality(library):
    torch.manual_seed(0)
    model = library.model()
    assert sum(p.numel() for p in model.parameters()) == 135_808
    tokens = torch.randint(256, (1, 64))
    changed = tokens.clone()
    changed[0, 40] = (changed[0, 40] + 1) % 256
    before, after = model(tokens), model(changed)
    assert before.shape == (1, 64, 256)
    torch.testing.assert_close(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 40:], after[:, 40:])


def test_evaluation_is_fixed_and_bounded(library):
    """Evaluation is fixed bounded and leaves the model in its mode."""
    torch.manual_seed(0)
    model = library.model()
    first = library.evaluate(model)
    seen = []
    model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].numel()))
    assert library.evaluate(model) == first
    assert sum(seen) <= 32_768
    assert 5.3 < first < 6.2  # an untrained model is near log 256 = 5.55
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert library._evaluation.numel() >= EVALUATION_BYTES


def test_sixty_steps_lower_the_held_out_loss(library):
    torch.manual_seed(0)
    model = library.model()
    optimizer = library.inner_optimizer(model.parameters())
    scheduler = library.lr_scheduler(optimizer, 60)
    batches = library.batches(Shard(0, 1, 0))
    for _ in range(60):
        library.loss(model, next(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert library.evaluate(model) < 3.5


def test_rate_warms_up_and_ends_at_a_tenth():
    task = TextTask(lr=1.0, warmup=50)
    optimizer = task.inner_optimizer([torch.nn.Parameter(torch.zeros(1))])
    scheduler = task.lr_scheduler(optimizer, 200)
    rates = []
    for _ in range(201):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[0] == pytest.approx(1 / 50)
    assert max(rates) == rates[50] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.1)


def test_one_file_is_cut_into_all_its_pieces(tmp_path):
    """One file is cut into pieces that make up the file."""
    content = bytes(i % 251 + 1 for i in range(200_000))
    (tmp_path / "one.txt").write_bytes(content)
    documents = read_documents(str(tmp_path / "one.txt"), 2**20)
    assert FEW_FILES <= len(documents) <= FEW_FILES + 1
    ordered = sorted(documents, key=lambda d: int(d.name.split("#")[1]))
    assert b"".join(d.content for d in ordered) == content
    task = TextTask(data=str(tmp_path / "one.txt"), **TINY)
    assert task.held_out()
    assert all(task.shard_documents(Shard(i, 8, 0)) for i in range(8))


def test_documents_are_the_same_wherever_the_folder_lies(tmp_path):
    for root in ("here", "there/deeper"):
        for i in range(120):
            path = tmp_path / root / f"d{i % 7}" / f"{i}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"text {i} " * 20)
    assert read_documents(str(tmp_path / "here"), 2**20) == read_documents(
        str(tmp_path / "there/deeper"), 2**20
    )


def test_reading_stops_at_max_bytes(tmp_path):
    for i in range(200):
        (tmp_path / f"{i}.txt").write_bytes(b"x" * 1000)
    assert sum(len(d.content) for d in read_documents(str(tmp_path), 50_500)) == 50_500


def test_several_paths_and_files_that_are_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a" * 500)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "b.txt").write_bytes(b"b" * 500)
    (tmp_path / "b" / "picture").write_bytes(b"\0" * 500)
    (tmp_path / "b" / ".hidden").write_bytes(b"h" * 500)
    documents = read_documents(f"{tmp_path / 'a.txt'},{tmp_path / 'b'}", 2**20)
    assert {d.name.split("#")[0] for d in documents} == {"a.txt", "b.txt"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: str(p / "none"), "There is no text at"),
        (lambda p: str(p), "There is no text in"),
        (lambda p: "/dev/null", "neither a file nor a folder"),
    ],
)
def test_missing_text_is_one_sentence(tmp_path, make, words):
    with pytest.raises(DataError, match=words) as caught:
        read_documents(make(tmp_path), 2**20)
    assert "\n" not in str(caught.value)


def test_too_little_text_names_the_shard(tmp_path):
    (tmp_path / "small").write_bytes(b"few words")
    task = TextTask(data=str(tmp_path / "small"))
    with pytest.raises(DataError, match=r"shard 3 of 4 has only 0 bytes"):
        next(task.batches(Shard(3, 4, 0)))


def test_unreadable_file_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "secret.txt").write_text("text")

    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")  # chmod would not stop root

    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(
        DataError, match=r"Cannot read the text .*secret\.txt' \(Permission denied\)"
    ):
        read_documents(str(tmp_path), 2**20)


@pytest.mark.parametrize(
    "options",
    [
        {"layers": 0},
        {"width": 30},
        {"lr": 0.0},
        {"batch": "8"},
        {"warmup": -1},
        {"order": "sorted"},
        {"field": ""},
        {"tokenizer": 3},
        {"shuffle": 0},
    ],
)
def test_bad_options_are_named(options):
    with pytest.raises(DataError, match=next(iter(options))):
        TextTask(**options)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_wide_characters_are_named_with_a_remedy(tmp_path, encoding):
    """A text of wide characters is named with what to do."""
    path = tmp_path / "wide.txt"
    path.write_text("Some text in another encoding.", encoding=encoding)
    with pytest.raises(DataError) as error:
        read_documents(str(path), 1000)
    assert str(error.value) == (
        f"The text {str(path)!r} is in UTF-16 or UTF-32: save it as UTF-8, such as with iconv -f "
        "UTF-16 -t UTF-8."
    )
