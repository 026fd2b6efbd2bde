"""The demo's view of its nodes' metrics: all whole lines, each parsed once."""

import json

from shoal.node.demo import nodes


def test_each_event_is_parsed_once_and_half_a_line_waits(tmp_path, monkeypatch):
    parsed = []
    monkeypatch.setattr(nodes.json, "loads", lambda line, loads=json.loads: parsed.append(line) or loads(line))
    path = tmp_path / "metrics.jsonl"
    reader = nodes.EventReader(path)
    assert reader.read() == []
    path.write_text('{"n": 1}\n{"n": 2}\n{"n"', encoding="utf-8")
    assert [event["n"] for event in reader.read()] == [1, 2]
    with path.open("a", encoding="utf-8") as file:
        file.write(': "käse"}\n')
    assert [event["n"] for event in reader.read()] == [1, 2, "käse"]
    assert [event["n"] for event in reader.read()] == [1, 2, "käse"]
    assert len(parsed) == 3
