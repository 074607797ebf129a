"""Tools of a server of the Model Context Protocol, of the `mcp` package, for `tool_agent` of `ferry train grpo`."""
import json
import sys

import pytest

from ppo_run import ROLLOUT, samples, settings, train
from ranks import TORCH_PROGRAM, finish, start_training
from support import tree
from agent_world import CALCULATOR, SCHEMA, call, with_tools, write_world

pytestmark = pytest.mark.skipif(not TORCH_PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")

SERVER = """import os, sys, time
from mcp.server.mcpserver import MCPServer
server = MCPServer("calculators")

@server.tool()
def calculator(expression: str) -> str:
    if expression == "1/0": raise ZeroDivisionError
    if expression == "die":
        time.sleep(.3)  # others have been answered by then
        os._exit(3)
    if expression == "hang": time.sleep(600)
    print("computed", file=sys.stderr)
    return str(eval(expression))

@server.tool()
def pair(a: int = 1, b: int = 2) -> list[int]:
    return [a, b]

@server.tool()
def secret() -> None: ...

server.run("stdio")
"""
CALLS = [call("calculator", "17*3"), call("calculator", "2**5-1"), call("calculator", "die"), call("pair", "1"), call("nothing", "1")]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = write_world(tmp_path_factory.mktemp("mcp"), CALLS)
    (world / "server.py").write_text(SERVER)
    return world


def tools(work, command=sys.executable, tools=(), **server):
    """The settings of tools of this server, behind those that are programs."""
    work.mkdir(exist_ok=True)
    (work / "tools.json").write_text(json.dumps({"tools": list(tools), "mcpServers": {"calculators": {"command": command, **server}}}))
    return {f"{ROLLOUT}.multi_turn.tool_config_path": str(work / "tools.json")}


@pytest.fixture(scope="module")
def once(world):
    """A run whose server dies again and again."""
    return train(world, world / "once", **with_tools(world) | tools(world, args=[str(world / "server.py")], tool_selected_list=["pair", "calculator"]))


def answers(run):
    """{the name and the arguments of a call: all answers to it}"""
    found = {}
    for step in (1, 2):
        for session in map(json.loads, (run / f"sessions/{step}.jsonl").read_text().splitlines()):
            for exchange in session["exchanges"]:
                asked = exchange["question"]
                found.setdefault(call(asked["name"], asked["arguments"].get("expression")), []).append(exchange["answer"])
    return found


def test_the_model_is_shown_the_tools_that_are_selected_as_they_are_listed(world, once):
    assert {sample["input"][:16] for sample in samples(world / "once", 1)} == {"calculator\npair\n"}
    listed = json.loads((world / "once/sessions/tools.json").read_text())["calculators"]
    assert [tool["name"] for tool in listed] == ["calculator", "pair", "secret"]
    assert listed[0]["inputSchema"]["required"] == ["expression"]


def test_calls_are_answered_and_a_server_that_dies_is_started_again(world, once):
    found = answers(world / "once")
    assert {"error": "the program ended (exit status 3)"} in found[CALLS[2]]
    assert {"content": "51"} in found[CALLS[0]] or {"content": "31"} in found[CALLS[1]], "it is not started again"
    for name, good in ((CALLS[0], "51"), (CALLS[1], "31"), (CALLS[3], "1\n2")):  # or the server died while they were open
        assert all(answer in ({"content": good}, {"error": "the program ended (exit status 3)"}) for answer in found[name]), found[name]
    assert all("there is no such tool, but: calculator, pair" in answer["error"] for answer in found[CALLS[4]])


def test_a_run_is_played_again_without_its_server(world, once, work):
    again = with_tools(world) | tools(work, "/no/such/program", tool_selected_list=["pair", "calculator"])
    assert train(world, work / "again", **again, **{f"{ROLLOUT}.agent.replay_dir": str(world / "once/sessions")}) == once
    assert tree(work / "again/sessions") == tree(world / "once/sessions")
    assert tree(work / "again/rollouts") == tree(world / "once/rollouts")


CALM = [call("calculator", "17*3"), call("calculator", "2**5-1")]


# Two ranks have a server each; of two that compute the same sessions, the first one has it.
@pytest.mark.parametrize("more", [{}, {"actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 2, f"{ROLLOUT}.tensor_model_parallel_size": 2}],
                         ids=["dp2", "tp2"])
def test_a_server_is_as_good_as_a_program(more, work):
    calm = write_world(work / "calm", CALM)
    (calm / "server.py").write_text(SERVER)
    program = {"tool_schema": SCHEMA, "command": f"{sys.executable} {CALCULATOR}"}
    (calm / "tools.json").write_text(json.dumps({"tools": [program]}))
    train(calm, calm / "program", 2, **with_tools(calm), **more)
    served = with_tools(calm) | tools(work / "mcp", args=[str(calm / "server.py")], tool_selected_list=["calculator"], env={"PYTHONOPTIMIZE": "1"})
    train(calm, calm / "server", 2, **served, **more)
    assert tree(calm / "server/rollouts") == tree(calm / "program/rollouts")
    for step in (1, 2):
        assert (calm / f"server/sessions/{step}.jsonl").read_bytes() == (calm / f"program/sessions/{step}.jsonl").read_bytes()
    assert {"content": "51"} in answers(calm / "server")[CALM[0]]


def test_errors_and_timeouts_are_told_to_the_model(work):
    hard = write_world(work / "hard", [call("calculator", "1/0"), call("calculator", "hang")])
    (hard / "server.py").write_text(SERVER)
    served = with_tools(hard) | tools(work, args=[str(hard / "server.py")], timeout=10)
    train(hard, hard / "run", **served | {"trainer.total_training_steps": 1, f"{ROLLOUT}.multi_turn.max_assistant_turns": 2})
    said = [answer for some in answers_of_step(hard / "run") for answer in some]
    assert {"error": "Error executing tool calculator"} in said and {"error": "no answer within 10 s", "timed_out": True} in said


def answers_of_step(run):
    for session in map(json.loads, (run / "sessions/1.jsonl").read_text().splitlines()):
        yield [exchange["answer"] for exchange in session["exchanges"]]


@pytest.mark.parametrize("server, said", [
    ({"command": "false"}, "MCP server calculators: lists no tools: the program ended (exit status 1)"),
    ({"url": "http://127.0.0.1"}, "a server has a command: it is spoken to over its standard input and output"),
    ({"args": ["SERVER"], "tool_selected_list": ["calculator", "divide"]}, "MCP server calculators: lists no tool divide"),
], ids=["it ends", "over a network", "no such tool"])
def test_a_server_that_is_none_ends_the_run(server, said, world, work):
    server = {"command": sys.executable} | server
    if "url" in server: server.pop("command")
    server["args"] = [str(world / "server.py") if word == "SERVER" else word for word in server.get("args", [])]
    (work / "tools.json").write_text(json.dumps({"mcpServers": {"calculators": server}}))
    (status, told), = finish(start_training(1, "grpo", settings(world, work / "run", **with_tools(work))), timeout=120)
    assert status == 2 and said in told, told
