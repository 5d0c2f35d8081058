"""The Python blocks of the pages run, all in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import blocks
from tests.documents.parts import DOCUMENTS, ROOT


def test_every_block_runs(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.documents.blocks"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "id 120 at row 1 is outside table 'users.weight'" in done.stdout, "docs/guarantees.md prints it"


def test_the_pages_have_blocks() -> None:
    found = [block for page in DOCUMENTS for block in blocks.blocks(page)]
    assert {"README.md", "docs/getting-started.md"} <= {block.page for block in found if not block.why}
    shown = sum(page.read_text().count("```python") for page in DOCUMENTS)
    first = sum(page.read_text().count("<!-- first:\n") for page in DOCUMENTS)
    assert len(found) == shown + first, "a block whose fence is written otherwise would not run"


def test_what_fails_is_named_and_what_is_marked_does_not_run(tmp_path, monkeypatch, capsys) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- first:\nx = 1\n-->\n\n   ```python\n   assert x == 1\n   ```\n"
        "<!-- only compiled: it divides -->\n\n```python\n1 / 0\n```\n\n```python\ny = x\nraise ValueError(y)\n```\n"
    )
    monkeypatch.setattr(blocks, "ROOT", tmp_path)
    monkeypatch.setattr(blocks, "DOCUMENTS", [page])
    assert blocks.main() == 1
    told = capsys.readouterr().err
    assert told.startswith("page.md, line 15:") and "ValueError: 1" in told and "division" not in told


def test_what_does_not_compile_is_no_block(tmp_path, monkeypatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- only compiled: it cannot -->\n```python\nx = (\n```\n")
    monkeypatch.setattr(blocks, "ROOT", tmp_path)
    (block,) = blocks.blocks(page)
    with pytest.raises(SyntaxError):
        block.compiled()
