"""tools/jobs: as many compilers as cores and free memory allow, in a container too."""
import importlib.machinery
import importlib.util
from pathlib import Path

import pytest

GIB = 2**30
LOADER = importlib.machinery.SourceFileLoader("jobs", str(Path(__file__).resolve().parents[2] / "tools/jobs"))
jobs = importlib.util.module_from_spec(importlib.util.spec_from_loader("jobs", LOADER))
LOADER.exec_module(jobs)


@pytest.mark.parametrize("cores, free, expected", [(2, 24, 2), (8, 16, 8), (16, 15.9, 7), (4, 3.9, 1), (4, 0.5, 1), (1, 64, 1)])
def test_memory_and_cores_bound_them(cores, free, expected):
    assert jobs.jobs(cores, int(free * GIB)) == expected


@pytest.mark.parametrize("own, limits, expected", [
    (None, {}, 20),
    ("/", {"": ("max", 5)}, 20),
    ("/", {"": (12, 2)}, 10),
    ("/a/b", {"": ("max", 9), "a": (8, 5), "a/b": (6, 1)}, 3),
    ("/a/b", {"a/b": (6, 1)}, 5),
    ("/a/b", {"a/b": (6, 7)}, 0),
    ("/gone", {"": (10, 4)}, 6),
    ("/../other", {"": (10, 4)}, 6),
])
def test_limits_of_every_group_above_count(tmp_path, own, limits, expected):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    groups.mkdir()
    (proc / "meminfo").write_text(f"MemTotal: {24 * 2**20} kB\nMemAvailable:   {20 * 2**20} kB\n")
    if own:
        (proc / "self/cgroup").write_text(f"1:cpu:/elsewhere\n0::{own}\n")
    for name, (most, used) in limits.items():
        (groups / name).mkdir(parents=True, exist_ok=True)
        (groups / name / "memory.max").write_text(f"{most if most == 'max' else most * GIB}\n")
        (groups / name / "memory.current").write_text(f"{(used + 3) * GIB}\n")
        (groups / name / "memory.stat").write_text(f"anon 7\ninactive_file {GIB}\nactive_file {2 * GIB}\n")  # which the kernel gives back
    assert jobs.free_memory(proc, groups) == expected * GIB
