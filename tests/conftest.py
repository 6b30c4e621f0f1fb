import psutil
import pytest


@pytest.fixture
def quiet():
    """For a test that bounds seconds: where something else uses a processor they say nothing about the code."""
    if psutil.cpu_percent(interval=0.5) * psutil.cpu_count() > 30:
        pytest.skip("not judged: this machine is busy")


@pytest.fixture(scope="session")
def stranger_files(tmp_path_factory):
    """A folder with what the scripts of tests/strangers read."""
    import strangers

    return strangers.write_files(tmp_path_factory.mktemp("strangers"))
