"""Files of pictures and videos, read again."""

from __future__ import annotations

import builtins
import io
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from diffcluster.errors import ConfigError
from diffcluster.roles.media import check_video_support, encode_image, encode_video
from tests.support import parameters

Array = npt.NDArray[np.uint8]


def moving(count: int, height: int = 48, width: int = 64) -> Array:
    """A bright bar that goes to the right over a gradient."""
    frames = np.zeros((count, height, width, 3), np.uint8)
    frames[..., 1] = np.linspace(0, 200, width, dtype=np.uint8)
    for k in range(count):
        frames[k, :, 4 * k % width : 4 * k % width + 4] = 250
    return frames


def decoded(content: bytes) -> tuple[list[Array], Any, float]:
    """Frames, rate and seconds of a video."""
    with av.open(io.BytesIO(content)) as container:
        stream = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        assert stream.codec_context.pix_fmt == "yuv420p"
        assert stream.codec_context.name == "h264"
        assert container.duration is not None
        return frames, stream.average_rate, container.duration / av.time_base


@pytest.mark.parametrize("fps", [1, 8, 24, 30, 240])
def test_a_video_has_its_frames_and_its_rate(fps: int) -> None:
    original = moving(9)
    media_type, content = encode_video(original, parameters(output_format="mp4", fps=fps))
    assert media_type == "video/mp4"
    frames, rate, seconds = decoded(content)
    assert (len(frames), rate) == (9, fps)
    assert seconds == pytest.approx(9 / fps, abs=0.002)
    # Colours are stored with half the resolution: what is sharp in them is not expected to come back.
    assert np.abs(np.stack(frames).astype(int) - original).mean() < 8


def test_a_video_can_begin_before_all_of_it_is_there() -> None:
    _, content = encode_video(moving(5), parameters(output_format="mp4", fps=8))
    assert content[4:8] == b"ftyp"
    assert content.index(b"moov") < content.index(b"mdat")


@pytest.mark.parametrize(("height", "width"), [(47, 64), (48, 63), (47, 63), (1, 1), (16, 512)])
def test_odd_sides_get_their_last_line_twice(height: int, width: int) -> None:
    _, content = encode_video(moving(3, height, width), parameters(output_format="mp4", fps=8))
    frames, _, _ = decoded(content)
    assert frames[0].shape == (height + height % 2, width + width % 2, 3)


def test_a_single_frame_is_a_video_too() -> None:
    _, content = encode_video(moving(1), parameters(output_format="mp4", fps=4))
    assert len(decoded(content)[0]) == 1


def test_less_compression_is_larger_and_nearer() -> None:
    original, sizes, errors = moving(6), [], []
    for quality in (0, 50, 100):
        _, content = encode_video(original, parameters(output_format="mp4", fps=8, output_compression=quality))
        sizes.append(len(content))
        errors.append(np.abs(np.stack(decoded(content)[0]).astype(int) - original).mean())
    assert sizes == sorted(sizes)
    assert errors == sorted(errors, reverse=True)


def test_the_same_frames_make_the_same_file() -> None:
    made = {encode_video(moving(5), parameters(output_format="mp4", fps=8))[1] for _ in range(3)}
    assert len(made) == 1


def test_pictures_and_arrays_make_the_same_file() -> None:
    pictures = [Image.fromarray(frame) for frame in moving(4)]
    for output_format in ("mp4", "png", "webp"):
        asked = parameters(output_format=output_format, fps=8)
        assert encode_video(pictures, asked) == encode_video(moving(4), asked)


@pytest.mark.parametrize("fps", [1, 8, 24, 30, 240])
@pytest.mark.parametrize("output_format", ["png", "webp"])
def test_animated_pictures_have_their_frames_and_their_time(output_format: str, fps: int) -> None:
    original = moving(9)
    media_type, content = encode_video(original, parameters(output_format=output_format, fps=fps))
    assert media_type == f"image/{output_format}"
    with Image.open(io.BytesIO(content)) as image:
        assert (image.n_frames, image.size) == (9, (64, 48))
        total = 0.0
        for k in range(9):
            image.seek(k)
            image.load()
            total += image.info["duration"]
            if output_format == "png":
                assert np.array_equal(np.asarray(image.convert("RGB")), original[k])
    assert total == pytest.approx(9000 / fps, abs=1)


@pytest.mark.parametrize("output_format", ["png", "webp"])
def test_one_frame_is_a_plain_picture(output_format: str) -> None:
    _, content = encode_video(moving(1), parameters(output_format=output_format, fps=8))
    with Image.open(io.BytesIO(content)) as image:
        assert image.size == (64, 48)


def test_without_pyav_a_model_of_videos_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    check_video_support()
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "av":
            raise ImportError("No module named 'av'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"diffcluster\[video\]"):
        check_video_support()


@pytest.mark.parametrize(
    ("output_format", "magic"), [("png", b"\x89PNG"), ("jpeg", b"\xff\xd8\xff"), ("webp", b"RIFF")]
)
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_pictures(output_format: str, magic: bytes, mode: str) -> None:
    image = Image.fromarray(moving(1)[0]).convert(mode)
    media_type, content = encode_image(image, parameters(output_format=output_format))
    assert media_type == f"image/{output_format}"
    assert content.startswith(magic)
