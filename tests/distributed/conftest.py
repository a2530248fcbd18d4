from __future__ import annotations

import pytest
from gloo_pool import Pool


@pytest.fixture(scope="session", params=[2, 4], ids=lambda size: f"{size} ranks")
def pool(request):
    """Processes on Gloo, started once for the session."""
    pool = Pool(request.param)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pair():
    pool = Pool(2)
    yield pool
    pool.close()
