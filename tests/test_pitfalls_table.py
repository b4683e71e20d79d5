"""PITFALLS.md names only tests that exist."""

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_test_in_the_table_exists():
    tests = {name for file in HERE.glob("test_*.py")
             for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)}
    named = re.findall(r"`(test_\w+)`", (HERE / "PITFALLS.md").read_text())
    assert len(named) > 60
    assert sorted(set(named) - tests) == []
