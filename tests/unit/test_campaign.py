"""Which tests of the campaign a commit runs (`make slice`)."""

from __future__ import annotations

from tests.campaign import MAX_AGE, NUM_SLICES, Record


def run(record, *, failing=()):
    """Run a slice, as CI does; return its tests."""
    chosen = record.slice()
    seconds = {test: float(1 + number % 7) for number, test in enumerate(sorted(record.tests))}
    record.add("c0ffee", {test: seconds[test] for test in chosen if test not in failing})
    return chosen


def of(num_tests):
    record = Record()
    record.update([f"test_{number:03}" for number in range(num_tests)])
    return record


def test_all_tests_run_in_eight_slices_of_about_the_same_time():
    record = of(400)
    for _ in range(2 * NUM_SLICES):  # afterwards each test has a time
        run(record)

    entries = record.tests.items()
    total_s = sum(entry["seconds"] for _, entry in entries)
    rounds = [set(run(record)) for _ in range(NUM_SLICES)]

    assert set.union(*rounds) == set(record.tests)
    for chosen in rounds:
        assert abs(sum(record.tests[test]["seconds"] for test in chosen) - total_s / NUM_SLICES) <= 7


def test_what_failed_and_what_is_new_comes_first_in_the_next_slice():
    record = of(80)
    for _ in range(2 * NUM_SLICES):
        run(record, failing=("test_003",))
    record.update([*record.tests, "test_new"])

    assert set(record.slice()[:2]) == {"test_003", "test_new"}


def test_a_test_that_passes_no_more_is_red_after_twelve_runs():
    record = of(80)
    for _ in range(MAX_AGE):
        run(record, failing=("test_003",))
        assert record.too_old() == []
    run(record, failing=("test_003",))

    assert record.too_old() == ["test_003"]


def test_a_test_that_is_new_is_not_too_old():
    record = of(80)
    for _ in range(2 * MAX_AGE):
        run(record)
    record.update([*record.tests, "test_new"])

    assert record.too_old() == []


def test_the_record_is_read_as_it_was_written(tmp_path):
    record = of(80)
    run(record)
    record.write(tmp_path / "campaign.json")

    assert Record.read(tmp_path / "campaign.json") == record
    assert Record.read(tmp_path / "none.json") == Record()


def test_tests_that_are_gone_are_forgotten():
    record = of(80)
    record.update(["test_001"])

    assert list(record.tests) == ["test_001"]


def test_ci_leaves_out_what_has_never_passed():
    record = of(80)
    passed = run(record)

    assert record.slice(only_passed=True) == passed
    assert not set(record.slice()) & set(passed)
