import pytest


@pytest.fixture(scope="module", autouse=True)
def newest(newest_transformers):
    """Routes for transformers are those of the newest release, whatever is installed."""
