"""The hub's cache on this machine: files that were cut off, revisions with slashes in their names."""
from servers import COMMIT, serve_faults, serve_hub
from support import digest_of, ferry_json, run_ok
from test_remote import CONFIG, download, hub_environment  # noqa: F401  the fixture "model" asks for CONFIG


def test_file_of_the_cache_that_was_cut_off_is_read_from_the_hub(model, work):
    with serve_hub(model) as hub:
        snapshot = download(hub, work)
        (snapshot / "model-00002-of-00003.safetensors").resolve().write_bytes(b"half of it")
        with serve_faults(hub.url) as proxy:
            digest = ferry_json("digest", "hf://org/model", "--tensors-only", env={**hub_environment(hub, work), "HF_ENDPOINT": proxy.url})
            asked = {r.path.split("/")[-1].split("?")[0] for r in proxy.log}
    assert digest["model"] == digest_of(model)[0] and asked == {"main", "model-00002-of-00003.safetensors"}


def test_revision_with_slashes_is_asked_for_and_found_in_the_cache(model, work):
    with serve_hub(model) as hub:
        snapshot = download(hub, work)
        run_ok("inspect", "hf://org/model@refs%2Fpr%2F1", env=hub_environment(hub, work))
        ref = snapshot.parent.parent / "refs/refs/pr/1"
        ref.parent.mkdir(parents=True)
        ref.write_text(COMMIT + "\n")
        run_ok("inspect", "hf://org/model@refs%2Fpr%2F1", env=hub_environment(hub, work, HF_HUB_OFFLINE="1"))
