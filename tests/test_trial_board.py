"""The board knows when trials start and end, whatever the order of its calls."""

import asyncio

from orchestrator.running.dashboard import TrialBoard


def test_waiting_ends_with_a_trials_start_and_its_end() -> None:
    async def check() -> None:
        board = TrialBoard()
        started, ended = (
            asyncio.ensure_future(board.until_started("t")),
            asyncio.ensure_future(board.until_ended("t")),
        )
        await asyncio.sleep(0)
        assert not started.done()
        await board.start("t")
        await board.start("t")  # a second attempt
        await started
        assert not ended.done()
        await board.end("t", None)
        assert await ended is None

    asyncio.run(check())


def test_a_trial_can_fail_before_it_starts() -> None:
    async def check() -> None:
        board = TrialBoard()
        await board.end("t", "out of memory")
        await board.until_started("t")
        assert await board.until_ended("t") == "out of memory"

    asyncio.run(check())
