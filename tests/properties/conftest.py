"""The random models run beside all other tests, which use one core."""

from __future__ import annotations

import subprocess

import pytest

STARTED = pytest.StashKey["subprocess.Popen[str]"]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.name == "test_random_models")  # last, when its process is done


def pytest_collection_finish(session: pytest.Session) -> None:
    from tests.properties.test_columns import start

    worker = hasattr(session.config, "workerinput")
    if len(session.items) > 1 and session.items[-1].name == "test_random_models" and not worker:
        session.config.stash[STARTED] = start()


def pytest_unconfigure(config: pytest.Config) -> None:
    process = config.stash.get(STARTED, None)
    if process is not None and process.poll() is None:
        process.kill()


@pytest.fixture
def random_models(request: pytest.FixtureRequest) -> subprocess.Popen[str] | None:
    """The process that was started with the session, if there is one."""
    return request.config.stash.get(STARTED, None)
