"""One folder of data for all tests of tasks: each task is written once."""

import pytest


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("data")
