#!/usr/bin/env python3
"""The environment: knows the secret numbers of the games that are played, and says where a guess lies."""

import json
import sys

secrets = {}
for line in sys.stdin:
    asked = json.loads(line)
    game = asked["session"]
    if asked["method"] == "reset":
        secrets[game] = asked["ground_truth"]
        said = {}
    elif asked["method"] == "close":  # the player has no turn left
        del secrets[game]
        continue
    else:
        guess, secret = asked["action"], secrets[game]
        right, over = guess == secret, guess == secret or not guess.isdigit()
        said = {"observation": "+" if guess < secret else "-", "reward": int(right), "done": over}
        if over: del secrets[game]
    print(json.dumps({"id": asked["id"], **said}), flush=True)
