"""Images in chats of `ferry serve`, with OpenAI's own client, beside transformers (the regime of rollout/test_images.py)."""
import base64
import io
import struct
import time
import zlib

import openai
import pytest
import torch

from seeing_model import answer_log_probs, load_peer, write_model
from served import NAME, serve
from support import run_ok


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    import numpy as np
    from PIL import Image
    folder = tmp_path_factory.mktemp("served_images")
    for name, seed in [("model", 7), ("other", 8)]:
        (folder / name).mkdir()
        write_model(folder / name, "Qwen3VL", seed)
    (folder / "media").mkdir()
    random = np.random.default_rng(7)
    for i, (height, width) in enumerate([(40, 56), (33, 90)]):
        image = Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
        image.save(folder / f"media/{i}.png")
        image.save(folder / f"media/{i}.jpg")
    (folder / "secret.png").write_bytes((folder / "media/0.png").read_bytes())
    return folder


@pytest.fixture(scope="module")
def peers(world):
    return {name: load_peer(world / name) for name in ("model", "other")}


def data_url(bytes, kind="png"):
    return f"data:image/{kind};base64," + base64.b64encode(bytes).decode()


def url(path):
    return data_url(path.read_bytes(), path.suffix[1:])


def parts(*given):
    return [{"type": "text", "text": one} if " " in one else {"type": "image_url", "image_url": {"url": one}} for one in given]


def client_of(served):
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def ask(served, *given, **more):
    fields = {"temperature": 0, "max_tokens": 8, "logprobs": True, "extra_body": {"ignore_eos": True, "return_token_ids": True}} | more
    return client_of(served).chat.completions.create(model=NAME, messages=[{"role": "user", "content": parts(*given)}], **fields).choices


def check(choices, world, peer, *given, greedy=True):
    """Choices are answers of transformers, with its log-probabilities."""
    content = [{"type": "text", "text": one} if " " in one else {"type": "image", "image": str(world / one)} for one in given]
    for choice in choices:
        tokens = list(choice.token_ids)
        log_probs = answer_log_probs(peer, [{"role": "user", "content": content}], tokens)
        if greedy:
            assert tokens == log_probs.argmax(-1).tolist()
        assert [one.logprob for one in choice.logprobs.content] == log_probs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("mesh", [(), ("--tp", 2), ("--dp", 2)], ids=["alone", "tp2", "dp2"])
def test_answers_about_images_have_the_bits_of_transformers(mesh, world, peers):
    first, second, photo = (url(world / f"media/{name}") for name in ("0.png", "1.png", "1.jpg"))
    with serve(world / "model", *mesh) as served:
        check(ask(served, "what is", second, "and that", first), world, peers["model"], "what is", "media/1.png", "and that", "media/0.png")
        check(ask(served, first, "what is this", n=2, temperature=1, seed=3), world, peers["model"], "media/0.png", "what is this", greedy=False)
        check(ask(served, second, "what is this"), world, peers["model"], "media/1.png", "what is this")
        check(ask(served, photo, "what is this"), world, peers["model"], "media/1.jpg", "what is this")
        check(ask(served, "what is this"), world, peers["model"], "what is this")


def test_a_stream_and_a_prompt_of_tokens_know_images(world):
    shown = url(world / "media/0.png")
    with serve(world / "model") as served:
        (whole,) = ask(served, shown, "what is this")
        stream = client_of(served).chat.completions.create(model=NAME, messages=[{"role": "user", "content": parts(shown, "what is this")}], temperature=0,
                                                           max_tokens=8, stream=True, extra_body={"ignore_eos": True})
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.message.content
        counted = served.post("/tokenize", model=NAME, messages=[{"role": "user", "content": parts(shown, "what is this")}])
        assert counted["tokens"].count(5) == 5 * 7  # 40 x 56 pixels, 8 x 8 a token


def test_updated_weights_bring_their_tower(world, peers):
    shown = url(world / "media/0.png")
    run_ok("delta", "make", world / "other", world / "model", world / "delta")
    with serve(world / "model", "--tp", 2) as served:
        for update, name in [({}, "model"), ({"checkpoint": "other"}, "other"), ({"checkpoint": "other", "delta": "delta"}, "model")]:
            if update:
                served.post("/update_weights", **{key: str(world / value) for key, value in update.items()})
            check(ask(served, shown, "what is this"), world, peers[name], "media/0.png", "what is this")


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def header(width, height):
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))


def test_an_image_that_unpacks_to_more_than_it_shows_costs_nothing(world):
    """A PNG of 4 MB whose texts are 4 GB, and a progressive JPEG of 0.2 MB, whose 5000 scans cost a walk over 4 million pixels each."""
    from PIL import Image
    shown = b"".join(b"\0" + bytes(3 * 56) for _ in range(40))
    texts = chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(7_900_000), 9)) * 500
    png = b"\x89PNG\r\n\x1a\n" + header(56, 40) + texts + chunk(b"IDAT", zlib.compress(shown)) + chunk(b"IEND", b"")
    plain = b"\x89PNG\r\n\x1a\n" + header(56, 40) + chunk(b"IDAT", zlib.compress(shown)) + chunk(b"IEND", b"")
    drawn = io.BytesIO()
    Image.new("RGB", (2048, 2048)).save(drawn, "JPEG", progressive=True)
    jpeg = drawn.getvalue()
    last = jpeg.rindex(b"\xff\xc4")  # the table and the scan behind it
    with serve(world / "model", "--max-model-len", 100) as served:
        def peak():
            return int(next(line.split()[1] for line in open(f"/proc/{served.process.pid}/status") if line.startswith("VmHWM"))) >> 10
        expected = ask(served, data_url(plain), "what is this")[0].token_ids
        before, begin = peak(), time.monotonic()
        assert ask(served, data_url(png), "what is this")[0].token_ids == expected
        with pytest.raises(openai.BadRequestError, match="more than 100 scans"):
            ask(served, data_url(jpeg[:-2] + jpeg[last:-2] * 5000 + jpeg[-2:], "jpeg"), "what is this")
        assert peak() < before + 500 and time.monotonic() - begin < 20


def test_what_is_no_image_or_not_allowed_is_a_bad_request(world):
    good = url(world / "media/0.png")
    png = lambda width, height: b"\x89PNG\r\n\x1a\n" + header(width, height) + chunk(b"IDAT", zlib.compress(b"\0" * 1200)) + chunk(b"IEND", b"")
    with serve(world / "model", "--max-images", 3, "--max-image-pixels", 10000, "--allowed-local-media-path", world / "media",
               "--max-model-len", 100, "--max-body", "64KiB") as served:
        def refused(*given, param="messages"):
            with pytest.raises(openai.BadRequestError) as caught:
                ask(served, *given, "what is this")
            assert caught.value.param == param
            return str(caught.value)
        assert "more than 3" in refused(good, good, good, good)
        assert "neither a data: URL nor a file" in refused("https://example.org/a.png")
        assert "not below" in refused(f"file://{world}/secret.png")
        assert "not below" in refused(f"file://{world}/media/../secret.png")
        assert "not below" in refused(f"file://{world}/media")
        assert "none.png" in refused(f"file://{world}/media/none.png")
        assert "too long" in refused(f"file://{world}/media/{'x' * 300}/{'y' * 300}.png")
        assert "neither a data: URL" in refused(f"{world}/media/0.png")
        assert "base64" in refused("data:image/png;base64,***")
        assert "not data:image" in refused("data:image/png,abc")
        assert "neither JPEG nor PNG" in refused(data_url(b"no image"))
        assert "an image" in refused(data_url((world / "media/0.png").read_bytes()[:200]))
        assert "expected 1 to 10000" in refused(data_url(png(101, 100)))
        assert "expected 1 to 10000" in refused(data_url(png(100000, 100000)))
        assert "200 times" in refused(data_url(png(1, 300)))
        assert "<|image_pad|>" in refused(good, "what is <|image_pad|>")
        assert "takes 100 tokens" in refused(good, good, good, param="prompt")
        allowed, = ask(served, f"file://{world}/media/0.png", "what is this")
        assert allowed.token_ids == ask(served, good, "what is this")[0].token_ids
        bare = {"model": NAME, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
        assert served.post("/v1/chat/completions", 400, **bare)["error"]["param"] == "messages.0.content.image_url"
        video = {"model": NAME, "messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": good}}]}]}
        assert "image_url" in served.post("/v1/chat/completions", 400, **video)["error"]["message"]
        with pytest.raises(openai.APIStatusError) as caught:
            ask(served, "what is " + "x" * 70000)
        assert caught.value.status_code == 413
    with serve(world / "model", "--max-images", 1) as served:
        with pytest.raises(openai.BadRequestError, match="2 images, more than 1"):
            ask(served, good, good, "what is this")
        with pytest.raises(openai.BadRequestError, match="neither a data: URL nor a file below"):
            ask(served, f"file://{world}/media/0.png", "what is this")
