"""ferry.merge, split and delta_*: they write what the program writes, and their reports are its reports."""
import os

import pytest
import torch
from safetensors.torch import load_file

from support import described, digest_of, ferry_json, hf_tensors, llama_config, llama_shapes, random_tensors, run_ok, tree, write_hf

ferry = pytest.importorskip("ferry", reason="the Python module is not built")
NORMS = "*norm*"


@pytest.fixture
def ends(work):
    """Two checkpoints whose matrices differ in a part of rank 1."""
    config = llama_config()
    tensors = random_tensors(llama_shapes(config), dtype="F32")
    write_hf(work / "base", {**config, "dtype": "float32"}, tensors)
    weights = load_file(work / "base/model.safetensors")
    torch.manual_seed(4)
    changed = {name: tensor + torch.outer(torch.randn(tensor.shape[0]), torch.randn(tensor.shape[1])) if name.endswith("_proj.weight") else tensor
               for name, tensor in weights.items()}
    write_hf(work / "tuned", {**config, "dtype": "float32"}, {name: ("F32", list(tensor.shape), tensor.numpy().tobytes())
                                                              for name, tensor in changed.items()})
    return work / "base", work / "tuned"


def same(report, found, **renamed):
    """The fields of a dataclass are those of the program's JSON; seconds pass differently."""
    for name in report.__dataclass_fields__:
        if "seconds" not in name and name not in ("target", "source", "delta"):
            value, want = getattr(report, name), found[renamed.get(name, name)]
            assert value == want, name


def test_an_adapter_is_split_out_and_merged_as_the_program_does(ends, work):
    base, tuned = ends
    report = ferry.split(base, tuned, work / "one", rank=2)
    found = ferry_json("split", base, tuned, work / "other", "--rank", "2")
    assert tree(work / "one") == tree(work / "other") and report.target == str(work / "one")
    assert [(one.name, list(one.shape), one.change, one.error) for one in report.tensors] == \
        [(one["name"], one["shape"], one["change"], one["error"]) for one in found["tensors"]]
    assert report.error < 1e-4 * report.change and report.rank == 2 and report.proved
    assert (report.parameters, report.equal, report.change, report.error, report.canonical) == \
        (found["parameters"], found["equal"], found["change"], found["error"], found["canonical"])

    report = ferry.merge(base, work / "one", work / "merged")
    found = ferry_json("merge", base, work / "one", work / "merged_too")
    assert tree(work / "merged") == tree(work / "merged_too")
    same_numbers = {name: getattr(report, name) for name in ("tensors", "elements", "changed", "vanished", "rescaled")}
    assert same_numbers == found["adapter"] and report.changed > 0
    assert report.converted.proved and report.converted.model_digest == found["model_digest"]
    before, after = load_file(tuned / "model.safetensors"), load_file(work / "merged/model.safetensors")
    assert all(torch.allclose(before[name], after[name], atol=1e-5) for name in before)


def test_a_merge_has_a_layout_and_a_split_a_form(ends, work):
    base, tuned = ends
    seen = []
    ferry.split(str(base), os.fspath(tuned), work / "mb", rank=2, to="megatron", tp=2, exclude=NORMS, progress=lambda stage, *_: seen.append(stage))
    assert seen
    ferry.merge(base, work / "mb", work / "merged", to="megatron", tp=2, lora_alpha=2)
    run_ok("merge", base, work / "mb", work / "other", "--to", "megatron", "--tp", "2")
    assert digest_of(work / "merged") == digest_of(work / "other") != digest_of(base)
    ferry.convert(base, work / "megatron")
    ferry.merge(work / "megatron", work / "mb", work / "same_format")
    assert ferry.inspect(work / "same_format").format == "torch_dist"
    assert ferry.verify(work / "same_format", work / "merged")


def test_deltas_are_made_and_applied_as_the_program_does(ends, work):
    base, tuned = ends
    ferry.merge(base, ferry.split(base, tuned, work / "adapter", rank=1, include="*q_proj*").target, work / "middle")
    first, second = ferry.delta_make(base, work / "middle", work / "first"), ferry.delta_make(work / "middle", tuned, work / "second")
    found = ferry_json("delta", "make", base, work / "middle", work / "other")
    same(first, found)
    assert first.delta == str(work / "first") and first.result_model == second.base_model and first.changed_tensors < second.changed_tensors
    report = ferry.delta_apply(base, [work / "first", str(work / "second")], work / "applied")
    assert report.proved and report.model_digest == second.result_model and described(hf_tensors(work / "applied")) == described(hf_tensors(tuned))
    ferry.delta_apply(base, work / "first", work / "megatron", to="megatron", tp=2)
    assert digest_of(work / "megatron") == digest_of(work / "middle")
    verified = ferry.delta_verify(base, (work / "first", work / "second"))
    assert verified.fits and verified.result_model == second.result_model and verified.tensors == first.tensors and verified.bytes == first.model_bytes
    (summary,) = ferry.delta_inspect(work / "first")
    (found,) = ferry_json("delta", "inspect", work / "first")
    same(summary, {**dict.fromkeys(summary.__dataclass_fields__), **found, "changed": [ferry.ChangedTensor(**one) for one in found["changed"]]})
    assert sum(one.elements for one in summary.changed) == first.changed_elements


def test_versions_of_slime_have_numbers(ends, work):
    base, tuned = ends
    ferry.delta_make(base, tuned, work / "versions", to="slime", version=1)
    ferry.delta_make(tuned, base, work / "versions", to="slime")
    summaries = ferry.delta_inspect(work / "versions")
    assert [(one.form, one.version, one.base_version, one.base_model) for one in summaries] == [("slime", 1, 0, None), ("slime", 2, 1, None)]
    assert ferry.delta_verify(base, work / "versions").result_model == ferry.digest(base).model


def test_mistakes_are_named_and_leave_nothing_behind(ends, work):
    base, tuned = ends
    before = tree(work)

    def refuse(function, *arguments, kind="usage", words=(), **options):
        with pytest.raises(ferry.Error) as error:
            function(*arguments, **options)
        assert error.value.kind == kind and all(word in str(error.value) for word in words), error.value
    for rank in (0, 65537):
        refuse(ferry.split, base, tuned, work / "out", rank=rank, words=[f"rank={rank}: is not in 1"])
    refuse(ferry.split, base, tuned, work / "out", rank=2, to="hf", words=["to=hf: is none of peft"])
    refuse(ferry.split, base, base, work / "out", rank=2)
    refuse(ferry.merge, base, tuned, work / "out", kind="layout", words=["expected an adapter"])
    refuse(ferry.merge, base, work / "nothing", work / "out", kind="not_found")
    refuse(ferry.delta_make, base, tuned, work / "out", to="git", words=["to=git: is none of ferry, slime, vllm"])
    refuse(ferry.delta_make, base, tuned, work / "out", version=3, words=["only slime's folders have versions"])
    refuse(ferry.delta_apply, base, 3, work / "out", words=["deltas: 3 are no paths"])
    refuse(ferry.delta_apply, base, tuned, work / "out", kind="not_found")
    assert tree(work) == before
    ferry.delta_make(tuned, base, work / "delta")
    refuse(ferry.delta_verify, base, work / "delta", kind="layout")


def test_no_delta_is_no_chain(ends, work):
    for act in (lambda: ferry.delta_apply(ends[0], [], work / "out"), lambda: ferry.delta_verify(ends[0], [])):
        with pytest.raises(ferry.Error, match="no delta is given"):
            act()
    assert not (work / "out").exists()


@pytest.mark.parametrize("most", [0, -1])
def test_a_file_has_at_least_a_byte(ends, work, most):
    with pytest.raises(ferry.Error, match="max_shard_size"):
        ferry.convert(ends[0], work / "out", to="hf", max_shard_size=most, progress=False)


def test_a_save_that_is_stopped_leaves_nothing_and_no_hint_of_resuming(ends, work):
    with pytest.raises(ferry.Error) as stopped:
        ferry.save(work / "out", load_file(ends[0] / "model.safetensors"), like=ends[0], progress=lambda *_: False)
    assert stopped.value.kind == "cancelled" and "resume" not in stopped.value.hint
    assert sorted(path.name for path in work.iterdir()) == ["base", "tuned"]
