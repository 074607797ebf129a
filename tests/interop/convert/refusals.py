import resource

from support import ferry

MEMORY = 4 << 30  # of address space; all inputs here are a few kilobytes


def refuse(work, source, words, *options, target="out"):
    """ferry convert refuses, naming `words`; verify and inspect survive the same input."""
    before = sorted(p.name for p in work.iterdir())
    limit = dict(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)), timeout=30)
    done = ferry("convert", source, work / target, *options, **limit)
    assert done.returncode == 2, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
    assert "error:" in done.stderr
    missing = [w for w in words if w not in done.stderr]
    assert not missing, f"stderr does not say {missing}:\n{done.stderr}"
    assert not (work / target).exists(), "something was left at the target"
    assert sorted(p.name for p in work.iterdir()) == before, "something was left beside the target"
    return limit
