"""verl's checkpoint engine "ferry", driven by verl's own manager: weights of a trainer in a folder, read by the ranks of replicas."""
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from servers import serve_s3
from support import DATA, ROOT

ferry = pytest.importorskip("ferry", reason="the Python module is not built")
HF = DATA / "hf_llama/hf"


def update(folder, fault="", model=HF, **environment):
    """-> exit status, and what it says"""
    done = subprocess.run([sys.executable, Path(__file__).parent / "update_through_verl.py", folder, model, "20000", fault],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT / "build/python"), **environment})
    return done.returncode, done.stdout


def test_every_rank_of_the_rollout_gets_every_update_of_the_trainer(work):
    code, said = update(work / "weights")
    assert (code, said) == (0, "updated 3\n")  # older updates are removed
    (last,) = (work / "weights").iterdir()
    assert len(list(last.glob("*.safetensors"))) > 1
    checkpoint = ferry.open(last)
    assert checkpoint.config == ferry.open(HF).config and len(ferry.diff(HF, last).unpaired) == 0


def test_an_update_is_not_read_by_more_users_than_the_model(work):
    shutil.copytree(HF, work / "model")
    (work / "model/config.json").chmod(0o600)
    (work / "model").chmod(0o750)
    assert update(work / "weights", model=work / "model") == (0, "updated 3\n")
    (last,) = (work / "weights").iterdir()
    assert stat.S_IMODE(last.stat().st_mode) == 0o750 and {stat.S_IMODE(path.stat().st_mode) for path in last.iterdir()} == {0o600}


def test_an_update_that_lacks_a_tensor_is_refused_by_both_sides(work):
    code, said = update(work / "weights", fault="model.layers.2.mlp.up_proj.weight")
    assert code != 0 and "model.layers.2.mlp.up_proj.weight is missing" in said
    names = sorted(path.name for path in (work / "weights").iterdir())
    assert [name.split("_")[1] for name in names] == ["1", "2"] and names[1].endswith(".failed")


def test_updates_go_through_a_bucket():
    with serve_s3() as s3, tempfile.TemporaryDirectory(dir="/tmp") as work:  # a short name, since sockets of Python's lie in it
        s3.boto.create_bucket(Bucket="updates")
        code, said = update("s3://updates/run", AWS_ENDPOINT_URL=s3.url, AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret", TMPDIR=work)
        assert (code, said) == (0, "updated 3\n")
        keys = [one["Key"] for one in s3.boto.list_objects_v2(Bucket="updates")["Contents"]]
        assert sum(key.endswith("/config.json") for key in keys) == 3 and not [name for name in os.listdir(work) if name.startswith(".writing_")]
