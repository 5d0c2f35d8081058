"""What a user may choose. Every field has a default that is safe and fast."""

from __future__ import annotations

from dataclasses import dataclass

VERIFY_LEVELS = ("off", "first", "full")
TUNE_LEVELS = ("off", "fast", "full")
PRECISIONS = ("fp32", "bf16", "int8")
LOWERINGS = ("fx", "inductor")
BAD_IDS = ("raise", "clamp", "unchecked")  # numbered as in an encoded plan of columns


@dataclass(frozen=True)
class Config:
    """Options of :func:`fxopt.optimize`.

    Args:
        verify: ``"first"`` compares the optimized graph with eager on the inputs of each capture, and where their sizes
            coincide or are 0 or 1, or their rows are copies, on made-up inputs of other sizes (where none can be made,
            the capture serves such sizes alone); ``"full"`` also compares gradients and further batch sizes;
            ``"off"`` trusts the rewrites.
        tune: ``"fast"`` times rewrites against what they replace, at most 5 seconds a capture, and leaves out what is
            slower on this machine (timings are remembered beside the compiled kernels), and in the end whatever made
            the model as a whole slower on the inputs of the capture; ``"full"`` takes its time and more batch sizes;
            ``"off"`` applies every rewrite that is right.
        lower: ``"fx"`` calls what is left after the rewrites operator by operator; ``"inductor"`` compiles what lies
            between products, lookups and other large operators (seconds, at each capture; its caches work as under
            torch.compile) and calls the rest. Where that fails the graph runs as with ``"fx"``; the report says why.
        precision: ``"bf16"`` or ``"int8"`` keeps copies of wide linears' weights (on the CPU) and of tables of 4 MiB
            and more in fewer bits, for inference; where that is faster here, and right within `max_error`. Edits of
            a few rows through `.data` or NumPy are not seen, and on a GPU no edit through `.data` is.
        low_rank: replaces a wide linear by two narrow ones, of the least rank that leaves at most this share (0.1) of
            its weight's norm; for inference, where it is faster and right within `max_error`.
        max_error: what `precision` and `low_rank` together may change: the largest difference from eager over the
            largest value of an output, on the inputs of the capture. What exceeds it is rolled back.
        disable: names of passes to leave out (see ``fxopt.rewrites.PASSES``).
        max_rewrites: apply at most this many rewrites ("fuel"); used to bisect a wrong answer.
        leaves: module paths, as in ``named_modules()``, that stay opaque.
        max_captures: how many input signatures one model may capture before new ones run eagerly.
        cuda_graphs: without gradients on a CUDA device, calls may replay captured graphs, one for each bucket of batch
            sizes. ``"auto"``: where that is faster than the call, timed on the second call of each size; ``True``:
            wherever it gives the same answers; ``False``: never. All graphs of a process hold at most an eighth of
            the memory that the device has free. The report says what is replayed, and why something is not.
        bad_ids: what an embedding lookup on a CUDA device does with an id outside its table. ``"raise"``: its rows
            are NaN, and the next call, or ``fxopt.kernels.columns.errors.check(device)``, which waits for the device,
            raises IndexError with column, table, row and value; ``"clamp"`` takes the nearest row, and
            ``fxopt.kernels.columns.errors.clamped(device)`` tells how many ids it has moved in this process;
            ``"unchecked"`` reads wherever the id points: only for ids that are known to be good. The CPU always raises.
            To verify, the first call of each signature runs eager too, and there a bad id meets torch's assert, which
            no process survives: make that call with good ids (`example_inputs`), or choose ``verify="off"``.
        progress: show on stderr what an optimization of more than a second is at, in a log with a line each second;
            None: where stderr is a terminal.
        dump: a folder to write each pass's graph to, as text and as SVG; every capture makes a folder in it.
    """

    verify: str = "first"
    tune: str = "fast"
    lower: str = "fx"
    precision: str = "fp32"
    low_rank: float | None = None
    max_error: float = 0.01
    disable: tuple[str, ...] = ()
    max_rewrites: int | None = None
    leaves: tuple[str, ...] = ()
    max_captures: int = 16
    cuda_graphs: bool | str = "auto"
    bad_ids: str = "raise"
    progress: bool | None = None
    dump: str | None = None

    def __post_init__(self) -> None:
        if self.verify not in VERIFY_LEVELS:
            raise ValueError(f"Config.verify: expected one of {VERIFY_LEVELS}, found {self.verify!r}")
        if self.tune not in TUNE_LEVELS:
            raise ValueError(f"Config.tune: expected one of {TUNE_LEVELS}, found {self.tune!r}")
        if self.lower not in LOWERINGS:
            raise ValueError(f"Config.lower: expected one of {LOWERINGS}, found {self.lower!r}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"Config.precision: expected one of {PRECISIONS}, found {self.precision!r}")
        if not isinstance(self.cuda_graphs, bool) and self.cuda_graphs != "auto":
            raise ValueError(f"Config.cuda_graphs: expected 'auto', True or False, found {self.cuda_graphs!r}")
        if self.bad_ids not in BAD_IDS:
            raise ValueError(f"Config.bad_ids: expected one of {BAD_IDS}, found {self.bad_ids!r}")
        if self.low_rank is not None and not 0 < self.low_rank < 1:
            raise ValueError(f"Config.low_rank: expected a share between 0 and 1, found {self.low_rank!r}")
        if self.lossy and self.verify == "off":
            raise ValueError("Config.verify: expected 'first' or 'full' beside precision or low_rank, found 'off'")
        if isinstance(self.disable, str):
            raise TypeError(f"Config.disable: expected a tuple of pass names, found the string {self.disable!r}")

    @property
    def lossy(self) -> bool:
        """Whether anything was asked for that may change answers beyond rounding."""
        return self.precision != "fp32" or self.low_rank is not None
