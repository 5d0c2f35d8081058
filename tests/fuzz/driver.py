"""Runs random graphs in worker processes for minutes, and prints each kind of failure as its smallest program.

A worker that dies is a failure of the graph that it was at; another one goes on behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

KINDS = ("dense", "aliases", "columns")
_GRAPHS_A_WORKER = 500  # then a fresh one: what a process has compiled and traced adds up
_SHRUNK_A_KIND = 2
SPOILT = 86  # a worker's exit status: an accelerator has failed, and the failure of its graph is told
_SILENCE = 120  # seconds without a graph until a worker counts as hanging


def main() -> None:
    options = parser().parse_args()
    if options.work:
        from tests.fuzz import worker

        worker.work(options)
        return
    if options.show is not None:
        from tests.fuzz import worker

        worker.show(options)
        return
    sys.exit(1 if Run(options).failures() else 0)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--graphs", type=int, help="stop after so many of each kind")
    parser.add_argument("--kind", choices=(*KINDS, "all"), default="all")
    parser.add_argument("--gradients", action="store_true", help="every graph with gradients")
    parser.add_argument("--seed", type=int, default=0, help="of the first graph; the next ones count up")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="folder for the reproducer of each failure")
    parser.add_argument("--show", type=int, metavar="SEED", help="check one graph, shrink it, and print it")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    return parser


class Run:
    """One run of the driver."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.until = time.monotonic() + 60 * options.minutes
        self.lock = threading.Lock()
        self.next = dict.fromkeys(_kinds(options), options.seed)
        every = _GRAPHS_A_WORKER * options.processes if options.graphs is None else options.graphs * len(self.next)
        self.share = min(_GRAPHS_A_WORKER, -(-every // options.processes))  # all processes have work until the end
        self.found: dict[tuple[str, str], list[int]] = defaultdict(list)
        self.seen: dict[str, Counter[str]] = defaultdict(Counter)

    def failures(self) -> int:
        threads = [threading.Thread(target=self._keep_working, args=(i,)) for i in range(self.options.processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for kind, seen in self.seen.items():
            print(f"{kind}: seeds {self.options.seed} to {self.next[kind] - 1}; {dict(seen.most_common())}")
        for (kind, what), seeds in sorted(self.found.items(), key=lambda item: -len(item[1])):
            print(f"{kind}, {what}: {len(seeds)} ({', '.join(map(str, sorted(seeds)[:30]))})")
        return sum(map(len, self.found.values()))

    def _keep_working(self, number: int) -> None:
        kinds = list(self.next)
        turn = number
        while time.monotonic() < self.until:
            kind = kinds[turn % len(kinds)]
            turn += 1
            span = self._take(kind)
            if span is not None:
                self._range(kind, *span)
            elif all(self._left(kind) == 0 for kind in kinds):
                return

    def _left(self, kind: str) -> int:
        graphs = self.options.graphs
        return _GRAPHS_A_WORKER if graphs is None else max(0, self.options.seed + graphs - self.next[kind])

    def _take(self, kind: str) -> tuple[int, int] | None:
        with self.lock:
            count = min(self.share, self._left(kind))
            start = self.next[kind]
            self.next[kind] += count
        return (start, start + count) if count else None

    def _range(self, kind: str, start: int, stop: int) -> None:
        """All seeds in [start, stop), however many workers die of them."""
        while start < stop and time.monotonic() < self.until:
            at = self._worker(kind, start, stop)
            if at is None:
                return
            start = at + 1

    def _worker(self, kind: str, start: int, stop: int) -> int | None:
        """Runs one process; the seed that ended it, or None."""
        command = [sys.executable, "-m", "tests.fuzz", "--work", "--kind", kind, "--seed", str(start)]
        command += ["--graphs", str(stop - start), "--device", self.options.device]
        command += ["--gradients"] * self.options.gradients + ["--no-shrink"] * self.options.no_shrink
        if self.options.out:
            command += ["--out", str(self.options.out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        at, watchdog = start, _Watchdog(process, self.until)
        for line in process.stdout:
            watchdog.alive()
            if line.startswith("{"):
                self._note(kind, json.loads(line))
            elif line.startswith("at "):
                at = int(line.split()[1])
        code = process.wait()
        watchdog.stop()
        if code == 0 or watchdog.over:
            return None
        if code == SPOILT:
            return at
        name = signal.Signals(-code).name if code < 0 else f"exit {code}"
        self._note(kind, {"seed": at, "what": f"crash: {'hangs' if watchdog.hung else name}", "text": ""})
        return at

    def _note(self, kind: str, record: dict) -> None:
        with self.lock:
            if "seen" in record:
                self.seen[kind].update(record["seen"])
                return
            seeds = self.found[kind, record["what"]]
            seeds.append(record["seed"])
            print(f"{kind} {record['seed']}: {record['what']} {record.get('message', '')}", flush=True)
            if record["text"] and len(seeds) <= _SHRUNK_A_KIND:
                print(record["text"], flush=True)


class _Watchdog:
    """Ends a worker that is silent for too long, or when the time is over."""

    def __init__(self, process: subprocess.Popen, until: float) -> None:
        self.process, self.until, self.hung, self.over = process, until, False, False
        self._last, self._done = time.monotonic(), threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def alive(self) -> None:
        self._last = time.monotonic()

    def stop(self) -> None:
        self._done.set()

    def _watch(self) -> None:
        while not self._done.wait(1):
            now = time.monotonic()
            self.over, self.hung = now > self.until, now - self._last > _SILENCE
            if self.over or self.hung:
                self.process.send_signal(signal.SIGKILL if self.over else signal.SIGABRT)  # which says where it is
                return


def _kinds(options: argparse.Namespace) -> tuple[str, ...]:
    return KINDS if options.kind == "all" else (options.kind,)
