import shutil

import pytest

from support import FERRY, ROOT

# Files that take longest begin first: a worker that has one left at the end lets the other cores idle.
LONGEST = ["rollout/test_logits.py", "seeing/test_seeing.py", "agents/test_agents.py", "agents/test_rollout_replicas.py", "train/test_ppo.py",
           "train/test_ppo_faults.py", "rollout/test_generate.py", "convert/test_write_for_megatron.py", "serve/test_tools.py", "train/test_async.py",
           "rollout/test_gradients.py", "python/test_megatron_bridge.py", "seeing/test_seeing_roles.py", "convert/test_interrupted.py",
           "merge/test_merge_verl.py", "train/test_sft.py", "serve/test_openai.py", "train/test_training_faults.py", "agents/test_code_reward.py",
           "convert/test_training_state.py", "train/test_router_replay.py", "serve/test_load.py", "serve/test_control.py", "rollout/test_bench_rollout.py",
           "train/test_trainer.py"]


def pytest_sessionstart(session):
    if not session.config.option.collectonly and not FERRY.exists():
        pytest.exit(f"{FERRY} does not exist: build it first, or set FERRY", returncode=2)


def pytest_collection_modifyitems(items):
    assert all((ROOT / "tests/interop" / name).exists() for name in LONGEST)
    order = {ROOT / "tests/interop" / name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.fixture
def work(tmp_path):
    """A folder of the test's own, gone when it passes or fails: checkpoints add up."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)
