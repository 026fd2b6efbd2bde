"""The guide is a whole site: every page is in its navigation, and it builds without a warning."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent


class Lenient(yaml.SafeLoader):
    """mkdocs.yml may hold tags of Python's, which nothing here needs."""


Lenient.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def pages(entry):
    if isinstance(entry, str):
        return [entry]
    return [
        page
        for part in (entry.values() if isinstance(entry, dict) else entry)
        for page in pages(part)
    ]


def test_every_page_is_in_the_navigation_once():
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Lenient)
    written = [page.name for page in (ROOT / "docs").glob("*.md")]
    assert sorted(pages(settings["nav"])) == sorted(
        ["index.md", *written]
    )  # index.md is made of the README


@pytest.mark.slow(reason="mkdocs renders the whole site and the API")
def test_it_builds_without_a_warning(tmp_path):
    if shutil.which("mkdocs", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("mkdocs is not installed: pip install 'shoal[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    assert "DiLoCo" in (tmp_path / "python-api.html").read_text(encoding="utf-8")
    assert 'href="methods.html"' in (tmp_path / "index.html").read_text(encoding="utf-8")
