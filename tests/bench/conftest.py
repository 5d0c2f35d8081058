from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.models import Mix


@pytest.fixture
def short_tables() -> Iterator[None]:
    """Models whose multi-hot columns have short tables: the large ones take most of a second each."""
    with pytest.MonkeyPatch.context() as patch:
        tables = property(lambda mix: [(50, 8)] * mix.bags + [(60, 32)] * mix.large_bags)
        patch.setattr(Mix, "bag_tables", tables)
        yield
