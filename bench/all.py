"""Half an hour on two cores: every model that `quick` has and many more, at more batch sizes, with torch.compile."""

from __future__ import annotations

import functools

from bench import suite

PRESET = suite.Preset("all", 30, 1.0, columns=(10, 100, 1000, 5000), bags=(1, 64, 1024), zoo=True)

parse = functools.partial(suite.parse, PRESET)
main = functools.partial(suite.main, PRESET)
