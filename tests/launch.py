"""Starts a script once for each of two ranks, on the loopback interface.

The ranks are forks of a process that has imported once what takes seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS = 240  # 20 on two idle cores; a rank that waits for one that is gone must not hang the suite

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["torch", "torchrec", "torchmetrics", "torch.distributed.checkpoint", "fxopt.optimize"])


@dataclass
class Rank:
    """One process, and the file that it prints to."""

    process: BaseProcess
    log: Path

    @property
    def returncode(self) -> int | None:
        """The exit status; the negative number of a signal that ended it."""
        return self.process.exitcode


def launch(arguments: Sequence[str | Path], folder: Path = ROOT) -> list[Rank]:
    """`python *arguments` in `folder`, as ranks 0 and 1. The arguments begin with a script, or with -m and a module."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return [_started([*map(str, arguments)], folder, {**common, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]


def _started(arguments: list[str], folder: Path, environment: dict[str, str]) -> Rank:
    log = Path(tempfile.mkstemp(prefix="rank", suffix=".log")[1])
    process = _forks.Process(target=_run, args=(arguments, folder, environment, log))
    process.start()
    return Rank(process, log)


def _run(arguments: list[str], folder: Path, environment: dict[str, str], log: Path) -> None:
    import torch

    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(folder))
        runpy.run_path(sys.argv[0], run_name="__main__")


def outputs(ranks: Sequence[Rank]) -> list[str]:
    """What each rank has printed when both are done."""
    try:
        for rank in ranks:
            rank.process.join(SECONDS)
            assert rank.returncode is not None, f"a rank is not done after {SECONDS} s: {rank.log.read_text()[-3000:]}"
        return [rank.log.read_text() for rank in ranks]
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.log.unlink()
