"""A tool of `ferry train grpo` that does something bad each time that it is started: the model is told of it, and no other session notices."""
import json
import sys

import pytest

from ppo_run import ACTOR, ROLLOUT, train
from ranks import TORCH_PROGRAM
from support import tree
from agent_world import CALCULATOR, CALLS, SCHEMA, with_tools, write_world

pytestmark = pytest.mark.skipif(not TORCH_PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")

HOSTILE = """import json, os, sys, time
starts = sys.argv[1]
with open(starts, "a") as file: file.write("x")
kind = os.path.getsize(starts) % 8
asked = sys.stdin.readline()
out = sys.stdout.buffer
if kind == 0: os._exit(3)
if kind == 1: out.write(b"x" * (20 << 20))
if kind == 2: out.write(b'{"id": 1, "content": "' + bytes([255]) + b'"}' + bytes([10]))
if kind == 3: out.write(b"[" * 1000000 + bytes([10]))
if kind == 4: os.close(0); out.write(b" ")
if kind == 5:
    for _ in range(20):
        if os.fork() == 0: time.sleep(600)
    os._exit(0)
if kind == 6:
    while True: out.write(b'{"id": 123456789}' + bytes([10]))
if kind == 7: out.write(json.dumps({"id": json.loads(asked)["id"], "content": "a" * (8 << 20)}).encode() + bytes([10]))
out.flush()
time.sleep(600)
"""
FAULTS = ["the program ended (exit status 3)", "a line of more than 16777216 bytes", "the answer is no JSON object", "the answer is nested too deep",
          "no answer within 1 s", "the program answered something else than it was asked"]


def test_the_model_is_told_of_faults_and_other_sessions_keep_their_bytes(tmp_path):
    world = write_world(tmp_path / "world", CALLS)
    (world / "hostile.py").write_text(HOSTILE)
    other = {"type": "function", "function": SCHEMA["function"] | {"name": "nothing"}}

    def run(name, command, **more):
        tools = [{"tool_schema": SCHEMA, "command": f"{sys.executable} {CALCULATOR}"}, {"tool_schema": other, "command": command, "timeout": 1}]
        (world / "tools.json").write_text(json.dumps({"tools": tools}))
        steps = train(world, world / name, **with_tools(world) | {"trainer.total_training_steps": 1, "data.train_batch_size": 12,
                                                                  f"{ACTOR}.ppo_mini_batch_size": 12, f"{ROLLOUT}.n": 3} | more)
        lines = (world / name / "sessions/1.jsonl").read_text().splitlines()
        return steps, {session["session"]: session for session in map(json.loads, lines)}

    good, expected = run("good", "while read -r line; do exit 1; done")
    steps, sessions = run("hostile", f"{sys.executable} {world / 'hostile.py'} {world / 'starts'}")
    told = [exchange["answer"].get("error", "") for session in sessions.values() for exchange in session["exchanges"]
            if exchange["question"]["name"] == "nothing"]
    # Questions that are open share a fault, and how many are depends on the time, so that some runs see more kinds than others.
    assert len([fault for fault in FAULTS if any(fault in one for one in told)]) > 0, {one[:80] for one in told}
    assert all(any(fault in one for fault in FAULTS) for one in told if one), {one[:80] for one in told}
    calm = [key for key, session in expected.items() if all(exchange["question"]["name"] != "nothing" for exchange in session["exchanges"])]
    assert len(calm) > 10 and all(sessions[key] == expected[key] for key in calm)
    again, _ = run("again", "exit 1", **{f"{ROLLOUT}.agent.replay_dir": str(world / "hostile/sessions")})
    assert again == steps
    for folder in ("sessions", "rollouts"):
        assert tree(world / "again" / folder) == tree(world / "hostile" / folder)
