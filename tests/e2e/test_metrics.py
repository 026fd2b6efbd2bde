"""A node that serves metrics, asked over HTTP while it trains."""

import json
import re
import signal
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse


def test_a_node_is_scraped_while_it_trains(shoal, eventually):
    options = {"layers": 1, "width": 16, "context": 16, "batch": 4}
    file = shoal.toml(
        options=options,
        node={"metrics": 0},
        outer={"every": 5, "method": "none"},
        train={"steps": 0},
    )
    node = shoal.node("up", file, "anna")
    node.line()
    (url,) = re.findall(r"http://127\.0\.0\.1:\d+/metrics", node.said())

    def values():
        with urllib.request.urlopen(url, timeout=10) as answer:
            return {
                s.name: s.value for family in parse(answer.read().decode()) for s in family.samples
            }

    def trained():
        found = values()
        return (
            found
            if found.get("shoal_exchanges_ended_total", 0) >= 2 and "shoal_loss_training" in found
            else None
        )

    first = eventually(trained, 60, "two rounds")
    second = eventually(
        lambda: (
            found
            if (found := values())["shoal_exchanges_ended_total"]
            > first["shoal_exchanges_ended_total"]
            else None
        ),
        60,
    )
    assert second["shoal_progress_step_total"] >= first["shoal_progress_step_total"] >= 10
    assert (second["shoal_progress_members"], second["shoal_info"]) == (1.0, 1.0)
    assert second["shoal_loss_held_out"] > 0
    node.signal(signal.SIGTERM)
    assert node.wait() == 130
    rounds = [
        json.loads(line)
        for line in (shoal.home / "anna" / "metrics.jsonl").read_text().splitlines()
    ]
    assert (
        sum(event["event"] == "round" for event in rounds) >= second["shoal_exchanges_ended_total"]
    )
    assert not any(event["event"] == "progress" for event in rounds)
    with pytest.raises(urllib.error.URLError):
        values()
