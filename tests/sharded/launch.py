"""Starts a script once for each of two ranks, on the loopback interface."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 240  # 20 on two idle cores; a rank that waits for one that is gone must not hang the suite


def launch(arguments: Sequence[str | Path], folder: Path = ROOT) -> list[subprocess.Popen[str]]:
    """`python *arguments` in `folder`, as ranks 0 and 1; their output is one text each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **common, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "RANK": rank, "LOCAL_RANK": rank},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in "01"
    ]


def outputs(ranks: Sequence[subprocess.Popen[str]]) -> list[str]:
    """What each rank has printed when both are done."""
    try:
        return [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
