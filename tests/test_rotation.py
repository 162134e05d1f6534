"""The order of the slow tests in CI, and its time limit."""

pytest_plugins = "pytester"

TESTS = """
import time, pytest
@pytest.mark.parametrize("case", range(3))
def test_a(case): pass
def test_b(): pass
def test_c(): pass
def test_d(): pass
"""


def order(pytester, *options: str) -> list[str]:
    """The collected tests, in their order."""
    return pytester.runpytest("-p", "tests.rotation", "--collect-only", "-q", *options).outlines[:6]


def test_the_order_is_a_function_of_the_rotation_and_keeps_cases_together(pytester):
    pytester.makepyfile(TESTS)
    orders = {rotation: order(pytester, "--rotation", rotation) for rotation in "12345678"}
    assert order(pytester, "--rotation", "1") == orders["1"]
    assert len({tuple(tests) for tests in orders.values()}) > 1
    assert len({tests[0].partition("[")[0] for tests in orders.values()}) > 1, "every commit would begin with one test"
    for tests in orders.values():
        cases = [index for index, test in enumerate(tests) if "test_a[" in test]
        assert cases == list(range(cases[0], cases[0] + 3))
    assert [set(tests) for tests in orders.values()] == [set(order(pytester))] * 8


def test_what_has_not_started_in_time_is_skipped_with_the_reason(pytester):
    pytester.makepyfile("import time\ndef test_long(): time.sleep(0.3)\ndef test_late(): assert False")
    result = pytester.runpytest("-p", "tests.rotation", "--minutes", "0.004", "-rs")
    result.assert_outcomes(passed=1, skipped=1)
    assert "not started within 0.004 minutes" in result.stdout.str()
    pytester.runpytest("-p", "tests.rotation").assert_outcomes(passed=1, failed=1)
