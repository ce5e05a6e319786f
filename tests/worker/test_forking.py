"""Handlers that fork."""

import asyncio
import sys
from collections.abc import AsyncIterator

import pytest
from services.scripted_node import ScriptedNode, assignment, scripted_node


@pytest.fixture
async def node() -> AsyncIterator[ScriptedNode]:
    async with scripted_node() as node:
        yield node


@pytest.mark.parametrize("end", ["signal.pause()", "raise ValueError", "raise SystemExit", "return"])
async def test_a_child_that_a_handler_forks_is_no_copy_of_the_worker(node: ScriptedNode, end: str) -> None:
    script = FORKING.format(address=node.address, end=end)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    try:
        async with asyncio.timeout(20):
            side = await node.side(1)
            await side.heard("credit")
            for number, task_type in enumerate(("forks", "forks_in_thread", "forks"), 1):
                await side.assign(assignment(f"t{number}", task_type))
                await side.heard("succeeded", number)
        assert len(node.sides) == 1
        assert not side.all("goodbye")
    finally:
        process.kill()
        await process.wait()


FORKING = """
import asyncio, os, signal
from duecourse.worker import Worker
worker = Worker("{address}")

def fork():
    child = os.fork()
    if child:
        if "{end}" == "signal.pause()":
            os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        return
    {end}

@worker.task("forks")
async def forks(context):
    fork()

@worker.task("forks_in_thread")
def forks_in_thread(context):
    fork()

asyncio.run(worker.run())
"""
