"""The progress of long work: a bar of tqdm on a terminal, a callable of the caller, or nothing."""
import sys
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Optional, Union

ProgressCallback = Callable[[str, int, int, bool], Optional[bool]]
"""callback(stage, bytes_done, bytes_total, finished), several times a second. Returning False stops the work; an exception does, too, and is raised."""

Progress = Union[ProgressCallback, bool, None]
"""None: a bar where stderr is a terminal and tqdm is installed. True: a bar. False: nothing. Or a callback."""


class _Bars:
    def __init__(self, tqdm: Any):
        self.tqdm, self.bar = tqdm, None
        self.stage: Optional[str] = None

    def __call__(self, stage: str, done: int, total: int, finished: bool) -> None:
        if stage != self.stage:
            self.close()
            self.stage, self.bar = stage, self.tqdm(total=total, desc=stage, unit="B", unit_scale=True, file=sys.stderr)
        assert self.bar is not None
        self.bar.update(done - self.bar.n)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


@contextmanager
def reporting(progress: Progress) -> Iterator[Optional[ProgressCallback]]:
    """-> what the module calls"""
    if callable(progress):
        yield progress
        return
    if progress is False or (progress is None and not (sys.stderr and sys.stderr.isatty())):
        yield None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        if progress:
            raise
        yield None
        return
    bars = _Bars(tqdm)
    try:
        yield bars
    finally:
        bars.close()
