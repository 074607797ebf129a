"""`ferry train grpo` with `program_agent`: a program asks the model by the openai client, and its sessions are those that the trainer learns from."""
import json
import sys

import pytest

from ppo_run import ACTOR, ROLLOUT, samples, settings, train
from ranks import TORCH_PROGRAM, finish, start_training
from support import tree
from agent_world import CALLS, SCHEMA, write_world

pytest.importorskip("openai")
pytestmark = pytest.mark.skipif(not TORCH_PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")

# Sessions take turns on threads. Each notes what the API said of its tokens.
PROGRAM = """import json, re, sys, threading
import openai
lock = threading.Lock()

def calculate(call):
    try:
        return str(eval(json.loads(call.function.arguments)["expression"], {"__builtins__": {}}))
    except Exception as error:
        return f"Error: {error}"

def ask(client, task, **more):
    return client.chat.completions.create(model=task["model"], extra_body={"return_token_ids": True}, **more)

def play(task):
    client = openai.OpenAI(base_url=task["base_url"], api_key=task["api_key"], max_retries=0)
    seen = play_MODE(client, task)
    with lock:
        print(json.dumps({"id": task["id"], **seen}), flush=True)

def play_chat(client, task):
    messages, refused, tried, rewards, tokens = task["prompt"], 0, 0, [], []
    while True:
        try:
            said = ask(client, task, messages=messages, tools=[json.loads(TOOL)], logprobs=True)
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded", error
            break
        choice = said.choices[0]
        if tokens:  # the prompt goes on behind the very tokens of the turns before
            assert said.model_extra["prompt_token_ids"][:len(tokens)] == tokens
        tokens = said.model_extra["prompt_token_ids"] + choice.model_extra["token_ids"]
        assert len(choice.logprobs.content) == len(choice.model_extra["token_ids"]) == said.usage.completion_tokens
        rewards.append(len(choice.message.tool_calls or []) / 8)
        if choice.finish_reason == "length" or len(rewards) == 3: break
        known = [*messages, choice.message.model_dump()]
        messages = [*known]
        for call in choice.message.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": calculate(call)})
        if not choice.message.tool_calls: messages.append({"role": "user", "content": "go on"})
        tried += 1
        for bad in ([messages[0] | {"content": "another question"}, *messages[1:]], known, [*messages, choice.message.model_dump()]):
            try:
                ask(client, task, messages=bad, tools=[json.loads(TOOL)])
            except openai.BadRequestError as error:
                refused += error.param == "messages"
    return {"turn_rewards": rewards, "info": {"refused": refused, "tried": tried, "turns": len(rewards), "tokens": len(tokens)}}

def play_tokens(client, task):
    tokens, turns = list(range(5, 12)), 0
    while turns < 3:
        said = client.completions.create(model="any name", prompt=tokens, max_tokens=6, temperature=0.3, extra_body={"return_token_ids": True})
        tokens += said.choices[0].model_extra["token_ids"] + [7, 8]
        turns += 1
    try:
        client.completions.create(model="any name", prompt=[9] + tokens, max_tokens=6)
        refused = 0
    except openai.BadRequestError as error:
        refused = "not the session so far from its token 0" in str(error)
    parts = [chunk.choices[0].text for chunk in client.completions.create(model="m", prompt=tokens, max_tokens=3, stream=True)]
    return {"reward": .5 if task["session"] % 2 else 0, "info": {"refused": int(refused), "turns": turns + 1, "parts": len(parts)}}

for line in sys.stdin:
    threading.Thread(target=play, args=[json.loads(line)]).start()
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("program"), CALLS)


def with_program(folder, mode="chat", program=None, **more):
    path = folder / f"{mode}.py"
    path.write_text((program or PROGRAM).replace("play_MODE", f"play_{mode}").replace("TOOL)", f"{json.dumps(SCHEMA)!r})"))
    return {f"{ROLLOUT}.agent.default_agent_loop": "program_agent", f"{ROLLOUT}.agent.program_command": f"{sys.executable} {path}",
            f"{ROLLOUT}.agent.program_timeout": 60, "reward_model.command": None, "data.max_prompt_length": 64, "data.max_response_length": 96,
            f"{ACTOR}.ppo_max_token_len_per_gpu": 256} | more


@pytest.fixture(scope="module")
def once(world):
    return train(world, world / "once", **with_program(world))


def sessions(run, step):
    return [json.loads(line) for line in (run / f"sessions/{step}.jsonl").read_text().splitlines()]


def test_the_trainer_computes_what_the_program_was_told(world, once):
    for step, metrics in once.items():
        assert metrics["num_turns/max"] >= 4
        for name in ("actor/ppo_kl", "training/rollout_probs_diff_max", "rollout_corr/kl"):
            assert metrics[name] == 0, name
        assert metrics["actor/grad_norm"] > 0
        drawn = samples(world / "once", step)
        ends = [session["exchanges"][-1]["answer"] for session in sessions(world / "once", step)]
        assert sorted(sample["score"] for sample in drawn) == sorted(sum(end["turn_rewards"]) for end in ends)
        assert sorted(sample["num_turns"] for sample in drawn) == sorted(2 * end["info"]["turns"] for end in ends)
        assert all(end["info"]["refused"] == 3 * end["info"]["tried"] for end in ends) and any(end["info"]["tried"] for end in ends)
        assert all(sample["input"].startswith("calculator") for sample in drawn)  # the tools of the request, in the model's template


def test_a_run_reproduces_to_the_byte(world, once, work):
    assert train(world, work / "run", **with_program(world)) == once
    for folder in ("rollouts", "sessions"):
        assert tree(work / "run" / folder) == tree(world / "once" / folder)


def test_two_ranks_that_compute_the_same_sessions_share_the_program(world, once, work):
    more = {f"{ACTOR}.megatron.tensor_model_parallel_size": 2, f"{ROLLOUT}.tensor_model_parallel_size": 2}
    two = train(world, work, 2, **with_program(world), **more)
    assert samples(work, 1) == samples(world / "once", 1)
    assert two[1]["rollout_corr/kl"] == 0


def test_a_run_is_played_again_without_its_program(world, once, work):
    again = with_program(world) | {f"{ROLLOUT}.agent.program_command": "exit 1", f"{ROLLOUT}.agent.replay_dir": str(world / "once/sessions")}
    assert train(world, work, **again) == once
    for folder in ("rollouts", "sessions"):
        assert tree(work / folder) == tree(world / "once" / folder)


def test_a_session_goes_on_by_token_ids(world, work):
    steps = train(world, work, **with_program(world, "tokens"), **{"trainer.total_training_steps": 1})
    assert steps[1]["rollout_corr/kl"] == steps[1]["training/rollout_probs_diff_max"] == 0
    for session in sessions(work, 1):
        end = session["exchanges"][-1]["answer"]
        assert end["info"] == {"refused": 1, "turns": 4, "parts": end["info"]["parts"]} and end["reward"] == (.5 if session["session"] % 2 else 0)


@pytest.mark.parametrize("program, said", [("exit 3", "the program ended (exit status 3)"),
                                           ("read line; echo '{}'; read line", "no object with the id of a session's line"),
                                           ("python3 -c 'import json; print(json.dumps({\"id\": json.loads(input())[\"id\"]}))'",
                                            "it ends, and has asked the model nothing")])
def test_a_program_that_fails_ends_the_run(program, said, world, work):
    more = with_program(world) | {f"{ROLLOUT}.agent.program_command": program, "data.train_batch_size": 4}
    (status, told), = finish(start_training(1, "grpo", settings(world, work / "run", **more)), timeout=120)
    assert status == 2 and said in told


HOSTILE = """import http.client, json, random, sys, threading, urllib.parse
VALUES = [None, True, -1, 0, 2**31, 2**63, 10**400, 0.5, 1e308, "", chr(0), "x" * 5000, "[", "(a{1,1000}){1,1000}", [], {}, [[]], [None], [-1], [10**9],
          {"a": {"b": []}}, {"type": "object"}, {"regex": "["}, {"type": "json_schema", "json_schema": {"name": "s", "schema": {"$ref": "#/x"}}},
          [{"role": "user", "content": "hi"}], [{"role": "x", "content": 1}], [{"role": "assistant", "content": None, "tool_calls": 7}], [{"type": "function"}]]
NAMES = ["messages", "tools", "tool_choice", "max_tokens", "n", "stop", "seed", "stream", "logprobs", "top_logprobs", "prompt", "prompt_token_ids",
         "response_format", "structured_outputs", "chat_template_kwargs", "documents", "min_tokens", "logit_bias", "stream_options", "model"]
lock = threading.Lock()

def play(task):
    chance, url, statuses = random.Random(task["session"]), urllib.parse.urlparse(task["base_url"]), []
    connection = http.client.HTTPConnection(url.hostname, url.port)
    def ask(path, body):
        connection.request("POST", url.path + path, body, {"Authorization": "Bearer " + task["api_key"]})
        answer = connection.getresponse()
        said = answer.read()
        assert answer.status == 200 or "message" in json.loads(said)["error"], said
        statuses.append(answer.status)
        return answer.status == 200
    for i in range(80):
        body = {"messages": task["prompt"], "max_tokens": 4}
        for _ in range(chance.choice([1, 2])): body[chance.choice(NAMES)] = chance.choice(VALUES)
        body = json.dumps(body).encode()
        if i % 4 == 0: body = body[:chance.randrange(len(body))] + chance.choice([b"", b"[" * 3000, bytes([0]), bytes([255]), b"1e999"])
        if i < 40 and chance.random() < .9: body = body.replace(b'"max_tokens"', b'"n": 2, "max_tokens"')  # no turn yet
        if ask(chance.choice(["/chat/completions", "/completions"]), body): break
    else:
        ask("/chat/completions", json.dumps({"messages": task["prompt"], "max_tokens": 4}))
    with lock: print(json.dumps({"id": task["id"], "reward": len(statuses) / 64, "info": {"refused": statuses.count(400)}}), flush=True)
    assert set(statuses) <= {200, 400, 404} and statuses[-1] == 200, statuses

for line in sys.stdin:
    threading.Thread(target=play, args=[json.loads(line)]).start()
"""


def test_hostile_requests_are_refused_one_by_one(world, work):
    more = with_program(world, "hostile", HOSTILE)
    steps = train(world, work / "run", **more)
    refused = [session["exchanges"][-1]["answer"]["info"]["refused"] for step in steps for session in sessions(work / "run", step)]
    assert sum(refused) > 100
    again = {f"{ROLLOUT}.agent.program_command": "exit 1", f"{ROLLOUT}.agent.replay_dir": str(work / "run/sessions")}
    assert train(world, work / "again", **more | again) == steps
    assert tree(work / "again/sessions") == tree(work / "run/sessions")
