"""Work and what must go on beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def beside(work: Coroutine[Any, Any, T], *helpers: Coroutine[Any, Any, Any]) -> T:
    """What `work` returns. The helpers end with it; one that fails, or ends, ends the work, and its error is raised."""
    main = asyncio.ensure_future(work)
    others = [asyncio.ensure_future(helper) for helper in helpers]
    try:
        await asyncio.wait([main, *others], return_when=asyncio.FIRST_COMPLETED)
        for other in others:
            if other.done():
                other.result()
                raise RuntimeError("a helper ended before the work that it helps")
        return main.result()
    finally:
        await end(main, *others)


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel, and see to it that they have ended; their errors are nobody's any more."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
