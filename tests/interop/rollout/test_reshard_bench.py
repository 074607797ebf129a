"""The benchmark of resharding, on a model as small as can be split: every way of it moves every bit, and its numbers hang together."""
import json
import os
import subprocess
import sys

import pytest

from ranks import free_port
from support import FERRY, HERE

PROGRAM = FERRY.parent.parent / "tests/reshard_bench"
pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")
CASES = {"tiny": ["tp2pp2:tp4", "tp2pp2:tp2", "tp2:tp1:disjoint", "pp2:tp2:disjoint"],
         "tiny-moe": ["ep4:tp4", "ep2pp2:tp2", "tp2ep2etp1:tp1ep2:disjoint"]}


def run_bench(checkpoint, cases, ranks=4):
    """{case: its object} of processes as torchrun starts them."""
    port = free_port()
    arguments = [PROGRAM, checkpoint, "--json", "--rounds", "1", "--peer-rounds", "1", "--link-mib", "1", *(x for case in cases for x in ("--case", case))]
    started = [subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1",
                                                  "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}) for rank in range(ranks)]
    outputs = [rank.communicate(timeout=100) for rank in started]
    assert [rank.returncode for rank in started] == [0] * ranks, [error[-1000:] for _, error in outputs]
    return {row["case"]: row for row in map(json.loads, outputs[0][0].splitlines())}


@pytest.mark.parametrize("shape", CASES)
def test_every_way_moves_every_bit(tmp_path, shape):
    subprocess.run([sys.executable, HERE.parent / "bench/make_checkpoint.py", shape, tmp_path, "--sparse"], check=True)
    rows = run_bench(tmp_path, CASES[shape])
    assert list(rows) == CASES[shape]
    for row in rows.values():
        assert row["digests_equal"] and all(row[way]["unequal"] == 0 for way in ("reshard", "per_tensor", "buckets"))
        assert 0 < row["largest_rank_gb"] <= 1.1 * row["weight_gb"]  # messages are aligned
        assert row["reshard"]["gb_per_second"] == pytest.approx(row["largest_rank_gb"] / row["reshard"]["ms"] * 1e3)
