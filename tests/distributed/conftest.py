from functools import cache

import pytest
from gloo_pool import Pool


@pytest.fixture(scope="session")
def pools():
    """Processes on Gloo, of each size started once for the session."""
    made = []

    @cache
    def of_size(size):
        made.append(Pool(size))
        return made[-1]

    yield of_size
    for pool in made:
        pool.close()


@pytest.fixture(scope="session", params=[2, 4], ids=lambda size: f"{size} ranks")
def pool(request, pools):
    return pools(request.param)


@pytest.fixture(scope="session")
def pair(pools):
    return pools(2)
