"""SIGTERM: a request to save and end, with a deadline; the second is an order."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from orchestrator.running.interrupts import Stop, StopAsked, Terminated


def ask() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_first_waits_for_a_safe_point() -> None:
    stop = Stop(60.0)
    with stop.listening():
        stop.check()
        ask()
        with pytest.raises(StopAsked):
            stop.check()


def test_a_wait_is_a_safe_point_and_ends_at_once() -> None:
    stop = Stop(60.0)

    def wait() -> None:
        with stop.interruptible():
            ask()
            time.sleep(10)

    with stop.listening():
        with pytest.raises(StopAsked):
            wait()
        with pytest.raises(StopAsked), stop.interruptible():
            raise AssertionError("nothing is begun after that")


def test_the_second_ends_it_wherever_it_is() -> None:
    stop = Stop(60.0)
    with stop.listening():
        ask()
        with pytest.raises(Terminated) as ended:
            ask()
        assert not isinstance(ended.value, StopAsked)


def test_the_deadline_ends_it_wherever_it_is() -> None:
    stop = Stop(0.05)
    with stop.listening():
        ask()
        with pytest.raises(Terminated, match=r"within 0\.05 s \(checkpoint\.stop_deadline_s\)"):
            time.sleep(10)


def test_a_reason_of_our_own_is_what_the_first_sigterm_is_and_may_be_shorter() -> None:
    stop = Stop(60.0)
    with stop.listening():

        def wait() -> None:
            with stop.interruptible():
                threading.Thread(target=stop.ask, args=("node 7 is being taken away", 0.2)).start()
                time.sleep(10)

        with pytest.raises(StopAsked, match="node 7 is being taken away"):
            wait()
        stop.ask("node 8 too", 0.0)
        with pytest.raises(Terminated, match=r"node 7 is being taken away; .* within 0\.2 s"):
            time.sleep(10)


def test_without_a_deadline_the_first_ends_it() -> None:
    with Stop(0.0).listening(), pytest.raises(Terminated):
        ask()


def test_afterwards_signals_mean_what_they_meant_before() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGALRM)
    with Stop(60.0).listening():
        ask()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGALRM)) == before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0
