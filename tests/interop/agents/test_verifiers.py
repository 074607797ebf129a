"""`ferry train grpo` with an environment of verifiers (PyPI), by docs/examples/verifiers_agent.py: tools/requirements-verifiers.txt."""
import subprocess
import sys

import pytest

from ppo_run import ACTOR, ROLLOUT, samples, train
from ranks import TORCH_PROGRAM
from support import PEERS, ROOT, tree
from agent_world import CALLS, write_world

PYTHONPATH = f"PYTHONPATH={PEERS}/verifiers"
pytestmark = pytest.mark.skipif(not TORCH_PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")

# Three turns; the reward is the share of the first half of the alphabet in what the model says.
ENVIRONMENT = """import verifiers as vf
from datasets import Dataset

class Talk(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "go on " + str(len(state["trajectory"]))}]

def said(completion):
    return "".join(str(message.content or "") for message in completion if message.role == "assistant")

async def early_letters(completion, answer, **kwargs):
    return sum(letter < "n" for letter in said(completion)) / max(1, len(said(completion)))

async def length(completion, **kwargs):
    return float(len(said(completion)))

def load_environment():
    rows = Dataset.from_list([{"question": "x", "answer": "y"}])
    return Talk(dataset=rows, rubric=vf.Rubric(funcs=[early_letters, length], weights=[1.0, 0.0]), max_turns=3)
"""


def test_an_environment_of_verifiers_plays_sessions(work):
    world = write_world(work / "world", CALLS)
    (world / "talk.py").write_text(ENVIRONMENT)
    agent = {f"{ROLLOUT}.agent.default_agent_loop": "program_agent", f"{ROLLOUT}.agent.program_timeout": 60, "reward_model.command": None,
             f"{ROLLOUT}.agent.program_command": f"env {PYTHONPATH} {sys.executable} {ROOT / 'docs/examples/verifiers_agent.py'} {world / 'talk.py'}",
             "data.max_prompt_length": 64, "data.max_response_length": 96, f"{ACTOR}.ppo_max_token_len_per_gpu": 256}
    steps = train(world, work / "run", **agent)
    for step, metrics in steps.items():
        assert metrics["num_turns/max"] == 6
        for name in ("actor/ppo_kl", "training/rollout_probs_diff_max", "rollout_corr/kl"):
            assert metrics[name] == 0, name
        assert metrics["actor/grad_norm"] > 0
        rows = samples(work / "run", step)
        assert all(row["score"] == pytest.approx(row["early_letters"], abs=1e-6) for row in rows)
        assert {row["num_turns"] for row in rows} <= {0, 1, 2, 3} and any(row["num_turns"] == 3 and row["length"] > 0 for row in rows)
    assert train(world, work / "again", **agent | {f"{ROLLOUT}.agent.replay_dir": str(work / "run/sessions"),
                                                   f"{ROLLOUT}.agent.program_command": "false"}) == steps
    assert tree(work / "again/rollouts") == tree(work / "run/rollouts")


def test_it_is_the_release_that_the_example_names():
    command = ["env", PYTHONPATH, sys.executable, "-c", "import verifiers; print(verifiers.__version__)"]
    version = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert version.strip() == "0.1.14"
