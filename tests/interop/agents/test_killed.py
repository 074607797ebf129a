"""A trainer that is killed by SIGKILL: nothing that it has started is there seconds later, whatever of signals, sessions and parents it has left."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ranks
from ppo_run import ROLLOUT, settings
from ranks import TORCH_PROGRAM, start_training
from support import FERRY
from agent_world import CALLS, SCHEMA, with_tools, write_world

PROBE = subprocess.run([FERRY, "sandbox", "--", "true"], stderr=subprocess.PIPE, text=True)
needs_sandbox = pytest.mark.skipif("no namespaces" in PROBE.stderr, reason=f"this system allows no sandbox: {PROBE.stderr.strip()}")
needs_models = pytest.mark.skipif(not TORCH_PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")

# Answers nothing, hears no signal but SIGKILL, does not look at its input, and leaves a process in a session of its own, without a parent.
HOLD = """import os, signal, sys, time
for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(one, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", "orphan"])
    os._exit(0)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = write_world(tmp_path_factory.mktemp("killed"), CALLS)
    (world / "hold.py").write_text(HOLD)
    (world / "python").write_text(f"#!/bin/sh\nexec {sys.executable} {world / 'hold.py'}\n")
    (world / "python").chmod(0o755)
    return world


def marked(mark):
    """{pid: command line} of the processes whose environment has the mark."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"MARK={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found[process.name] = (process / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it has ended
            continue
    return found


def is_orphan(line):
    return line.endswith(" orphan ")


def kill_when(ready, mark, process):
    """Kills a process when one that it has started, with this in its command line, is there."""
    until = time.monotonic() + 120
    try:
        while not any(map(ready, marked(mark).values())):
            assert process.poll() is None and time.monotonic() < until, marked(mark)
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
    process.wait()
    until = time.monotonic() + 10
    while (left := marked(mark)) and time.monotonic() < until:
        time.sleep(0.01)
    assert left == {}


def tools(work, **what):
    (work / "tools.json").write_text(json.dumps(what))
    return {f"{ROLLOUT}.multi_turn.tool_config_path": str(work / "tools.json")}


def of_kind(kind, world, work):
    """The settings of a run with such a program."""
    hold = [sys.executable, str(world / "hold.py")]
    command = " ".join(hold)
    if kind == "tool":
        return with_tools(world) | tools(work, tools=[{"tool_schema": SCHEMA, "command": command}])
    if kind == "MCP server":
        return with_tools(world) | tools(work, tools=[], mcpServers={"held": {"command": hold[0], "args": hold[1:]}})
    if kind == "environment":
        return {f"{ROLLOUT}.agent.default_agent_loop": "env_agent", f"{ROLLOUT}.agent.env_command": command}
    if kind == "agent":
        return {f"{ROLLOUT}.agent.default_agent_loop": "program_agent", f"{ROLLOUT}.agent.program_command": command}
    if kind == "logger":
        return {"trainer.logger": ["file", "wandb"]}
    if kind == "replica":
        return {f"{ROLLOUT}.replicas.num": 1, "reward_model.command": command}
    return {"reward_model.command": {"reward": command, "two rewards": command, "sandbox": f"{FERRY} sandbox --env MARK -- {command}"}[kind],
            "reward_model.num_workers": 2 if kind == "two rewards" else 1}


@needs_models
@pytest.mark.parametrize("kind", ["reward", "two rewards", "tool", "MCP server", "environment", "agent", "logger", "replica",
                                  pytest.param("sandbox", marks=needs_sandbox)])
def test_a_program_ends_with_a_trainer_that_is_killed(kind, world, work):
    mark = f"{os.getpid()}-{kind}"
    trainer, = start_training(1, "grpo", settings(world, work / "run", **of_kind(kind, world, work)), MARK=mark, FERRY_PYTHON=str(world / "python"))
    kill_when(is_orphan, mark, trainer)


@needs_models
def test_programs_of_a_trainer_that_lies_alone_end_with_it(world, work, monkeypatch):
    """Its wheel has no ferry beside it."""
    shutil.copy(TORCH_PROGRAM, work / "ferry-torch")
    monkeypatch.setattr(ranks, "TORCH_PROGRAM", work / "ferry-torch")
    mark = f"{os.getpid()}-wheel"
    trainer, = start_training(1, "grpo", settings(world, work / "run", **of_kind("reward", world, work)), MARK=mark)
    kill_when(is_orphan, mark, trainer)


@needs_sandbox
def test_code_that_is_tested_ends_with_its_test(work):
    """The programs of a program: the sandbox has its own environment, so that the mark is in the code's."""
    mark = f"{os.getpid()}-score"
    code = f"```python\nimport os, time\nif os.fork() == 0: os.setsid()\nos.environ['MARK'] = '{mark}'\n" \
           "os.execv('/bin/sleep', ['sleep', '600'])\n```"
    question = {"id": 1, "data_source": "apps", "solution_str": code, "ground_truth": {"inputs": [""], "outputs": ["1"]}}
    score = subprocess.Popen([FERRY, "score", "--seconds", "600"], stdin=subprocess.PIPE, text=True)
    score.stdin.write(json.dumps(question) + "\n")
    score.stdin.flush()
    kill_when(lambda line: line.startswith("sleep"), mark, score)


@needs_sandbox
def test_a_sandbox_ends_with_the_process_that_has_made_it(world):
    mark = f"{os.getpid()}-alone"
    kill_when(is_orphan, mark, subprocess.Popen([FERRY, "sandbox", "--env", "MARK", "--", sys.executable, world / "hold.py"],
                                                env=os.environ | {"MARK": mark}))
