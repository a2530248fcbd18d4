from functools import cache

import pytest
from gloo_pool import Pool, Threads


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


SLOW = [pytest.mark.slow, pytest.mark.xdist_group("gloo")]


@pytest.fixture(scope="session", params=[2, 4], ids=lambda size: f"{size} ranks")
def processes(request, pools):
    return pools(request.param)


@pytest.fixture(scope="session", params=["threads", *(pytest.param(n, marks=SLOW, id=f"{n} ranks") for n in (2, 4))])
def pool(request):
    """Threads in the quick run, real processes too in the long one."""
    return Threads() if request.param == "threads" else request.getfixturevalue("pools")(request.param)


@pytest.fixture(scope="session")
def pair(pools):
    return pools(2)
