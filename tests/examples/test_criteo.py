from __future__ import annotations

import gzip
import math
from pathlib import Path

import pytest
import torch

from criteo import CATEGORIES, INTEGERS, Batch, CriteoError, hash_categories, read_batches
from generate import generate

ROWS = tuple(range(50, 50 + CATEGORIES))
INTEGER_FIELDS = ["1", "-2", "", "260"] + ["0"] * (INTEGERS - 4)
CATEGORY_FIELDS = ["05db9164", "", "FFFFFFFF"] + ["68fd1e64"] * (CATEGORIES - 3)
FIELDS = ["1", *INTEGER_FIELDS, *CATEGORY_FIELDS]
HEADER = ["label", *(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27))]
SAMPLE = Path(__file__).resolve().parents[2] / "shared" / "data" / "criteo_sample.txt"


def read(path: Path, batch_size: int = 100, **kwargs: object) -> list[Batch]:
    return list(read_batches(path, batch_size, ROWS, **kwargs))  # type: ignore[arg-type]


def write(path: Path, *lines: str, end: str = "\n") -> Path:
    path.write_bytes("".join(line + end for line in lines).encode())
    return path


def row(position: int, text: str) -> str:
    fields = list(FIELDS)
    fields[position] = text
    return "\t".join(fields)


@pytest.mark.parametrize("separator", ["\t", ","])
@pytest.mark.parametrize("header", [False, True])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("zipped", [False, True])
def test_every_form_of_the_file_gives_the_same_tensors(
    tmp_path: Path, separator: str, header: bool, end: str, zipped: bool
) -> None:
    lines = [separator.join(HEADER)] * header + [separator.join(FIELDS)] * 3
    path = write(tmp_path / "rows", *lines, end=end)
    if zipped:
        path.write_bytes(gzip.compress(path.read_bytes()))
    (batch,) = read(path)
    assert batch.dense.shape == (3, 13)
    assert batch.dense.dtype == torch.float32
    assert batch.sparse.shape == (3, 26)
    assert batch.sparse.dtype == torch.int64
    assert batch.labels.tolist() == [1.0] * 3
    expected = [math.log(2), -math.log(3), 0.0, math.log(261)]
    assert batch.dense[2, :4].tolist() == pytest.approx(expected, rel=1e-6)
    assert batch.sparse[0, 1] == 0
    assert (batch.sparse[:, [0, *range(2, 26)]] > 0).all()
    assert (batch.sparse < torch.tensor(ROWS)).all()


def test_trailing_missing_fields_are_fields(tmp_path: Path) -> None:
    (batch,) = read(write(tmp_path / "rows", "\t".join(["0"] + [""] * 39)))
    assert batch.dense.count_nonzero() == 0
    assert batch.sparse.count_nonzero() == 0


def test_floats_as_in_exported_frames(tmp_path: Path) -> None:
    (batch,) = read(write(tmp_path / "rows", row(1, "17668.0")))
    assert batch.dense[0, 0].item() == pytest.approx(math.log(17669), rel=1e-6)


def test_hash_is_the_same_everywhere_and_differs_by_feature() -> None:
    value = 0x05DB9164
    ids = hash_categories(torch.full((1, CATEGORIES), value).numpy(), [1_000_000] * CATEGORIES)[0].tolist()
    assert ids == hash_by_hand(value, 1_000_000)
    assert len(set(ids)) == CATEGORIES


def hash_by_hand(value: int, rows: int) -> list[int]:
    ids = []
    for feature in range(1, CATEGORIES + 1):
        x = (value + feature * 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        ids.append(1 + (x ^ x >> 31) % (rows - 1))
    return ids


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("\t".join(FIELDS[:-1]), "expected 40 fields .* found 39"),
        ("\t".join([*FIELDS, "0"]), "expected 40 fields .* found 41"),
        ("nonsense", "expected 40 fields .* found 1"),
        (row(0, "2"), "label: expected 0 or 1, found '2'"),
        (row(0, ""), "label"),
        (row(4, "many"), "I4: expected a finite number, found 'many'"),
        (row(13, "nan"), "I13"),
        (row(1, "inf"), "I1"),
        (row(14, "xyz"), "C1: expected at most 15 hexadecimal digits, found 'xyz'"),
        (row(39, "-1"), "C26"),
        (row(20, "0" * 16), "C7"),
        (row(20, "1_0"), "C7"),
        (row(20, "\u0661"), "C7"),
    ],
)
def test_bad_rows_are_named_with_file_and_line(tmp_path: Path, line: str, complaint: str) -> None:
    path = write(tmp_path / "rows.tsv", "\t".join(FIELDS), line)
    with pytest.raises(CriteoError, match=rf"rows\.tsv:2: .*{complaint}"):
        read(path)


def test_bytes_that_are_no_text_are_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(row(14, "?").replace("?", "\xff").encode("latin-1") + b"\n")
    with pytest.raises(CriteoError, match=r":1: category C1"):
        read(path)


def test_a_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    path = generate(tmp_path / "rows.gz", rows=2000)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(CriteoError, match=r"rows\.gz:\d+: damaged gzip file"):
        read(path)


def test_empty_lines_and_empty_files(tmp_path: Path) -> None:
    assert read(write(tmp_path / "rows", "\t".join(FIELDS), "", "\t".join(FIELDS)))[0].labels.shape == (2,)
    assert read(write(tmp_path / "empty")) == []
    assert read(write(tmp_path / "header", ",".join(HEADER))) == []


def test_batches_keep_the_order_and_the_rest(tmp_path: Path) -> None:
    path = generate(tmp_path / "rows.tsv", rows=25)
    whole, parts = read(path, 100), read(path, 10)
    assert [len(part.labels) for part in parts] == [10, 10, 5]
    for field in range(3):
        assert torch.equal(torch.cat([part[field] for part in parts]), whole[0][field])


def test_the_parts_are_disjoint_and_complete(tmp_path: Path) -> None:
    path = generate(tmp_path / "rows.tsv", rows=95)
    (whole,), (train,), (held_out,) = (read(path, part=part) for part in ("all", "train", "held-out"))
    is_held_out = torch.arange(1, 96) % 10 == 0
    assert torch.equal(held_out.dense, whole.dense[is_held_out])
    assert torch.equal(train.dense, whole.dense[~is_held_out])


def test_reading_streams(tmp_path: Path) -> None:
    """The bad row comes late: the batches before it are there first."""
    path = write(tmp_path / "rows", *["\t".join(FIELDS)] * 40, "bad")
    batches = read_batches(path, 10, ROWS)
    assert [len(next(batches).labels) for _ in range(4)] == [10] * 4
    with pytest.raises(CriteoError, match=":41:"):
        next(batches)


@pytest.mark.parametrize("name", ["rows.tsv", "rows.gz"])
def test_progress_grows_to_one(tmp_path: Path, name: str) -> None:
    seen: list[float] = []
    read(generate(tmp_path / name, rows=3000), 500, on_progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_wrong_arguments(tmp_path: Path) -> None:
    path = write(tmp_path / "rows", "\t".join(FIELDS))
    with pytest.raises(ValueError, match="batch size"):
        read(path, 0)
    with pytest.raises(ValueError, match="26 table sizes"):
        next(read_batches(path, 1, [10] * 25))
    with pytest.raises(OSError, match="absent"):
        read(tmp_path / "absent")


@pytest.mark.skipif(not SAMPLE.exists(), reason="the sample of real rows is not here")
def test_real_rows() -> None:
    batches = read(SAMPLE, 64)
    assert [len(batch.labels) for batch in batches] == [64, 64, 64, 8]
    labels, ids = torch.cat([batch.labels for batch in batches]), torch.cat([batch.sparse for batch in batches])
    text = SAMPLE.read_text().splitlines()[1:]
    assert labels.tolist() == [float(line[0]) for line in text]
    for feature in range(CATEGORIES):
        values = [line.split(",")[14 + feature] for line in text]
        assert [bool(value) for value in values] == (ids[:, feature] > 0).tolist()
        assert len(set(ids[:, feature].tolist())) <= len(set(values))
