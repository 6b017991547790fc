"""Setup shared by all tests."""

import os
import signal
import sys

import hypothesis
import pytest

# A shell ignores SIGINT in its background jobs, and what they start inherits that: tests that
# interrupt a run would wait forever.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Several processes share the cores; threads of their own would only fight. To be set before torch
# is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A busy machine makes an example slow, not wrong.
hypothesis.settings.register_profile(
    "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("patient")


def pytest_addoption(parser):
    parser.addoption(
        "--no-processes", action="store_true", help="skip each test that would start one"
    )


@pytest.fixture(autouse=True)
def restore_environment():
    """Undo what code under test writes into the environment: a leaked RANK makes this a rank."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True)
def keep_signal_handlers():
    """Fail a test that leaves a signal handled in another way: later tests would inherit that."""
    before = {each: signal.getsignal(each) for each in signal.valid_signals()}
    yield
    changed = {each: now for each in before if (now := signal.getsignal(each)) != before[each]}
    for number in changed:
        signal.signal(number, before[number] or signal.SIG_DFL)
    names = {signal.Signals(each).name: handler for each, handler in changed.items()}
    assert not names, f"left by the test: {names}"


@pytest.fixture(scope="session", autouse=True)
def process_to_fork_from(request):
    """Start the fork server, which imports modules while the first tests run.

    Among them are collected modules of functions that ranks call: each rank would import them.
    """
    if ranks := sys.modules.get("tests.ranks"):  # a test that was collected wants it
        if request.config.getoption("--no-processes"):
            ranks.refuse()
        else:
            callers = [
                name
                for name, module in sys.modules.items()
                if name.startswith("tests.")
                and {"run_ranks", "start_process"} & vars(module).keys()
            ]
            ranks.fork_from("tests.imported", *callers)
