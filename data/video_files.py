"""Is this file a video, of which format, and smaller if wished.

in: the bytes of one file  ->  out: the field name (`mp4`, `mkv`, ...) and the bytes to store
Invariant: bytes are stored untouched unless they are made smaller; the bytes decide the format, not the file's name.
"""

from __future__ import annotations

import io
from typing import Any

from .video import Video

# File names that are looked at in a folder or an archive; what such a file really holds is decided by its bytes.
VIDEO_SUFFIXES = frozenset("mp4 avi mkv webm mov m4v".split())
GOP = 32  # frames from one key frame to the next in what is encoded here: reading one in the middle decodes half of that first
# x264's usual quality, at a speed of some hundred frames a second; one thread, so that the same video gives the same bytes
_ENCODER = {"crf": "23", "preset": "veryfast", "threads": "1"}


def check_video(data: bytes) -> str:
    """The field name for these bytes; raises DataError where they are no whole video with a first frame that can be decoded.

    Damage after that is not seen here, and becomes a bad sample in training if it is in a clip.
    """
    with Video(data) as video:
        if video.kind == "avi":
            return "avi"
        if video.kind == "matroska":
            return "webm" if b"webm" in data[:64] else "mkv"
        return "mov" if data[8:12] == b"qt  " else "mp4"


def resize_video(data: bytes, short_side: int) -> tuple[str, bytes]:
    """Field name and bytes with the short side at most `short_side`: H.264 in MP4, upright, every frame at its time, without sound.

    A video that is small enough keeps its bytes; none is made larger. Raises DataError.
    """
    import av

    with Video(data) as video:
        if min(video.size) <= short_side:
            return check_video(data), data
        scale = short_side / min(video.size)
        width, height = (2 * round(side * scale / 2) for side in video.size)  # H.264 wants even ones
        out = io.BytesIO()
        with av.open(out, "w", format="mp4") as container:
            stream: Any = container.add_stream("libx264", rate=round(max(1.0, video.fps)))
            stream.width, stream.height, stream.pix_fmt, stream.options = width, height, "yuv420p", _ENCODER
            stream.codec_context.gop_size = GOP
            stream.codec_context.time_base = video.time_base
            for index, picture in video.read(range(video.num_frames), (width, height)):
                frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
                frame.pts, frame.time_base = video.stamp(index), video.time_base
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
    return "mp4", out.getvalue()

