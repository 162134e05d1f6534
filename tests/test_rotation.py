"""The order of the slow tests in CI, and its time limit."""

pytest_plugins = "pytester"


def order(pytester, *options: str) -> list[str]:
    """The collected tests, in their order."""
    return pytester.runpytest("-p", "tests.rotation", "--collect-only", "-q", *options).outlines[:6]


def test_order_of_files_is_a_function_of_the_rotation(pytester):
    pytester.makepyfile(**{f"test_{name}": "def test_1(): pass\ndef test_2(): pass" for name in "abc"})
    orders = {rotation: order(pytester, "--rotation", rotation) for rotation in "12345678"}
    assert order(pytester, "--rotation", "1") == orders["1"]
    assert len({tests[0] for tests in orders.values()}) > 1, "every commit would begin with the same file"
    for tests in orders.values():
        assert set(tests) == set(order(pytester))
        for first, second in zip(tests[::2], tests[1::2], strict=True):
            assert (first.partition("::")[0], "test_1", "test_2") == (
                second.partition("::")[0],
                first.partition("::")[2],
                second.partition("::")[2],
            )


def test_tests_that_have_not_started_in_time_are_skipped_with_the_reason(pytester):
    pytester.makepyfile("import time\ndef test_long(): time.sleep(0.3)\ndef test_late(): assert False")
    result = pytester.runpytest("-p", "tests.rotation", "--minutes", "0.004", "-rs")
    result.assert_outcomes(passed=1, skipped=1)
    assert "not started within 0.004 minutes" in result.stdout.str()
    pytester.runpytest("-p", "tests.rotation").assert_outcomes(passed=1, failed=1)
