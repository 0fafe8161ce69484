"""The calls that stand for trials in the dashboard begin and end with their trials."""

import asyncio

import pytest

from orchestrator.running.trial_board import TrialBoard, TrialFailed


def test_a_call_runs_from_a_trials_start_to_its_end() -> None:
    async def check() -> None:
        board = TrialBoard()
        started = asyncio.ensure_future(board.until_started("t"))
        await asyncio.sleep(0)
        assert not started.done()
        await board.start("t")
        await board.start("t")  # a second attempt
        await started
        shown = asyncio.ensure_future(board.trial("t", None))
        await asyncio.sleep(0)
        assert not shown.done()
        await board.end("t", None)
        await shown

    asyncio.run(check())


def test_a_failed_trial_is_a_failed_call_even_if_it_never_started() -> None:
    async def check() -> None:
        board = TrialBoard()
        await board.end("t", "out of memory")
        await board.until_started("t")
        with pytest.raises(TrialFailed, match="out of memory"):
            await board.trial("t", None)

    asyncio.run(check())
