"""The engine's thread as seen from asyncio, without HTTP."""

import asyncio
import threading
import time

import pytest
from transformers import PreTrainedTokenizerFast

from serving.async_engine import AsyncEngine
from serving.errors import InvalidRequestError, UnavailableError
from serving.request import FinishReason, Mix, Request, SamplingParams
from tests.http.fake_engine import FakeEngine, answer


def request(request_id: str = "r", max_tokens: int = 5) -> Request:
    return Request(request_id, [5, 6], SamplingParams(max_tokens=max_tokens), Mix(), time.monotonic())


@pytest.fixture
def engine(tokenizer: PreTrainedTokenizerFast) -> FakeEngine:
    return FakeEngine(tokenizer, step_s=0.005)


async def until_idle(engine: FakeEngine) -> None:
    async with asyncio.timeout(2):
        while engine.held:
            await asyncio.sleep(0.01)


def test_generate_gives_the_outputs_of_a_request_in_order(engine: FakeEngine) -> None:
    async def run() -> None:
        async_engine = AsyncEngine(engine)
        async_engine.start()
        outputs = [output async for output in async_engine.generate(request())]
        assert "".join(o.text for o in outputs) == answer(engine.tokenizer, request(), 5)
        assert [o.finish_reason for o in outputs] == [None] * 4 + [FinishReason.LENGTH]
        assert async_engine.num_requests == 0
        assert async_engine.stop()

    asyncio.run(run())


def test_closing_the_iterator_or_cancelling_its_reader_aborts_the_request(engine: FakeEngine) -> None:
    async def read(async_engine: AsyncEngine, request_id: str) -> None:
        async for _ in async_engine.generate(request(request_id, max_tokens=1000)):
            pass

    async def run() -> None:
        async_engine = AsyncEngine(engine)
        async_engine.start()
        outputs = async_engine.generate(request("closed", max_tokens=1000))
        await anext(outputs)
        await outputs.aclose()
        reader = asyncio.create_task(read(async_engine, "cancelled"))
        await asyncio.sleep(0.05)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await until_idle(engine)
        assert engine.aborted == ["closed", "cancelled"]
        assert async_engine.stop()

    asyncio.run(run())


def test_requests_submitted_together_run_together_or_not_at_all(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_request = engine.add_request

    def refuse_second(new: Request) -> None:
        if new.request_id == "second":
            raise InvalidRequestError("too long", param="prompt")
        add_request(new)

    async def run() -> None:
        async_engine = AsyncEngine(engine)
        async_engine.start()
        with pytest.raises(InvalidRequestError, match="too long"):
            await async_engine.submit([request("first"), request("second")])
        await until_idle(engine)
        assert engine.aborted == ["first"]
        assert async_engine.num_requests == 0
        assert async_engine.is_healthy
        assert async_engine.stop()

    monkeypatch.setattr(engine, "add_request", refuse_second)
    asyncio.run(run())


def test_a_draining_engine_takes_no_more_requests(engine: FakeEngine) -> None:
    async def run() -> None:
        async_engine = AsyncEngine(engine)
        async_engine.start()
        generation = await async_engine.submit([request(max_tokens=1000)])
        await async_engine.drain(0.05)
        assert [o.finish_reason async for o in generation][-1] is FinishReason.ABORT
        with pytest.raises(UnavailableError, match="shutting down"):
            await async_engine.submit([request("late")])
        await until_idle(engine)
        assert async_engine.stop()

    asyncio.run(run())


def test_a_call_runs_on_the_engines_thread_between_steps_and_passes_on_what_it_gives_or_raises(
    engine: FakeEngine,
) -> None:
    def where(extra: str) -> tuple[int, str]:
        return threading.get_ident(), extra

    def fail() -> None:
        raise KeyError("nobody")

    async def run() -> None:
        async_engine = AsyncEngine(engine)
        async_engine.start()
        generation = await async_engine.submit([request(max_tokens=20)])
        ident, extra = await async_engine.call(where, "x")
        for _ in range(5):
            with pytest.raises(KeyError, match="nobody"):
                await async_engine.call(fail)
        assert len([output async for output in generation]) == 20
        assert (engine.threads, extra) == ({ident}, "x")
        assert async_engine.is_healthy  # no step has failed
        assert async_engine.stop()
        with pytest.raises(UnavailableError, match="not running"):
            await async_engine.call(where, "late")

    asyncio.run(run())


def test_an_abort_that_fails_takes_no_later_command_with_it(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    abort = engine.abort

    def fail_once(request_id: str) -> None:
        monkeypatch.setattr(engine, "abort", abort)
        raise AssertionError("a mistake of ours")

    monkeypatch.setattr(engine, "abort", fail_once)

    async def run() -> None:
        async_engine = AsyncEngine(engine)
        async_engine.start()
        generation = await async_engine.submit([request("gone", max_tokens=1000)])
        blocked = asyncio.create_task(async_engine.call(time.sleep, 0.05))
        await asyncio.sleep(0.01)
        generation.close()  # reaches the engine's thread together with the next request
        async with asyncio.timeout(5):
            outputs = [output async for output in async_engine.generate(request("later"))]
        await blocked
        assert [o.finish_reason for o in outputs] == [None] * 4 + [FinishReason.LENGTH]
        assert (async_engine.num_requests, async_engine.queue_bound.num_waiting) == (0, 0)
        assert async_engine.stop()

    asyncio.run(run())


def test_a_call_that_waits_when_the_thread_ends_is_refused(engine: FakeEngine) -> None:
    async def run() -> None:
        async_engine = AsyncEngine(engine)
        async_engine.start()
        blocked = asyncio.create_task(async_engine.call(time.sleep, 0.1))
        await asyncio.sleep(0.02)
        late = asyncio.create_task(async_engine.call(time.sleep, 0))
        await asyncio.sleep(0)
        assert await asyncio.to_thread(async_engine.stop)
        await blocked
        with pytest.raises(UnavailableError, match="shutting down"):
            await late

    asyncio.run(run())


def test_a_call_whose_caller_has_gone_runs_all_the_same(engine: FakeEngine) -> None:
    done: list[int] = []

    async def run() -> None:
        async_engine = AsyncEngine(engine)
        async_engine.start()
        blocked = asyncio.create_task(async_engine.call(time.sleep, 0.05))
        cancelled = asyncio.create_task(async_engine.call(done.append, 1))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        await blocked
        assert await async_engine.call(len, done) == 1
        assert async_engine.stop()

    asyncio.run(run())
