"""Encoded videos -> single frames, upright RGB, in any order of times.

in: the bytes of one file  ->  out: `Video`: when each frame is shown, and the frames asked for, uint8 (height, width, 3)
Invariant: packets are listed first, without decoding; then only what lies between the key frame before a wanted frame and that
frame is decoded, and only wanted frames are converted. So memory is a few frames, whatever the length. The bytes decide the
format; nothing but them is ever opened. Bad bytes raise `DataError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from .containers import check_container
from .decoders import Buffer
from .errors import DataError

if TYPE_CHECKING:
    from av import Packet, VideoFrame
    from av.container import InputContainer

VIDEO_FIELDS = ("mp4", "avi", "mkv", "webm", "mov")
MAX_FRAME_PIXELS = 1 << 26  # 8192 x 8192
# More of a clip's frames that can't be decoded than this make it a bad one; a frame that is missing is stood in for by the one before.
MAX_MISSING = 0.5


class Video:
    """A video whose frames are listed. A context manager, since it holds a decoder.

    size: (width, height) as shown; times: seconds of each frame after the first one, ascending; fps: frames a second, on average.
    """

    def __init__(self, data: Buffer) -> None:
        from av.video.reformatter import VideoReformatter

        self._data, self._reformatter = memoryview(data), VideoReformatter()
        self.kind = check_container(self._data)
        self._open()
        try:
            self._list_frames()
            self.rotation, self.size = 0, self._stored_size()
            self._first_frame_facts()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Video:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the decoder; safe to call twice."""
        self._container.close()

    @property
    def num_frames(self) -> int:
        return len(self._stamps)

    def stamp(self, index: int) -> int:
        """When a frame is shown, after the first one, in units of time_base."""
        return int(self._stamps[index] - self._stamps[0])

    def read(self, indexes: Sequence[int] | np.ndarray, size: tuple[int, int]) -> Iterator[tuple[int, np.ndarray]]:
        """(index, picture uint8 (height, width, 3) brought to size = (width, height)) of every different index, ascending.

        Raises DataError where more than MAX_MISSING of them can't be decoded.
        """
        wanted = np.unique(np.asarray(indexes, np.int64))
        assert wanted.size and 0 <= wanted[0] and wanted[-1] < self.num_frames
        keys = np.searchsorted(self._key_indexes, wanted, side="right") - 1  # -1: before the first key frame
        missing = 0
        for key in np.unique(keys):
            run = wanted[keys == key].tolist()
            for index, frame, exact in self._read_run(int(key), run):
                missing += not exact
                if missing > MAX_MISSING * len(wanted):
                    raise DataError(f"{missing} of {len(wanted)} frames of the clip can't be decoded: the video is damaged")
                yield index, self._picture(frame, size)

    def _open(self) -> None:
        """Start at the first packet."""
        import av

        try:
            container = av.open(_Reader(self._data), "r", format=self.kind, metadata_errors="ignore")
        except av.FFmpegError as error:
            raise DataError(f"video can't be opened: {_reason(error)}") from None
        if not container.streams.video:
            others = ", ".join(sorted({stream.type for stream in container.streams})) or "no streams at all"
            container.close()
            raise DataError(f"the file holds no video, only {others}")
        self._container: InputContainer = container
        self._stream = container.streams.video[0]
        if self._stream.codec_context is None:
            container.close()
            raise DataError("the video's codec is unknown here")
        self._stream.codec_context.thread_count = 1  # loader workers are processes enough
        self._stream.codec_context.options = {"max_pixels": str(MAX_FRAME_PIXELS)}
        # AVI knows the order of frames only: presentation times are guesses, wrong for B-frames, and frames are counted instead
        self._counted = self.kind == "avi"

    def _stamp(self, item: Packet | VideoFrame) -> int | None:
        """When it is shown, in ticks."""
        return item.dts if self._counted or item.pts is None else item.pts

    def _list_frames(self) -> None:
        """When each frame is shown, and which are key frames. (Packets come in the order of decoding.)"""
        import av

        stamps: list[int] = []
        keys: list[tuple[int, int]] = []  # presentation and decoding time of each key frame
        try:
            for packet in self._container.demux(self._stream):
                stamp = self._stamp(packet)
                if stamp is None or packet.size <= (1 if self._counted else 0):  # AVI has a byte where a frame was dropped
                    continue
                if packet.is_keyframe:
                    keys.append((stamp, stamp if packet.dts is None else packet.dts))
                if not packet.is_discard:  # an edit list shows only a part of a file
                    stamps.append(stamp)
        except av.FFmpegError:
            pass  # what came before is there
        if not stamps:
            raise DataError("the video has no frames")
        self._stamps = np.unique(np.array(stamps, np.int64))
        if self._counted and self._stream.codec_context.has_b_frames:
            keys = keys[:1]  # counted from a later key frame, the B-frames before it would be missing
        self._keys = sorted(keys)
        key_stamps = np.array([stamp for stamp, _ in self._keys], np.int64)
        self._key_indexes = np.searchsorted(self._stamps, key_stamps)  # of the first frame at or after it
        self.time_base = self._stream.time_base or Fraction(1, 1000)
        self.tick = float(self.time_base)
        self.times = (self._stamps - self._stamps[0]) * self.tick
        rate = self._stream.average_rate or Fraction(25)
        self.fps = (self.num_frames - 1) / self.times[-1] if self.num_frames > 1 else float(rate)

    def _stored_size(self) -> tuple[int, int]:
        width, height = self._stream.codec_context.width, self._stream.codec_context.height
        if width * height > MAX_FRAME_PIXELS:
            raise DataError(f"{width} x {height} pixels a frame: more than the limit of {MAX_FRAME_PIXELS:,}")
        return width, height

    def _first_frame_facts(self) -> None:
        """Size and rotation stand in the stream for some formats, and on decoded frames for all."""
        for _, frame, _ in self._read_run(0 if len(self._keys) else -1, [int(self._key_indexes[0]) if len(self._keys) else 0]):
            self.rotation = frame.rotation % 360
            self.size = (frame.height, frame.width) if self.rotation in (90, 270) else (frame.width, frame.height)

    def _read_run(self, key: int, wanted: list[int]) -> Iterator[tuple[int, VideoFrame, bool]]:
        """(index, frame, whether it is that frame itself) of each wanted one, decoded from one key frame on."""
        before: VideoFrame | None = None
        place = 0
        first = int(self._key_indexes[key]) if key >= 0 else 0
        for count, frame in enumerate(self._frames_from(key)):
            stamp = self._stamp(frame)
            index = first + count if self._counted or stamp is None else int(np.searchsorted(self._stamps, stamp, side="right")) - 1
            while place < len(wanted) and wanted[place] < index:
                yield wanted[place], frame if before is None else before, False
                place += 1
            if place < len(wanted) and wanted[place] == index:
                yield index, frame, True
                place += 1
            if place == len(wanted):
                return
            before = frame
        if before is None:
            raise DataError("no frame of the clip can be decoded: the video is damaged, or its codec is unknown here")
        for index in wanted[place:]:
            yield index, before, False

    def _frames_from(self, key: int) -> Iterator[VideoFrame]:
        """Frames in the order of their times, from a key frame (-1: from the start) to the end."""
        import av

        skipping = self._seek(key)
        for packet in self._container.demux(self._stream):
            if skipping and not (packet.is_keyframe and self._stamp(packet) == self._keys[key][0]):
                continue
            skipping = False
            try:
                yield from packet.decode()
            except av.FFmpegError:
                continue  # a damaged packet: frames that come after it may still be whole, and those that are missing are counted

    def _seek(self, key: int) -> bool:
        """Go to a key frame, or to some packet before it; returns whether packets are to be passed over until it comes."""
        import av

        if key >= 0:
            stamp, decoding_stamp = self._keys[key]
            offset = stamp if self.kind == "matroska" else decoding_stamp  # what each format's index lists
            try:
                self._container.seek(offset, stream=self._stream, backward=True)
                first = next(self._container.demux(self._stream))
                landed = self._stamp(first)
                if landed is not None and landed <= stamp and first.is_keyframe:
                    self._container.seek(offset, stream=self._stream, backward=True)
                    return True
            except (av.FFmpegError, StopIteration):
                pass
        self.close()
        self._open()
        return key >= 0

    def _picture(self, frame: VideoFrame, size: tuple[int, int]) -> np.ndarray:
        import av

        width, height = size[::-1] if self.rotation in (90, 270) else size
        try:
            # one reformatter for all frames: each frame's own would work out its filters anew
            picture = self._reformatter.reformat(frame, width=width, height=height, format="rgb24", threads=1).to_ndarray()
        except (av.FFmpegError, ValueError) as error:
            raise DataError(f"frames of type {frame.format.name} can't become RGB: {_reason(error)}") from None
        return np.rot90(picture, self.rotation // 90) if self.rotation % 90 == 0 else picture


class _Reader:
    """What PyAV reads from: bytes that are there already, which it must not copy."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._position = data, 0

    def read(self, size: int) -> bytes:
        piece = bytes(self._data[self._position : self._position + size])
        self._position += len(piece)
        return piece

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = max(0, offset + (0, self._position, len(self._data))[whence])
        return self._position

    def tell(self) -> int:
        return self._position


def _reason(error: Any) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
