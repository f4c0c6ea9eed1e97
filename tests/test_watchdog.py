"""specbench.watchdog: one report about one call that does not return, and none otherwise."""

from __future__ import annotations

import threading

from specbench.watchdog import EXIT_HUNG, Watchdog

LONG = 30.0  # seconds; waits end long before, on an event


class Report:
    """Stands in for whoever prints the table: keeps the sentences, and tells the hanging call to go on."""

    def __init__(self) -> None:
        self.sentences: list[str] = []
        self.came = threading.Event()

    def __call__(self, sentence: str) -> None:
        self.sentences.append(sentence)
        self.came.set()


def test_a_call_past_the_limit_is_reported_in_one_sentence() -> None:
    report = Report()
    with Watchdog(0.05, report).guard("Decoder.generate()"):
        report.came.wait(LONG)
    assert report.sentences == [
        "Decoder.generate() did not return within 0.05 s: "
        "give --specbench-timeout SECONDS if it needs longer, otherwise it hangs"
    ]


def test_it_reports_once_and_its_thread_ends() -> None:
    report = Report()
    watchdog = Watchdog(0.05, report)
    with watchdog.guard("generate()"):
        report.came.wait(LONG)
        assert watchdog._thread is not None
        watchdog._thread.join(LONG)
    assert (len(report.sentences), watchdog._thread.is_alive()) == (1, False)


def test_a_call_that_returned_in_time_is_not_reported_afterwards() -> None:
    """The first call's deadline passes while the second one runs: only the second may be reported."""
    report = Report()
    watchdog = Watchdog(0.2, report)
    with watchdog.guard("first()"):
        pass
    with watchdog.guard("second()"):
        report.came.wait(LONG)
    assert [one.partition(" ")[0] for one in report.sentences] == ["second()"]


def test_nothing_is_reported_between_calls() -> None:
    report = Report()
    watchdog = Watchdog(0.05, report)
    with watchdog.guard("generate()"):
        pass
    assert not report.came.wait(0.3)
    watchdog.close()


def test_a_call_that_raises_is_no_longer_watched() -> None:
    report = Report()
    watchdog = Watchdog(0.05, report)
    try:
        with watchdog.guard("generate()"):
            raise KeyError("wrong")
    except KeyError:
        pass
    assert not report.came.wait(0.3)
    watchdog.close()


def test_zero_switches_it_off() -> None:
    watchdog = Watchdog(0, Report())
    with watchdog.guard("generate()"):
        assert watchdog._thread is None


def test_close_ends_the_thread() -> None:
    watchdog = Watchdog(LONG, Report())
    with watchdog.guard("generate()"):
        pass
    watchdog.close()
    assert watchdog._thread is not None
    watchdog._thread.join(LONG)
    assert not watchdog._thread.is_alive()


def test_the_exit_code_of_a_hang_is_seven() -> None:
    assert EXIT_HUNG == 7
