"""`ferry watch`: the page of a run in a terminal, of a size that the terminal has, while the run goes on."""
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time

import pytest

from support import FERRY, refuse, run_ok

UTF8 = {**os.environ, "LC_ALL": "C.UTF-8"}


def line(step, when, **data):
    return json.dumps({"step": step, "time": when, "data": {k.replace("__", "/"): v for k, v in data.items()}}) + "\n"


def write_run(folder, steps, total=None, now=None):
    folder.mkdir(exist_ok=True)
    now = now or time.time()
    text = [line(s, now - 3 * (steps - s) - 1, critic__score__mean=s / 100, actor__entropy=2.0, timing_s__gen=1.5, timing_s__update_actor=0.5,
                 timing_s__step=3.0) for s in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(text))
    if total:
        (folder / "progress.json").write_text(json.dumps({"total_steps": total}))
    return folder


def page(run, env=UTF8):
    return run_ok("watch", run, "--once", env=env).stdout.splitlines()


def test_page_says_step_pace_course_and_parts(work):
    run = write_run(work / "run", steps=40, total=100)
    name, header, *rest = page(run)
    assert name == str(run)
    assert re.fullmatch(r"step 40/100  \[█{8} {12}\]  3.0 s a step  3 min 0 s left  last step \d+\.\d s ago", header)
    (score,) = [row for row in rest if row.startswith("Score")]
    assert re.search(r"0\.4 +▁+▂+▃+▄+▅+▆+▇+█+ +0\.01 to 0\.4$", score)
    (entropy,) = [row for row in rest if row.startswith("Entropy")]
    assert re.search(r"2 +▅+ +2 to 2$", entropy)
    at = rest.index("parts of step 40")
    assert re.fullmatch(r"  gen +1.5 s +50 %  █+", rest[at + 1]) and re.fullmatch(r"  update_actor +500 ms +17 %  █+", rest[at + 2])


def test_page_without_unicode_is_ascii(work):
    assert all(row.isascii() for row in page(write_run(work / "run", 40, 100), {**os.environ, "LC_ALL": "C"}))


@pytest.mark.parametrize("steps, total, age, words", [
    (100, 100, 5000, "complete"), (40, 100, 3600, "no step for 1 h 0 min"), (40, None, 0, "step 40  3.0 s a step  last step"),
])
def test_page_says_how_the_run_is(steps, total, age, words, work):
    assert words in page(write_run(work / "run", steps, total, now=time.time() - age))[1]


def test_page_of_verls_metrics_has_no_times(work):
    (work / "metrics.jsonl").write_text(json.dumps({"step": 3, "data": {"critic/score/mean": 0.5, "perf/time_per_step": 7.0}}) + "\n")
    assert page(work / "metrics.jsonl")[1] == "step 3  7.0 s a step"


def test_metric_that_is_not_finite_is_warned_of(work):
    run = write_run(work / "run", 4)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line(5, time.time(), actor__pg_loss=None))
    assert "warning: actor/pg_loss is not finite in 1 steps, at step 5 first" in page(run)


def test_run_that_is_not_there_is_refused(work):
    refuse("watch", work / "none", words=["none: is not there"])
    refuse("watch", work, words=["holds no metrics.jsonl"])


class Screen:
    """A terminal with `ferry watch` in it."""

    def __init__(self, run, rows, columns):
        self.end, theirs = pty.openpty()
        self.size(rows, columns)
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs
        self.process = subprocess.Popen([FERRY, "watch", str(run), "--interval", "0.1"], stdin=theirs, stdout=theirs, stderr=theirs, env=UTF8,
                                        start_new_session=True)
        self.text = ""

    def size(self, rows, columns):
        termios.tcsetwinsize(self.end, (rows, columns))

    def frame(self, wanted, seconds=20):
        """The newest whole frame that holds the words, as rows."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if select.select([self.end], [], [], 0.1)[0]:
                self.text += os.read(self.end, 1 << 16).decode(errors="replace")
            frames = [f for f in self.text.split("\x1b[H")[1:] if f.endswith("\x1b[J")]
            if frames and wanted in frames[-1]:
                self.text = ""
                return [re.sub("\x1b\\[[KJ]", "", row) for row in frames[-1].split("\r\n")]
        raise AssertionError(f"no frame with {wanted!r} in {self.text[-2000:]!r}")

    def rest(self):
        code = self.process.wait(timeout=20)
        text = ""
        while select.select([self.end], [], [], 0.2)[0]:
            text += os.read(self.end, 1 << 16).decode(errors="replace")
        assert "\x1b[?25h" in text and "\x1b[?1049l" in text, "the cursor and the page from before come back"
        assert termios.tcgetattr(self.theirs) == self.before
        return code


@pytest.mark.parametrize("how", ["q", "SIGINT", "SIGTERM"])
def test_terminal_follows_the_run_and_its_size_and_comes_back(how, work):
    (work / "run").mkdir()
    screen = Screen(work / "run", 24, 100)
    screen.frame("no metrics yet")
    write_run(work / "run", 40, 100)
    rows = screen.frame("step 40/100")
    assert len(rows) <= 24 and all(len(row) <= 100 for row in rows)
    screen.size(6, 30)
    write_run(work / "run", 41, 100)
    screen.frame("step 41/100")
    rows = screen.frame("step 41/100")
    assert len(rows) <= 6 and all(len(row) <= 30 for row in rows)
    if how == "q":
        os.write(screen.end, b"q")
    else:
        os.kill(screen.process.pid, getattr(signal, how))
    assert screen.rest() == 0
