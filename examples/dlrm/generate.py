"""Writes rows in the Criteo format with skewed categories and a planted logistic signal.

python generate.py data/train.tsv --rows 200000
"""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from criteo import CATEGORIES, INTEGERS

CHUNK = 20_000
SKEW = 1.2  # Zipf exponent: the commonest of 10,000 values takes about a fifth of the rows, as in real logs
MISSING_RATE = 0.1
POSITIVE_BIAS = -1.3


class Population:
    """What the rows are drawn from: each category's values, how common they are, and what they say of the label."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.sizes = rng.permutation(np.geomspace(10, 30_000, CATEGORIES).astype(int))
        self.cumulative = [self._zipf(size) for size in self.sizes]
        # Index `size` is the missing value. An odd multiplier keeps the hexadecimal values distinct.
        self.values = [
            np.array([f"{(value * 2654435761 + feature) % 2**32:08x}" for value in range(size)] + [""], dtype=object)
            for feature, size in enumerate(self.sizes)
        ]
        self.effects = [rng.normal(0.0, 0.35, size + 1) for size in self.sizes]
        self.slopes = rng.normal(0.0, 0.15, INTEGERS)
        self.spreads = rng.uniform(0.5, 2.0, INTEGERS)

    @staticmethod
    def _zipf(size: int) -> np.ndarray:
        weight = np.arange(1, size + 1) ** -SKEW
        return weight.cumsum() / weight.sum()

    def rows(self, count: int, rng: np.random.Generator) -> Iterator[str]:
        """`count` lines, without their newlines."""
        logit = np.full(count, POSITIVE_BIAS)
        columns: list[list[str]] = []
        for slope, spread in zip(self.slopes, self.spreads, strict=True):
            level = rng.normal(1.5, spread, count)
            logit += slope * (level - 1.5)
            counts = np.floor(np.expm1(level)).astype(np.int64).astype(str).astype(object)  # -1 and up
            columns.append(np.where(rng.random(count) < MISSING_RATE, "", counts).tolist())
        for cumulative, values, effects in zip(self.cumulative, self.values, self.effects, strict=True):
            ids = np.minimum(np.searchsorted(cumulative, rng.random(count), side="right"), len(cumulative) - 1)
            ids[rng.random(count) < MISSING_RATE] = len(cumulative)
            logit += effects[ids]
            columns.append(values[ids].tolist())
        labels = rng.random(count) < 1.0 / (1.0 + np.exp(-logit))
        return map("\t".join, zip(labels.astype(int).astype(str).tolist(), *columns, strict=True))


def generate(path: str | Path, rows: int, seed: int = 0) -> Path:
    """Write `rows` tab-separated rows to `path` (gzip when it ends in .gz); the same seed gives the same rows.

    The file appears under its name only when it is complete.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    population, rng = Population(seed), np.random.default_rng([seed, 1])
    with gzip.open(partial, "wt") if path.suffix == ".gz" else partial.open("w") as file:
        for start in range(0, rows, CHUNK):
            file.writelines(line + "\n" for line in population.rows(min(CHUNK, rows - start), rng))
    return partial.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    generate(arguments.path, arguments.rows, arguments.seed)
    print(f"{arguments.rows} rows in {arguments.path}")


if __name__ == "__main__":
    main()
