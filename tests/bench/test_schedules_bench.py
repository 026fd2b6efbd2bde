"""The bench of outer schedules: its formulas, that its rounds are those of the paper, and that a schedule changes nothing else."""

import pytest

from bench import schedules as bench
from bench._table import methods, text, train
from shoal.optim.schedule import Apply, Send, Streaming


@pytest.mark.parametrize(
    ("schedule", "first", "middle", "last"),
    [
        ("even", (1, 1), (1, 1), (1, 1)), ("qsr:25", (1, 1), (1, 1), (1, 1)),
        ("lr-line:1:0.5", (1, 1), (0.75, 1), (0.5, 1)),
        ("momentum-line:0:1.5", (1, 0), (1, 0.75), (1, 1.5)),
        ("to-mean", (1, 1), (1.125, 0.5), (1.25, 0)),
    ],
)  # fmt: skip
def test_factors_of_the_outer_rate_and_momentum(schedule, first, middle, last):
    for p, wanted in ((0.0, first), (0.5, middle), (1.0, last)):
        assert bench.factors(schedule, p, 0.8) == pytest.approx(wanted)


RATES = [1.0] * 400 + [0.5] * 400 + [0.1] * 200


def test_a_round_is_as_long_as_the_square_of_a_over_the_rate_and_never_shorter_than_the_least():
    ends = bench.quadratic(RATES, 20, 7.0)
    assert ends == (*range(49, 441 + 1, 49), 441 + 196, 637 + 196, 1000)  # 49, 196 and 4900 steps
    assert bench.quadratic(RATES, 60, 7.0)[:7] == tuple(range(60, 421, 60))
    assert bench.quadratic([1.0] * 100, 30, 1.0) == (30, 60, 100)  # 10 steps are no round


def test_rounds_are_as_many_as_the_even_schedule_has():
    ends = bench.qsr(RATES, 12, 20)
    lengths = [end - start for start, end in zip((0, *ends), ends, strict=False)]
    assert (len(ends), ends[-1], min(lengths) >= 20) == (12, 1000, True)
    assert lengths[:-1] == sorted(lengths[:-1])
    with pytest.raises(ValueError, match="60 rounds of at least 20"):
        bench.qsr(RATES, 60, 20)


@pytest.mark.parametrize(("fragments", "lag"), [(1, 0), (4, 0), (4, 3)])
def test_rounds_of_equal_lengths_do_what_the_product_does(fragments, lag):
    uneven, even = bench.Uneven(12, (12, 24, 36), fragments, lag), Streaming(12, fragments, lag)
    assert [uneven.at(step) for step in range(1, 37)] == [even.at(step) for step in range(1, 37)]


def test_fragments_lie_evenly_apart_in_each_round_and_are_applied_as_late_in_all():
    uneven = bench.Uneven(8, (8, 24), 2, 3)
    found = {step: actions for step in range(1, 30) if (actions := uneven.at(step))}
    assert found == {
        4: [Send(0)], 7: [Apply(0, 3)], 8: [Send(1)], 11: [Apply(1, 3)],
        16: [Send(0)], 19: [Apply(0, 3)], 24: [Send(1)], 27: [Apply(1, 3)],
    }  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    lines = "".join(f"line {number} of some English text, as plain as it can be\n" for number in range(2_000))
    (folder / "one.txt").write_text(lines)
    (folder / "two.txt").write_text(lines[::-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "LEAST", 2**14)
        patch.setattr(text, "PIECE", 2**11)
        patch.setitem(train.SIZES, "mite", train.Size(2, 8, 1, 16, 300, 4, 24, 24))
        patch.setattr(train, "marks", lambda steps, every: [])
        return_to = tmp_path_factory.mktemp("cache")
        yield train.Place(return_to), text.corpus(folder, 300, return_to).digest


@pytest.mark.parametrize(
    ("method", "schedules"), [("diloco", ["even", "restarts:2", "to-mean"]), ("noloco-overlap", ["even", "qsr:4"])]
)
def test_a_schedule_changes_the_loss_and_no_byte(cache, method, schedules):
    place, digest = cache
    settings = (digest, "mite", method, "muon", "float32", 2, 6, 24, 0.02, (("lr", 0.7), ("momentum", 0.6)), 0)
    plain = train.run(train.Spec(*settings), place)
    losses = {"plain": plain["loss"]}
    for schedule in schedules:
        found = bench.steered(bench.Steered(*settings, schedule), place)
        assert found["bytes_per_token"] == plain["bytes_per_token"]
        losses[schedule] = found["loss"]
    assert losses.pop("plain") == losses["even"]
    assert len(set(losses.values())) == len(losses)


def test_results_are_kept_and_no_run_is_made_twice(tmp_path, monkeypatch, called):
    made = []

    def steered(spec, place):
        made.append(spec)
        return {**{name: getattr(spec, name) for name in spec.__dataclass_fields__}, "outer": dict(spec.outer), "loss": 3.0}

    monkeypatch.setattr(bench, "steered", steered)
    monkeypatch.setattr(bench, "corpus", lambda *_: type("Text", (), {"digest": "t"}))
    for _ in range(2):
        assert called(bench.main, "--resume", tmp_path / "found.jsonl", "--seeds", 2).returncode == 0
    assert made == list(bench.specs("t", 1000, 2))
    assert len(set(made)) == 2 * sum(map(len, bench.TRIED.values()))


def test_every_run_has_an_even_one_to_compare_with():
    for (method, _, _), schedules in bench.TRIED.items():
        assert schedules[0] == "even"
        assert method in methods.BEST
