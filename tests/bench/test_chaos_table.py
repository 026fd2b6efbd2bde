"""The table of chaos runs."""

import json

import pytest

from bench import chaos_table

REPORT = {
    "peers": 4, "minutes": 2.0, "method": "noloco", "byzantine": 1, "lie": "nan", "robust": "clipped-gossip", "suspect": 3.0,
    "seed": 7, "kills": 4, "stops": 1, "rejoins": 4, "max_stall_s": 5.0,
    "median_stall_s": 1.0, "resume_s": 0.1, "resume_max_s": 0.7, "join_s": None,
    "join_max_s": None, "steps": 900, "steps_lost": 0, "steps_lost_by_killed": 12, "throughput_kept": 0.987,
    "throughput_kept_with_starts": None, "loss_first": 5.695, "loss_last": 2.0, "orphans": 0, "rss_slope": 0.5,
    "daemon_rss_slope": None, "fd_slope": -0.1, "failed_starts": [], "troubles": [], "unharmed": None,
    "every": 25, "load": 1.5, "cores": 2,
}  # fmt: skip


def test_a_column_for_each_run(tmp_path, capsys):
    page, results = tmp_path / "page.md", tmp_path / "results.jsonl"
    clean = {**REPORT, "byzantine": 0, "robust": "none", "suspect": 0.0, "unharmed": {"max_stall_s": 0.3, "loss_last": 1.9}}
    results.write_text("".join(json.dumps(report) + "\n" for report in (REPORT, clean)))
    page.write_text(f"before\n{chaos_table.BEGIN}old\n{chaos_table.END}after\n")
    assert chaos_table.main(["--results", str(results), "--into", str(page)]) == 0
    lines = capsys.readouterr().out.splitlines()
    attacked = "4 × 2 min, noloco, every 25, 1 hostile (nan), clipped-gossip, suspect 3, seed 7"
    assert lines[0] == f"| run | {attacked} | 4 × 2 min, noloco, every 25, seed 7 |"
    assert "| throughput kept, with starts | 0.987, - | 0.987, - |" in lines
    assert "| unharmed: longest | not run | 0.30 s |" in lines
    assert {line.count("|") for line in lines} == {4}
    assert page.read_text() == f"before\n{chaos_table.BEGIN}" + "\n".join(lines) + f"\n{chaos_table.END}after\n"


def test_a_page_without_a_place(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(SystemExit, match="no place for the table"):
        chaos_table.put_into(page, "", chaos_table.BEGIN, chaos_table.END)
