"""The page: what it holds, and how it behaves in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fxopt.report.data import Block
from fxopt.report.html import MOST_BYTES, page
from tests.report.browser import Browser, browser
from tests.report.made import columns, linear, report


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture
def shown(chromium: Browser, tmp_path: Path) -> Browser:
    """The report made by hand."""
    return opened(chromium, tmp_path, page(report()))


def opened(chromium: Browser, folder: Path, text: str, width: int = 1200, dark: bool = False) -> Browser:
    chromium.problems.clear()
    (folder / "report.html").write_text(text)
    chromium.open(folder / "report.html", width, dark)
    return chromium


def rows(chromium: Browser, table: str) -> list[str]:
    """The first cell of each row."""
    return chromium.run(
        f"[...document.querySelectorAll('#{table} tbody tr.opens')].map(row => row.cells[0].textContent)"
    )


def click(chromium: Browser, selector: str) -> None:
    chromium.run(f"document.querySelector({json.dumps(selector)}).click()")


def test_is_one_file() -> None:
    text = page(report())
    assert not re.findall(r"(?:src|href)\s*=\s*['\"](?!data:)[^'\"]", text)
    assert "@import" not in text and "url(" not in text
    assert "{{" not in text.split('id="data"')[0]


def test_text_of_a_report_is_never_markup() -> None:
    text = page(report())
    assert text.count("</script>") == 2  # the data's and the script's own
    assert "\\u003c/script>\\u003cb>&amp;" in text


def test_a_report_of_many_columns_fits() -> None:
    assert len(page(report(columns(5000), linear((0,))))) < MOST_BYTES / 4
    large = page(report(columns(100_000), linear((0,))))
    assert len(large) <= MOST_BYTES
    (block, *_) = json.loads(large.split('id="data">')[1].split("</script>")[0])["signatures"][0]["before"]
    assert block["count"] == 100_000 > len(block["parts"])


def test_renders(shown: Browser) -> None:
    text = shown.run("document.body.innerText")
    for part in ("fxopt report: DLRM", "3.0x", "busy", "1.20 ms to 390 us", "pass ids that are in range already",
                 "Saves at most 100 us of a call at batch 256", "torch.compile", "python -m fxopt report model.py",
                 "# </script><b>&amp;", "float32[B, 13], int64[B, 26]"):  # fmt: skip
        assert part in text, part
    assert shown.problems == []


def test_bars_add_up_to_the_whole_call(shown: Browser) -> None:
    widths = shown.run(
        "[...document.querySelectorAll('.bar')].map(bar => "
        "[...bar.children].reduce((sum, part) => sum + parseFloat(part.style.width), 0))"
    )
    assert widths == pytest.approx([100, 32.5, 100, 32.5], abs=0.1)


def test_sorts_and_filters(shown: Browser) -> None:
    assert rows(shown, "misses") == ["towers", "embedding_columns", "kept as it is"]  # what would save most first
    click(shown, "#rewrites th:nth-child(3) button")
    assert rows(shown, "rewrites") == ["views", "embedding_columns"]
    click(shown, "#rewrites th:nth-child(3) button")
    assert rows(shown, "rewrites") == ["embedding_columns", "views"]
    shown.run(
        "(() => { const box = document.querySelector('#rewrites input'); box.value = 'SAME ELEM';"
        " box.dispatchEvent(new Event('input')); })()"
    )
    assert rows(shown, "rewrites") == ["views"]
    assert shown.problems == []


def test_rows_open_and_close(shown: Browser) -> None:
    click(shown, "#rewrites tbody tr")
    detail = shown.run("document.querySelector('#rewrites .detail').innerText")
    for part in ("nodes before", "embedding f32[B, 8]", "columns f32[B]", "the same rows", "return table(ids)"):
        assert part in detail
    click(shown, "#rewrites tbody tr")
    assert shown.run("document.querySelector('#rewrites .detail')") is None


def test_boxes_show_their_operators_and_places(shown: Browser) -> None:
    click(shown, "#graph-before .box")
    text = shown.run("document.getElementById('details').innerText")
    for part in (
        "12 parts of embedding columns",
        "bucketize i64[B]",
        "4.10 kB",
        "tables.11 at model.py:64",
        "12 places",
    ):
        assert part in text
    shown.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")  # edges wait for sizes
    assert shown.run("document.querySelectorAll('#graph-before path').length") == 1
    assert shown.problems == []


def test_many_forms_are_folded(chromium: Browser, tmp_path: Path) -> None:
    """5,000 columns, no two alike, are one box until it is unfolded; the page opens within 3 seconds."""
    blocks: tuple[Block, ...] = tuple(columns(1, name=f" of form {number}") for number in range(5000))
    text = page(report(*blocks, linear(tuple(range(5000)))))
    assert len(text) < MOST_BYTES
    chromium.problems.clear()
    (tmp_path / "report.html").write_text(text)
    assert chromium.open(tmp_path / "report.html") < 3
    assert chromium.run("document.querySelectorAll('#graph-before .box').length") == 2
    assert "5,000 x embedding columns" in chromium.run("document.getElementById('graph-before').innerText")
    click(chromium, "#graph-before .fold > .box")
    assert chromium.run("document.querySelectorAll('#graph-before .box').length") == 5002
    click(chromium, "#graph-before .fold > .box")
    assert chromium.run("document.querySelector('#graph-before .fold .level').hidden")
    assert chromium.problems == []


@pytest.mark.parametrize("dark", [False, True])
def test_fits_a_phone_in_light_and_dark(chromium: Browser, tmp_path: Path, dark: bool) -> None:
    found = opened(chromium, tmp_path, page(report()), 390, dark)
    assert found.run("document.documentElement.scrollWidth") <= 390
    ground = found.run("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")


def test_the_batch_is_chosen(shown: Browser) -> None:
    assert "at batch 256" in shown.run("document.body.innerText")
    shown.run(
        "(() => { const box = [...document.querySelectorAll('select')].at(-1); box.value = '1';"
        " box.dispatchEvent(new Event('change')); })()"
    )
    assert "What the machine allows, at batch 1\n" in shown.run("document.body.innerText").replace(
        "How close to what", "What"
    )
    assert shown.problems == []
