"""Audio files in and out: anything libsndfile reads becomes mono float32 at the rate that a model's clock wants."""

from __future__ import annotations

import io
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from wpk.ir.errors import AudioError
from wpk.registry.storage import replace_file

Samples = npt.NDArray[np.float32]

_MIN_RATE, _MAX_RATE = 1_000, 768_000  # hertz; outside of it a header is nonsense, and so is resampling
# What programs that write to a pipe put where the length should be: "unknown, up to the end".
_UNKNOWN_LENGTHS = frozenset({0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF000, 0x7FFFFFFE, 0x80000000})

_W64_RIFF = b"riff" + bytes.fromhex("2e91cf11a5d628db04c10000")


@dataclass(frozen=True)
class AudioInfo:
    """A file as it was, and what was done to it.

    sample_rate in hertz, frames per channel, subtype as libsndfile names it (PCM_16, FLOAT, ...). converted: each
    step from the file to what was returned, in order; empty where nothing but the sample format changed.
    """

    path: Path
    channels: int
    sample_rate: int
    subtype: str
    frames: int
    converted: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return self.frames / self.sample_rate


def read_audio(path: str | os.PathLike[str], sample_rate: int) -> Samples:
    """A recording as float32 [samples], mono, at `sample_rate` hertz, full scale at 1. Raises AudioError."""
    return load_audio(path, sample_rate)[0]


def load_audio(path: str | os.PathLike[str], sample_rate: int) -> tuple[Samples, AudioInfo]:
    """Like read_audio, with what the file was and what was converted.

    Channels are averaged; other rates are resampled (soxr, HQ). Integers of any width are scaled to [-1, 1); floats
    are taken as they are. Raises AudioError for a file that is absent, a folder, empty, no audio, cut short, without
    frames, or with values that are not finite.
    """
    path = Path(path)
    if not _MIN_RATE <= sample_rate <= _MAX_RATE:
        raise AudioError("a sample rate cannot be used", wanted=f"{_MIN_RATE} to {_MAX_RATE} Hz", found=sample_rate)
    _require_file(path)
    try:
        with soundfile.SoundFile(os.fspath(path)) as file:
            info = AudioInfo(path, file.channels, file.samplerate, file.subtype, file.frames)
            promised = _promised_frames(path)
            wanted = file.frames if promised is None else promised
            _require_all_bytes(path, counted=promised is not None)
            audio = file.read(dtype="float32", always_2d=True)
    except (AudioError, MemoryError):
        raise
    except Exception as error:  # soundfile raises many: TypeError for headerless raw, ValueError for GSM 6.10, ...
        raise AudioError(
            f"{path} is no audio that can be read",
            wanted="WAV, FLAC, OGG, MP3 or another format of libsndfile",
            found=str(getattr(error, "error_string", error)),
            hint="convert it to WAV of PCM or floats, or copy it again if it is damaged",
        ) from error
    if audio.shape[0] < wanted:
        raise AudioError(
            f"{path} is cut short",
            wanted=f"{wanted} frames, as its header says",
            found=f"{audio.shape[0]} frames",
            hint="copy or record it again",
        )
    if audio.shape[0] == 0:
        raise AudioError(f"{path} holds no audio", wanted="at least one frame", found="0 frames")
    if not _MIN_RATE <= info.sample_rate <= _MAX_RATE:
        raise AudioError(
            f"{path} has an unusable rate", wanted=f"{_MIN_RATE} to {_MAX_RATE} Hz", found=info.sample_rate
        )
    _require_finite(path, audio)
    converted = []
    if info.channels > 1:
        audio = audio.mean(axis=1, dtype=np.float64).astype(np.float32)
        converted.append(f"{info.channels} channels averaged to 1")
    else:
        audio = audio[:, 0]
    if info.sample_rate != sample_rate:
        audio = soxr.resample(audio, info.sample_rate, sample_rate, quality="HQ")
        converted.append(f"{info.sample_rate} Hz resampled to {sample_rate} Hz")
        if audio.shape[0] == 0:
            raise AudioError(
                f"{path} is too short", wanted=f"at least one sample at {sample_rate} Hz", found=info.frames
            )
    result: Samples = np.ascontiguousarray(audio, dtype=np.float32)
    return result, AudioInfo(path, info.channels, info.sample_rate, info.subtype, info.frames, tuple(converted))


def write_wav(path: str | os.PathLike[str], audio: npt.ArrayLike, sample_rate: int, *, subtype: str = "PCM_16") -> None:
    """Write [samples] or [samples, channels] in [-1, 1] as WAV; an existing file is replaced in one step.

    Integer subtypes clip what is louder. Raises AudioError for values that are not finite or a subtype that WAV
    lacks, StoreError where the file cannot be written.
    """
    path = Path(path)
    values = np.asarray(audio, dtype=np.float32)
    if values.ndim not in (1, 2):
        raise AudioError(f"audio for {path}", wanted="[samples] or [samples, channels]", found=list(values.shape))
    if not soundfile.check_format("WAV", subtype):
        raise AudioError(f"audio for {path}", wanted=", ".join(soundfile.available_subtypes("WAV")), found=subtype)
    _require_finite(path, values.reshape(values.shape[0], -1))

    encoded = io.BytesIO()  # in memory, so that a full disk is met by a plain write, which says so
    soundfile.write(encoded, values, sample_rate, format="WAV", subtype=subtype)
    replace_file(path, lambda stream: stream.write(encoded.getbuffer()))


def _require_file(path: Path) -> None:
    if not path.exists():
        raise AudioError(f"{path} does not exist", wanted="an audio file", found="nothing")
    if not path.is_file():
        raise AudioError(
            f"{path} is no file", wanted="an audio file", found="a folder" if path.is_dir() else "a device"
        )
    try:
        with open(path, "rb") as stream:
            first = stream.read(1)
    except OSError as error:
        raise AudioError(f"{path} cannot be read", wanted="an audio file", found=error.strerror) from error
    if not first:
        raise AudioError(f"{path} is empty", wanted="an audio file", found="0 bytes")


def _require_finite(path: Path, audio: Samples) -> None:
    """audio: [frames, channels]."""
    bad = ~np.isfinite(audio).all(axis=1)
    if bad.any():
        first = int(np.argmax(bad))
        raise AudioError(
            f"{path} holds values that are not finite",
            wanted="finite numbers",
            found=f"{int(bad.sum())} frames with NaN or infinity, the first at {first}",
        )


def _promised_frames(path: Path) -> int | None:
    """The frames that a WAV or AIFF header promises; None where it does not say, or for other formats.

    libsndfile quietly shortens a truncated file to what is there, so the header is read here once more.
    """
    with open(path, "rb") as stream:
        magic = stream.read(12)
        if magic[:4] == b"RIFF" and magic[8:] == b"WAVE":
            return _chunk_frames(stream, "<", b"data")
        if magic[:4] == b"FORM" and magic[8:] in (b"AIFF", b"AIFC"):
            return _chunk_frames(stream, ">", b"SSND")
    return None


def _require_all_bytes(path: Path, counted: bool) -> None:
    """Refuse a file that ends before its samples do. counted: its frames are compared instead.

    For RF64, W64, AU and the WAV and AIFF codecs whose blocks are not frames. In other formats libsndfile either
    refuses a truncated file or cannot tell, and neither can this.
    """
    if counted or (found := _sample_bytes(path)) is None:
        return
    promised, present = found
    if present < promised:
        raise AudioError(
            f"{path} is cut short",
            wanted=f"{promised} bytes of samples, as its header says",
            found=f"{present} bytes",
            hint="copy or record it again",
        )


def _sample_bytes(path: Path) -> tuple[int, int] | None:
    """The bytes of samples that a header promises, and those that are there; None where it does not say."""
    total = path.stat().st_size
    with open(path, "rb") as stream:
        magic = stream.read(16)
        if magic == _W64_RIFF:
            stream.seek(40)  # GUID, size, GUID
            while len(head := stream.read(24)) == 24:
                size = int(struct.unpack_from("<Q", head, 16)[0]) - 24  # chunk sizes count their heads
                if head[:4] == b"data":
                    return (size, total - stream.tell()) if 0 <= size < 1 << 62 else None
                if size < 0 or stream.tell() + size > total:
                    return None
                stream.seek(size + -size % 8, os.SEEK_CUR)
            return None
        if magic[:4] == b".snd":
            start, size = struct.unpack_from(">II", magic.ljust(16, b"\0"), 4)
            return None if size in _UNKNOWN_LENGTHS else (size, max(total - start, 0))
        if magic[:4] not in (b"RIFF", b"RF64", b"FORM"):
            return None
        order, long = ">" if magic[:4] == b"FORM" else "<", 0
        stream.seek(12)
        while len(head := stream.read(8)) == 8:
            tag, size = struct.unpack(f"{order}4sI", head)
            if tag in (b"data", b"SSND"):
                size = long if magic[:4] == b"RF64" and size == 0xFFFFFFFF else size
                unknown = size in _UNKNOWN_LENGTHS or not 0 < size < 1 << 62
                return None if unknown else (size, total - stream.tell())
            body = stream.read(16) if tag == b"ds64" and size >= 16 else b""
            if body:
                long = struct.unpack_from("<Q", body.ljust(16, b"\0"), 8)[0]
            stream.seek(size - len(body) + size % 2, os.SEEK_CUR)
    return None


def _chunk_frames(stream: IO[bytes], order: str, wanted: bytes) -> int | None:
    """Walk the chunks of a RIFF or IFF file to the one with the samples; its size tells the frames."""
    block = 0  # bytes per frame
    while len(head := stream.read(8)) == 8:
        tag, size = struct.unpack(f"{order}4sI", head)
        if tag == wanted:
            if size in _UNKNOWN_LENGTHS or not block:
                return None
            return int(size - (8 if tag == b"SSND" else 0)) // block  # SSND starts with an offset and a block size
        body = stream.read(min(size, 64)) if tag in (b"fmt ", b"COMM") else b""
        if tag == b"fmt " and len(body) >= 16:
            code, block = struct.unpack_from("<H", body)[0], struct.unpack_from("<H", body, 12)[0]
            if code == 0xFFFE and len(body) >= 26:  # WAVE_FORMAT_EXTENSIBLE keeps the real code in its GUID
                code = struct.unpack_from("<H", body, 24)[0]
            if code not in (1, 3, 6, 7):  # PCM, float, A-law, mu-law; in the others a block is not a frame
                block = 0
        elif tag == b"COMM" and len(body) >= 8:
            channels, _, bits = struct.unpack_from(">hIh", body)
            plain = size == 18 or body[18:22] in (b"NONE", b"sowt", b"fl32", b"FL32", b"fl64", b"FL64", b"twos")
            block = channels * ((bits + 7) // 8) if plain else 0
        stream.seek(size - len(body) + size % 2, os.SEEK_CUR)  # chunks are padded to even length
    return None
