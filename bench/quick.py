"""Three minutes on two cores: the main models, a training step, cold calls and growth with the number of columns."""

from __future__ import annotations

import functools

from bench import suite

PRESET = suite.Preset("quick", minutes=3, seconds=0.4, columns=(10, 100, 1000))

parse = functools.partial(suite.parse, PRESET)
main = functools.partial(suite.main, PRESET)
