"""Reports made by hand."""

from __future__ import annotations

from fxopt.findings import Place
from fxopt.report.data import (
    Advice,
    Block,
    Contender,
    Machine,
    Measurement,
    Note,
    Pass,
    Report,
    SignatureReport,
    Spending,
    Tally,
)

LINE = Place("tables.0", "model.py:64")
MACHINE = Machine("A CPU", 2, "2.13.0", "cpu", "0.1.0", 2e10, 1e11)
SPENT = (
    Spending("embedding columns", 6e-4, 0.5, 4e-5),
    Spending("linear layers", 4e-4, 1 / 3, 3e-4),
    Spending("between operators", 2e-4, 1 / 6, 5e-5),
)


def measured(batch: int, speedup: float | None = 3.0, **more: object) -> Measurement:
    return Measurement(batch, 1.2e-3, 3.9e-4, speedup, (2.9, 3.2), 1e-7, "", SPENT, **more)  # type: ignore[arg-type]


def columns(number: int, reads: tuple[int, ...] = (), kind: str = "embedding columns", name: str = "") -> Block:
    """A block of `number` columns."""
    parts = tuple((f"tables.{place}{name}", "model.py:64") for place in range(number))
    numbers = dict.fromkeys((1, 256), 1e-4), dict.fromkeys((1, 256), 4096), dict.fromkeys((1, 256), 0)
    return Block(kind, (f"bucketize i64[B]{name}", f"embedding f32[B, 8]{name}"), parts, reads, *numbers)


def linear(reads: tuple[int, ...]) -> Block:
    sizes = {1: 2e-4, 256: 1e-3}, {1: 1 << 16, 256: 1 << 18}, {1: 1 << 16, 256: 1 << 24}
    return Block("linear layers", ("linear f32[B, 512]", "relu f32[B, 512]"), (("top.0", "model.py:9"),), reads, *sizes)


def report(*blocks: Block, training: bool = False) -> Report:
    """One signature with every field filled. blocks: of the graph before (default: 12 columns and a linear layer)."""
    passes = (
        Pass(
            "embedding_columns",
            (Note("26 columns in one call", "the same rows", 1, LINE, ("embedding f32[B, 8]",), ("columns f32[B]",)),),
            (Note("its table is edited in place", "", 880, Place("tables.1", "model.py:70"), stake=2e-5),),
        ),
        Pass("views", (Note("view removed", "the same elements", 40, Place("top", "model.py:9")),)),
        Pass("towers", misses=(Note("gradients are recorded", "", 1, Place("top", "model.py:9"), stake=1e-4),)),
    )
    before = blocks or (columns(12), linear((0,)))
    found = SignatureReport(
        "float32[s0, 13], int64[s0, 26]",
        leaves=(Note("depends on data", "", 1, Place("attention", "din.py:88")),),
        passes=passes,
        operators_before=1297,
        operators_after=31,
        roles=(Tally("table lookups", 26, 1),),
        max_error=1e-7,
        seconds={"capture": 0.4},
        measurements=(
            measured(1, others=(Contender("torch.compile", 8e-4, 1.5),)),
            measured(
                256, None, distrust="machine busy, do not trust", others=(Contender("torch.compile", None, None, "no"),)
            ),
        ),
        advice=(Advice("pass ids that are in range already", 1e-4, 256, LINE),),
        before=before,
        after=(columns(1), linear((0,))),
    )
    sources = {"model.py:64": ">   64  return table(ids)  # </script><b>&amp;"}
    return Report("DLRM", MACHINE, (found,), training, "python -m fxopt report model.py", sources)
