"""Tasks on processes: all answers, whatever ends."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import pytest

from tap_planner.sweep import Done, Lost, work_through


def test_every_task_is_answered_once() -> None:
    """Whatever the number of processes, also where there are more of them than tasks; they are other processes."""
    for processes in (1, 2, 3, 9):
        answers = list(work_through(range(5), lambda task: (task * task, os.getpid()), processes))
        found = {answer.task: answer.answer[0] for answer in answers if isinstance(answer, Done)}
        assert found == {task: task * task for task in range(5)} and len(answers) == 5
        own = {answer.answer[1] == os.getpid() for answer in answers if isinstance(answer, Done)}
        assert own == {processes == 1}


def test_a_task_whose_process_ends_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A process that is killed once takes nothing with it, and a warning says so."""
    logging.getLogger("tap_planner").propagate = True

    def work(task: int) -> int:
        mark = tmp_path / str(task)
        if task == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return task

    answers = sorted(work_through(range(4), work, 2), key=lambda answer: answer.task)
    assert answers == [Done(task, task) for task in range(4)]
    assert [record.getMessage() for record in caplog.records] == [
        "a process was lost (signal 9, perhaps for want of memory); what it was planning is planned again"
    ]


def test_a_task_whose_processes_end_is_lost() -> None:
    """A task that kills its process each time is given up with the signal, and the others are done."""

    def work(task: int) -> int:
        if task % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return task

    answers = sorted(work_through(range(5), work, 2), key=lambda answer: answer.task)
    lost = [Lost(1, -signal.SIGKILL), Lost(3, -signal.SIGKILL)]
    assert [answer for answer in answers if isinstance(answer, Lost)] == lost
    assert [answer for answer in answers if isinstance(answer, Done)] == [Done(task, task) for task in (0, 2, 4)]


def test_processes_end_with_whoever_asks() -> None:
    """An interruption ends the processes at once, also busy ones."""
    found = work_through(range(3), lambda task: os.getpid() if task == 0 else signal.pause(), 2)
    first = next(found)
    assert isinstance(first, Done) and isinstance(first.answer, int)
    found.close()  # type: ignore[attr-defined]
    with pytest.raises(ProcessLookupError):
        os.kill(first.answer, 0)


def test_time_passes_between_answers() -> None:
    """While nothing is ready, whoever asks is called now and then."""
    ticks: list[int] = []
    answers = work_through(
        range(2), lambda task: signal.sigtimedwait([signal.SIGUSR1], 0.8), 2, lambda: ticks.append(1)
    )
    assert len(list(answers)) == 2
    assert ticks
