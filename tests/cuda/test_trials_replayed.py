"""On a GPU trials time captured graphs, whether a rewrite needs proof or not."""

from __future__ import annotations

import pytest

from fxopt.rewrites.framework.core import Fuel, Rewrite, apply
from fxopt.rewrites.framework.policy import MEASURED
from fxopt.tune.tuner import Site, Tuner, Verdict
from tests.cuda.on_a_gpu import graph_of
from tests.tune.test_tuner import as_clamp, relus


@pytest.mark.parametrize("inference", [True, False])
def test_what_is_timed_is_what_is_replayed(monkeypatch, inference):
    sites = list[Site]()
    monkeypatch.setattr(Tuner, "verdict", lambda self, site: sites.append(site) or Verdict({16: 2.0}))
    clamps = Rewrite("clamps", relus, as_clamp, "", policy=MEASURED)
    apply(clamps, graph_of(lambda x: (x + 1.0).relu(), [(4, 4)]), Fuel(), inference, Tuner("full"))
    (site,) = sites
    assert site.replayed == inference, "a backward is not captured"
    assert site.key.endswith("-replayed") == inference, "what was timed otherwise is another timing"
