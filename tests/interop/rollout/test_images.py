"""Images in prompts of Qwen3-VL beside transformers: pixel values of torchvision's processor, features of the vision tower, and answers.

Regime: transformers 5.17.0, torch 2.11.0 and torchvision 0.26.0 on the host, eager attention in tower and language model, one prompt at a
time, whose images have 16 tokens or more. The log-probabilities of an answer are those of transformers' forward of the finished sequence."""
import json
import struct
import subprocess
import zlib

import pytest

from seeing_model import answer_log_probs, load_peer, write_model
from support import FERRY, ferry, ferry_json, skip_where_transformers_differs

TORCH = FERRY.parent / "ferry-torch"
TOOL = FERRY.parent.parent / "tests/vision_tool"
pytestmark = pytest.mark.skipif(not TORCH.exists(), reason="this build has no models: configure it with -Dtorch_root")
@pytest.fixture(scope="module", params=["Qwen3VL", "Qwen3VLMoe"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    write_model(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    write_model(folder, "Qwen3VL")
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Random images of many shapes and kinds: noise, and smooth ones as photographs are."""
    import numpy as np
    from PIL import Image
    folder = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(5)
    files = []

    def save(pixels, name, **how):
        Image.fromarray(pixels).save(folder / name, **how)
        files.append(folder / name)

    def smooth(height, width):
        down, across = np.mgrid[0:height, 0:width]
        return np.stack([127 + 120 * np.sin(down / 9 + c) * np.cos(across / (7 + c)) for c in range(3)], -1).astype(np.uint8)
    for i, (height, width) in enumerate([(40, 56), (33, 90), (120, 47), (200, 311), (7, 19), (64, 64)]):
        noise = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        save(noise, f"noise{i}.png")
        save(smooth(height, width), f"smooth{i}.png")
        save(smooth(height, width), f"smooth{i}.jpg", quality=[95, 75, 30][i % 3], subsampling=i % 3)
        save(noise, f"noise{i}.jpg", quality=85, progressive=bool(i % 2))
    save(random.integers(0, 256, (50, 60), dtype=np.uint8), "gray.png")
    save(random.integers(0, 256, (50, 60), dtype=np.uint8), "gray.jpg")
    save(random.integers(0, 256, (50, 60, 4), dtype=np.uint8), "transparent.png")
    save(random.integers(0, 256, (50, 60, 2), dtype=np.uint8), "gray_transparent.png")
    Image.fromarray(smooth(61, 44)).convert("P").save(folder / "palette.png")
    Image.fromarray(smooth(61, 44)).convert("1").save(folder / "bits.png")
    return [*files, folder / "palette.png", folder / "bits.png"]


def read(folder, name, shape, dtype):
    import torch
    return torch.frombuffer(bytearray((folder / name).read_bytes()), dtype=dtype).reshape(shape)


def same(ours, theirs):
    import torch
    return ours.shape == theirs.shape and torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


def run_tool(checkpoint, dtype, folder, files, sequences=()):
    folder.mkdir()
    done = subprocess.run([TOOL, checkpoint, dtype, folder, *files], input="".join(json.dumps(one) + "\n" for one in sequences),
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_pixels_are_those_of_torchvision_and_patches_those_of_the_processor(dense, images, tmp_path):
    import torch
    from torchvision.io import ImageReadMode, decode_image
    from transformers import Qwen2VLImageProcessor
    processor = Qwen2VLImageProcessor.from_pretrained(dense)
    shapes = run_tool(dense, "bfloat16", tmp_path / "out", images)
    different = []
    for i, file in enumerate(images):
        decoded = decode_image(str(file), mode=ImageReadMode.RGB)
        if not same(read(tmp_path / "out", f"image.{i}", shapes[f"image.{i}"], torch.uint8), decoded):
            different.append(f"decoded {file.name}")
        theirs = processor(images=[str(file)], return_tensors="pt")["pixel_values"]
        if not same(read(tmp_path / "out", f"pixel_values.{i}", shapes[f"pixel_values.{i}"], torch.float32), theirs):
            different.append(f"processed {file.name}")
    assert not different


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_tower_gives_the_bits_of_transformers(dtype, dense, images, tmp_path):
    import torch
    import transformers
    processor = transformers.Qwen2VLImageProcessor.from_pretrained(dense)
    model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(dense, dtype=getattr(torch, dtype), attn_implementation="eager").eval()
    for number, files in enumerate([images[:1], images[3:8], images[20:]]):
        inputs = processor(images=[str(file) for file in files], return_tensors="pt")
        with torch.no_grad():
            theirs = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True)
        shapes = run_tool(dense, dtype, tmp_path / str(number), files)
        ours = lambda name: read(tmp_path / str(number), name, shapes[name], getattr(torch, dtype))
        pairs = {"embeddings": torch.cat(theirs.pooler_output)} | {f"deepstack.{i}": features for i, features in enumerate(theirs.deepstack_features)}
        different = [name for name, features in pairs.items() if not same(ours(name), features)]
        if different and dtype == "float32":
            skip_where_transformers_differs(dense, "fp32")
        assert not different


def conversations(images):
    show = lambda *parts: [{"role": "user", "content": [{"type": "image", "image": str(p)} if not isinstance(p, str) else {"type": "text", "text": p}
                                                        for p in parts]}]
    return [show(images[0], "what is in this image"), show("what is", images[3], "and that", images[6]),
            show("what is", images[7], "and that", images[6]),  # the same tokens up to the second image's end may be: other images
            [{"role": "user", "content": "what is this"}], show(images[15], images[2], images[4], "one")]


def answers(checkpoint, chats, *options):
    lines = "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
    done = subprocess.run([FERRY, "generate", checkpoint, "--chat", "--input", "-", "--json", "-q", "--ignore-eos", "--max-tokens", "12",
                           *map(str, options)], input=lines, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 0, done.stderr + done.stdout
    return [json.loads(line) for line in done.stdout.splitlines()]


class OtherBits(AssertionError):
    """An answer is there, and is not that of transformers."""


def check_answers(checkpoint, chats, options, dtype="bfloat16"):
    import torch
    peer = load_peer(checkpoint, dtype)
    greedy = "--temperature" not in options
    found = answers(checkpoint, chats, *options, *(("--temperature", 0) if greedy else ()))
    for chat, answer in zip(chats, found, strict=True):
        for output in answer["outputs"]:
            tokens = output["token_ids"]
            log_probs = answer_log_probs(peer, chat, tokens)
            if greedy and tokens != log_probs.argmax(-1).tolist():
                raise OtherBits(tokens)
            chosen = log_probs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            if not same(torch.tensor(output["model_logprobs"]), chosen):
                raise OtherBits(output["model_logprobs"], chosen)


@pytest.mark.parametrize("options", [(), ("--max-num-batched-tokens", 40, "--max-num-seqs", 8), ("--tp", 2), ("--n", 2, "--temperature", 1, "--seed", 3, "--num-blocks", 24)])
def test_answers_have_the_bits_of_transformers(options, checkpoint, images):
    check_answers(checkpoint, conversations(images), options)


def test_sequences_that_are_trained_on_have_the_bits_of_transformers_in_a_pack(checkpoint, images, tmp_path):
    import torch
    model, processor = load_peer(checkpoint)
    chats = [chat + [{"role": "assistant", "content": "that one"}] for chat in conversations(images)]
    files, sequences, theirs = [], [], []
    for chat in chats:
        inputs = processor.apply_chat_template(chat, tokenize=True, return_dict=True, return_tensors="pt")
        inputs.pop("attention_mask")
        with torch.no_grad():
            theirs.append(model(**inputs).logits[0])
        seen = [part["image"] for message in chat if isinstance(message["content"], list) for part in message["content"] if "image" in part]
        files += seen
        sequences.append({"tokens": inputs["input_ids"][0].tolist(), "images": len(seen)})
    shapes = run_tool(checkpoint, "bfloat16", tmp_path / "out", files, sequences)
    for i, logits in enumerate(theirs):
        assert same(read(tmp_path / "out", f"logits.{i}", shapes[f"logits.{i}"], torch.bfloat16), logits)


def test_answers_in_fp32_too(dense, images):
    short = conversations(images)[:3]  # above 192 tokens transformers' fp32 does not agree with itself
    try:
        check_answers(dense, short, ("--dtype", "fp32"), "float32")
    except OtherBits:
        skip_where_transformers_differs(dense, "fp32")
        raise


def test_what_is_not_computed_is_refused_by_name(dense, images, tmp_path):
    def refused(part, *words):
        lines = json.dumps({"messages": [{"role": "user", "content": [part]}]}) + "\n"
        done = subprocess.run([FERRY, "generate", dense, "--chat", "--input", "-", "--json", "-q", "--max-tokens", "2"], input=lines,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60)
        assert done.returncode == 2
        for word in words:
            assert word in done.stdout + done.stderr, (word, done.stdout, done.stderr)
    refused({"type": "video", "video": "clip.mp4"}, "video", "only text and image")
    refused({"type": "image", "image": "https://example.org/a.png"}, "only files are read")
    refused({"type": "image", "image": str(tmp_path / "none.png")}, "none.png")
    (tmp_path / "text.png").write_text("no image")
    refused({"type": "image", "image": str(tmp_path / "text.png")}, "neither JPEG nor PNG")
    (tmp_path / "cut.png").write_bytes(images[0].read_bytes()[:200])
    refused({"type": "image", "image": str(tmp_path / "cut.png")}, "cut.png")
    (tmp_path / "cut.jpg").write_bytes(b"\xff\xd8\xff\xe0")
    refused({"type": "image", "image": str(tmp_path / "cut.jpg")}, "cut.jpg")
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    (tmp_path / "deep.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0))
                                        + chunk(b"IDAT", zlib.compress(b"\0" * 7)) + chunk(b"IEND", b""))
    refused({"type": "image", "image": str(tmp_path / "deep.png")}, "16 bits a channel")


def test_text_is_verified_and_generated_without_the_tower(dense, tmp_path):
    import hf_reference
    hf_reference.main([str(dense), str(tmp_path / "reference.safetensors"), "--lengths", "24,64", "--layers"])
    assert ferry_json("verify", "--logits", dense, "--reference", tmp_path / "reference.safetensors", "--tp", 2, "--pp", 2)["equal"]
    done = ferry("generate", dense, "--prompt-ids", "1,2,3", "--max-tokens", 2, "--temperature", 0, "-q")
    assert done.returncode == 0, done.stderr
