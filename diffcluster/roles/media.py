"""Pictures and videos as files."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from PIL import Image

from diffcluster.errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt

    from diffcluster.messages import GenerationParameters

__all__ = ["check_video_support", "encode_image", "encode_video"]

_WORST_CRF: Final = 51
_BEST_CRF: Final = 10
"""Of H.264: what `output_compression` 0 and 100 stand for."""
Frames = Sequence[Image.Image] | np.ndarray[Any, np.dtype[np.uint8]]


def encode_image(image: Image.Image, parameters: GenerationParameters) -> tuple[str, bytes]:
    """(media type, bytes) of `image` in the format that was asked for.

    PNG is lossless and ignores `output_compression`; JPEG and WebP take it as their quality, 0..100.
    """
    options: dict[str, Any] = {}
    if parameters.output_format in ("jpeg", "webp"):
        options["quality"] = parameters.output_compression
    if parameters.output_format == "jpeg" and image.mode != "RGB":
        image = image.convert("RGB")  # JPEG has no alpha channel
    buffer = io.BytesIO()
    image.save(buffer, parameters.output_format.upper(), **options)
    return f"image/{parameters.output_format}", buffer.getvalue()


def check_video_support() -> None:
    """Raise `ConfigError` unless this installation can write MP4 files; to be asked before a model of videos serves."""
    try:
        import av  # noqa: F401 - only whether it is there
    except ImportError as error:
        problem = 'a model of videos needs PyAV, which is not installed: pip install "diffcluster[video]"'
        raise ConfigError("role.model", f"{problem} ({error})") from error


def encode_video(frames: Frames, parameters: GenerationParameters) -> tuple[str, bytes]:
    """(media type, bytes) of `frames` at `parameters.fps` in the format that was asked for.

    `frames` are pictures of one size, or uint8 (frames, height, width, 3). `mp4` is H.264 in yuv420p, whose rate factor
    goes from 51 to 10 as `output_compression` goes from 0 to 100; of a side that is odd the last line comes twice,
    since that format has no odd ones. `webp` takes `output_compression` as its quality; `png` loses nothing.
    """
    if parameters.output_format == "mp4":
        return "video/mp4", _mp4(_stacked(frames), parameters.fps, parameters.output_compression)
    return f"image/{parameters.output_format}", _animated(_pictures(frames), parameters)


def _stacked(frames: Frames) -> npt.NDArray[np.uint8]:
    """One array, with even sides."""
    if not isinstance(frames, np.ndarray):
        frames = np.stack([np.asarray(frame.convert("RGB")) for frame in frames])
    odd = [(0, side % 2) for side in frames.shape[1:3]]
    return np.pad(frames, [(0, 0), *odd, (0, 0)], mode="edge")


def _pictures(frames: Frames) -> list[Image.Image]:
    if isinstance(frames, np.ndarray):
        return [Image.fromarray(frame) for frame in frames]
    return [frame.convert("RGB") for frame in frames]


def _mp4(frames: npt.NDArray[np.uint8], fps: int, quality: int) -> bytes:
    import av

    crf = _WORST_CRF - round((_WORST_CRF - _BEST_CRF) * quality / 100)
    codec = "libx264" if "libx264" in av.codec.codecs_available else "h264"
    # A file of its own: to put the index first, what has been written is read once more.
    with tempfile.TemporaryDirectory(prefix="diffcluster-") as folder:
        path = Path(folder) / "video.mp4"
        with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as container:
            stream: Any = container.add_stream(codec, rate=Fraction(fps), options={"crf": str(crf)})
            stream.height, stream.width = frames.shape[1:3]
            stream.pix_fmt = "yuv420p"
            for frame in frames:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
            container.mux(stream.encode())
        return path.read_bytes()


def _animated(frames: list[Image.Image], parameters: GenerationParameters) -> bytes:
    # Whole milliseconds, that together are as long as the video.
    ends = [round(1000 * (k + 1) / parameters.fps) for k in range(len(frames))]
    durations = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    options: dict[str, Any] = {"quality": parameters.output_compression} if parameters.output_format == "webp" else {}
    buffer = io.BytesIO()
    frames[0].save(
        buffer,
        parameters.output_format.upper(),
        save_all=True,
        append_images=frames[1:],
        duration=durations if len(frames) > 1 else durations[0],
        loop=0,
        **options,
    )
    return buffer.getvalue()
