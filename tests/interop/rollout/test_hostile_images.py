"""Images as users have them, beside what torchvision and transformers' processor make of the same files: their bits, or an error that names the file."""
import json
import struct
import subprocess
import zlib

import pytest

from seeing_model import write_model
from support import FERRY

TOOL = FERRY.parent.parent / "tests/vision_tool"
pytestmark = pytest.mark.skipif(not TOOL.exists(), reason="this build has no models: configure it with -Dtorch_root")


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, bits, colour, rows, *chunks, interlaced=0):
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, interlaced)) + b"".join(chunks)
            + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile_images")
    (folder / "model").mkdir()
    write_model(folder / "model", "Qwen3VL")
    write_good(folder)
    write_bad(folder)
    return folder


def write_good(folder):
    import numpy as np
    from PIL import Image
    random = np.random.default_rng(11)
    noise = lambda *shape: random.integers(0, 256, shape, dtype=np.uint8)
    down, across = np.mgrid[0:61, 0:44]
    smooth = np.stack([127 + 120 * np.sin(down / 9 + c) * np.cos(across / (7 + c)) for c in range(3)], -1).astype(np.uint8)

    def save(name, pixels, mode=None, **how):
        image = Image.fromarray(pixels)
        (image if mode is None else image.convert(mode)).save(folder / f"good.{name}", **how)
    save("one_pixel.png", noise(1, 1, 3))
    save("one_pixel.jpg", noise(1, 1, 3))
    save("just_narrow_enough.png", noise(1, 200, 3))
    save("panorama.png", noise(25, 5000, 3))
    save("panorama.jpg", noise(5000, 25, 3))
    save("cmyk.jpg", smooth, "CMYK")
    save("cmyk_fine.jpg", smooth, "CMYK", quality=95, subsampling=0)
    save("ycck.jpg", smooth, "CMYK", quality=80, subsampling=2)
    save("palette.png", smooth, "P", transparency=3)
    save("palette_of_alphas.png", smooth, "P", transparency=bytes(range(256)))
    for bits in (1, 2, 4):
        Image.fromarray(smooth).quantize(2 ** bits).save(folder / f"good.palette{bits}.png", bits=bits, transparency=0)
        rows = b"".join(b"\0" + noise((37 * bits + 7) // 8).tobytes() for _ in range(21))
        (folder / f"good.gray{bits}.png").write_bytes(png(37, 21, bits, 0, rows, chunk(b"tRNS", struct.pack(">H", 1))))
    save("gray_key.png", noise(50, 60), transparency=7)
    save("key.png", noise(50, 60, 3), transparency=(1, 2, 3))
    for turn in range(1, 9):
        exif = Image.Exif()
        exif[0x112] = turn
        save(f"turned{turn}.jpg", smooth, exif=exif)
    save("turned6.png", smooth, exif=exif)
    save("profile.png", smooth, icc_profile=b"x" * 400)
    save("rgb_inside.jpg", noise(41, 43, 3), subsampling=0, keep_rgb=True)
    frames = [Image.fromarray(noise(40, 50, 3)) for _ in range(3)]
    frames[0].save(folder / "good.animated.png", save_all=True, append_images=frames[1:], duration=50)
    frames[0].save(folder / "good.animated_with_cover.png", save_all=True, append_images=frames[1:], default_image=True)
    whole = noise(37, 53, 3)
    passes = [whole[y::dy, x::dx] for y, x, dy, dx in ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))]
    (folder / "good.interlaced.png").write_bytes(png(53, 37, 8, 2, b"".join(b"\0" + line.tobytes() for part in passes for line in part), interlaced=1))
    for kind in ("png", "jpg"):
        (folder / f"good.longer.{kind}").write_bytes((folder / f"good.panorama.{kind}").read_bytes() + b"x" * 1000)
    damaged = bytearray((folder / "good.panorama.jpg").read_bytes())
    damaged[len(damaged) // 2] ^= 0x55
    (folder / "good.repaired.jpg").write_bytes(damaged)  # libjpeg goes on behind the damage


def write_bad(folder):
    """Files that transformers refuses, too, but for those of 16 bits and without their last chunk."""
    jpg, shown = (folder / "good.panorama.jpg").read_bytes(), (folder / "good.panorama.png").read_bytes()
    for name, bytes in {"empty.png": b"", "letter.jpg": jpg[:1], "magic.jpg": jpg[:3], "header.jpg": jpg[:200], "half.jpg": jpg[:len(jpg) // 2],
                        "without_end.jpg": jpg[:-2], "magic.png": shown[:8], "header.png": shown[:33], "half.png": shown[:len(shown) // 2],
                        "without_end.png": shown[:-12], "text.png": b"no image", "prefix.jpg": b"\0" + jpg}.items():
        (folder / f"bad.{name}").write_bytes(bytes)
    flipped = bytearray(shown)
    flipped[2000] ^= 0xff
    (folder / "bad.flipped.png").write_bytes(flipped)
    for name, colour, channels in (("gray", 0, 1), ("rgb", 2, 3), ("alpha", 6, 4)):
        (folder / f"bad.deep_{name}.png").write_bytes(png(3, 2, 16, colour, (b"\0" + b"\1\2" * 3 * channels) * 2))
    from PIL import Image
    for kind in ("gif", "webp", "bmp", "tiff"):
        Image.new("RGB", (20, 20)).save(folder / f"bad.other.{kind}")
    for height, width in ((1, 5000), (201, 1)):
        Image.new("RGB", (width, height)).save(folder / f"bad.narrow{height}.png")


def run_tool(world, out, files):
    out.mkdir()
    return subprocess.run([TOOL, world / "model", "bfloat16", out, *files], input="", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120)


def test_images_as_users_have_them_are_those_of_transformers(world, tmp_path):
    import torch
    from transformers import Qwen2VLImageProcessor
    processor = Qwen2VLImageProcessor.from_pretrained(world / "model")
    files = sorted(world.glob("good.*"))
    assert len(files) > 30
    done = run_tool(world, tmp_path / "out", files)
    assert done.returncode == 0, done.stderr
    shapes, different = json.loads(done.stdout), []
    for i, file in enumerate(files):
        ours = torch.frombuffer(bytearray((tmp_path / f"out/pixel_values.{i}").read_bytes()), dtype=torch.float32).reshape(shapes[f"pixel_values.{i}"])
        theirs = processor(images=[str(file)], return_tensors="pt")["pixel_values"]
        if ours.shape != theirs.shape or not torch.equal(ours.view(torch.int32), theirs.contiguous().view(torch.int32)):
            different.append(file.name)
    assert not different


def test_what_is_no_whole_image_is_named(world, tmp_path):
    files = sorted(world.glob("bad.*"))
    assert len(files) > 15
    for i, file in enumerate(files):
        done = run_tool(world, tmp_path / str(i), [file])
        assert done.returncode == 2 and ("narrow" in file.name or file.name in done.stderr), (file.name, done.returncode, done.stderr)
        expected = {"deep": "16 bits a channel", "narrow": "200 times", "other": "neither JPEG nor PNG", "text": "neither JPEG nor PNG"}
        for kind, words in expected.items():
            assert not file.name.startswith(f"bad.{kind}") or words in done.stderr, (file.name, done.stderr)
