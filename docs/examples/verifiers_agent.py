#!/usr/bin/env python3
"""A program of program_agent: sessions that an environment of verifiers plays (https://pypi.org/project/verifiers, 0.1.14).

    verifiers_agent.py ENVIRONMENT.py       a file with load_environment(), as verifiers wants it

The environment's rubric gives the reward, and its metrics are logged with the sample.
"""

import asyncio
import importlib.util
import json
import sys

import openai
from verifiers.clients import OpenAIChatCompletionsClient


def load(path):
    spec = importlib.util.spec_from_file_location("environment", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load_environment()


async def play(environment, task):
    client = OpenAIChatCompletionsClient(openai.AsyncOpenAI(base_url=task["base_url"], api_key=task["api_key"], max_retries=0))
    example = {
        "example_id": task["session"],
        "prompt": task["prompt"],
        "answer": str(task["ground_truth"]),
        "info": task["extra_info"],
    }
    try:
        played = await environment.run_rollout(example, client, task["model"], sampling_args={})
        error = played.get("error")
        if error and error["error"] != "EmptyModelResponseError":  # an empty answer has the reward that it has
            raise RuntimeError(error["error_chain_repr"])
        said = {"reward": played["reward"], "info": played["metrics"]}
    except Exception as error:
        said = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"id": task["id"], **said}), flush=True)


async def main():
    environment, playing = load(sys.argv[1]), set()
    while line := await asyncio.to_thread(sys.stdin.readline):
        one = asyncio.create_task(play(environment, json.loads(line)))
        playing.add(one)
        one.add_done_callback(playing.discard)
    await asyncio.gather(*playing)


asyncio.run(main())
