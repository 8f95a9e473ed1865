"""Audio: whatever comes in leaves as finite mono float32 at the wanted rate, or is refused by name."""

from __future__ import annotations

import errno
import io
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import soundfile

from wpk.ir.errors import AudioError, StoreError
from wpk.runtime.audio import load_audio, read_audio, write_wav


def tone(rate: int, seconds: float = 0.5, hertz: float = 440.0) -> npt.NDArray[np.float32]:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(rate * seconds)) / rate)).astype(np.float32)


@pytest.mark.parametrize(
    ("subtype", "step"),
    [("PCM_U8", 2**-7), ("PCM_16", 2**-15), ("PCM_24", 2**-23), ("PCM_32", 2**-24), ("FLOAT", 0), ("DOUBLE", 0)],
)
def test_every_sample_format_comes_as_float32(tmp_path: Path, subtype: str, step: float) -> None:
    wanted = tone(16_000)
    soundfile.write(tmp_path / "a.wav", wanted, 16_000, subtype=subtype)
    audio, info = load_audio(tmp_path / "a.wav", 16_000)
    assert audio.dtype == np.float32 and audio.shape == wanted.shape and audio.flags.c_contiguous
    assert np.abs(audio - wanted).max() <= 1.01 * step
    assert (info.channels, info.sample_rate, info.subtype, info.frames) == (1, 16_000, subtype, wanted.size)
    assert info.converted == () and info.seconds == 0.5


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_other_rates_are_resampled_and_said(tmp_path: Path, rate: int) -> None:
    soundfile.write(tmp_path / "a.wav", tone(rate, 1.0), rate, subtype="FLOAT")
    audio, info = load_audio(tmp_path / "a.wav", 16_000)
    assert audio.shape == (16_000,)
    middle = slice(1_000, 15_000)
    assert np.abs(audio[middle] - tone(16_000, 1.0)[middle]).max() < 2e-3  # the closed form of the same tone
    assert info.converted == (f"{rate} Hz resampled to 16000 Hz",)


def test_what_lies_above_the_new_nyquist_rate_is_removed(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", tone(44_100, 1.0, 15_000.0), 44_100, subtype="FLOAT")
    assert np.abs(read_audio(tmp_path / "a.wav", 16_000)[1_000:-1_000]).max() < 1e-3


def test_channels_are_averaged_and_said(tmp_path: Path) -> None:
    left, right = tone(16_000), -tone(16_000) * np.float32(0.5)
    soundfile.write(tmp_path / "a.wav", np.stack([left, right], 1), 16_000, subtype="FLOAT")
    audio, info = load_audio(tmp_path / "a.wav", 16_000)
    np.testing.assert_allclose(audio, (left + right) / 2, atol=1e-7)
    assert info.channels == 2 and info.converted == ("2 channels averaged to 1",)


@pytest.mark.parametrize("suffix", ["flac", "ogg", "aiff", "mp3", "w64"])
def test_formats_beside_wav_are_read(tmp_path: Path, suffix: str) -> None:
    soundfile.write(tmp_path / f"a.{suffix}", tone(16_000, 1.0), 16_000)
    audio = read_audio(tmp_path / f"a.{suffix}", 16_000)
    assert abs(audio.size - 16_000) < 3_000 and 0.2 < np.abs(audio).max() < 0.7


# --- refused


def refused(path: Path, says: str) -> AudioError:
    with pytest.raises(AudioError, match=says) as caught:
        read_audio(path, 16_000)
    assert str(path) in caught.value.message
    assert caught.value.wanted and caught.value.found
    return caught.value


def test_absent_folder_empty_and_not_audio_are_told_apart(tmp_path: Path) -> None:
    refused(tmp_path / "absent.wav", "does not exist")
    refused(tmp_path, "is no file")
    (tmp_path / "empty.wav").touch()
    refused(tmp_path / "empty.wav", "is empty")
    for name, data in {"text.wav": b"hello " * 100, "riff.wav": b"RIFF\0\0\0\0WAVE", "text.raw": b"x" * 64}.items():
        (tmp_path / name).write_bytes(data)
        refused(tmp_path / name, "no audio that can be read")


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "FLOAT"])
@pytest.mark.parametrize("suffix", ["wav", "aiff"])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_file_shorter_than_its_header_says_is_refused(
    tmp_path: Path, subtype: str, suffix: str, channels: int
) -> None:
    path = tmp_path / f"a.{suffix}"
    if suffix == "aiff" and subtype == "PCM_U8":
        subtype = "PCM_S8"
    soundfile.write(path, np.stack([tone(16_000)] * channels, 1), 16_000, subtype=subtype)
    read_audio(path, 16_000)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert "8000 frames" in str(refused(path, "is cut short").wanted)


def test_a_truncated_flac_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.flac"
    rng = np.random.default_rng(0)
    soundfile.write(path, rng.uniform(-0.5, 0.5, 16_000), 16_000)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    refused(path, "is cut short|no audio that can be read")


def test_every_truncation_of_a_wav_is_refused(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", tone(16_000, 0.01), 16_000)
    whole = (tmp_path / "a.wav").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "cut.wav").write_bytes(whole[:size])
        with pytest.raises(AudioError):
            read_audio(tmp_path / "cut.wav", 16_000)


def test_a_length_left_open_by_a_pipe_is_taken_from_the_file(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", tone(16_000), 16_000)
    data = bytearray((tmp_path / "a.wav").read_bytes())
    data[4:8] = data[40:44] = struct.pack("<I", 0xFFFFFFFF)
    (tmp_path / "piped.wav").write_bytes(data)
    np.testing.assert_array_equal(read_audio(tmp_path / "piped.wav", 16_000), read_audio(tmp_path / "a.wav", 16_000))


def test_chunks_before_the_samples_are_stepped_over(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", tone(16_000), 16_000)
    data = (tmp_path / "a.wav").read_bytes()
    odd = b"note" + struct.pack("<I", 3) + b"abc\0"
    (tmp_path / "b.wav").write_bytes(data[:4] + struct.pack("<I", len(data) + 4) + data[8:36] + odd + data[36:])
    np.testing.assert_array_equal(read_audio(tmp_path / "b.wav", 16_000), read_audio(tmp_path / "a.wav", 16_000))
    (tmp_path / "b.wav").write_bytes((tmp_path / "b.wav").read_bytes()[:-100])
    refused(tmp_path / "b.wav", "is cut short")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_with_their_place(tmp_path: Path, value: float) -> None:
    audio = tone(16_000)
    audio[[17, 99]] = value
    soundfile.write(tmp_path / "a.wav", audio, 16_000, subtype="FLOAT")
    assert "2 frames" in str(refused(tmp_path / "a.wav", "not finite").found)
    assert "first at 17" in str(refused(tmp_path / "a.wav", "not finite").found)


def test_no_frames_is_refused(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros(0), 16_000)
    refused(tmp_path / "a.wav", "holds no audio")


@pytest.mark.parametrize("rate", [0, -1, 10**9])
def test_a_senseless_rate_is_refused(tmp_path: Path, rate: int) -> None:
    soundfile.write(tmp_path / "a.wav", tone(16_000), 16_000)
    with pytest.raises(AudioError, match="sample rate"):
        read_audio(tmp_path / "a.wav", rate)


# --- writing


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    write_wav(tmp_path / "deep" / "a.wav", tone(24_000), 24_000)
    audio, info = load_audio(tmp_path / "deep" / "a.wav", 24_000)
    assert np.abs(audio - tone(24_000)).max() <= 2**-15
    assert info.subtype == "PCM_16" and [path.name for path in (tmp_path / "deep").iterdir()] == ["a.wav"]


def test_loud_audio_is_clipped_not_wrapped(tmp_path: Path) -> None:
    write_wav(tmp_path / "a.wav", np.array([2.0, -2.0, 0.0], np.float32), 16_000)
    np.testing.assert_allclose(read_audio(tmp_path / "a.wav", 16_000), [1.0, -1.0, 0.0], atol=2**-14)


def test_a_refused_write_keeps_the_old_file(tmp_path: Path) -> None:
    write_wav(tmp_path / "a.wav", tone(16_000), 16_000)
    before = (tmp_path / "a.wav").read_bytes()
    with pytest.raises(AudioError, match="not finite"):
        write_wav(tmp_path / "a.wav", np.array([np.nan], np.float32), 16_000)
    with pytest.raises(AudioError, match=r"audio for"):
        write_wav(tmp_path / "a.wav", np.zeros((1, 2, 3), np.float32), 16_000)
    with pytest.raises(AudioError, match=r"audio for"):
        write_wav(tmp_path / "a.wav", tone(16_000), 16_000, subtype="VORBIS")
    assert (tmp_path / "a.wav").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("container", "subtype"),
    [("RF64", "PCM_16"), ("RF64", "FLOAT"), ("W64", "PCM_16"), ("W64", "IMA_ADPCM"), ("WAV", "IMA_ADPCM"),
     ("WAV", "MS_ADPCM"), ("AU", "PCM_16")],
)  # fmt: skip
def test_formats_whose_frames_libsndfile_clips_are_not_read_cut_short(
    tmp_path: Path, container: str, subtype: str
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    soundfile.write(whole, tone(16_000), 16_000, format=container, subtype=subtype)
    assert read_audio(whole, 16_000).size >= 8_000
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    refused(cut, "is cut short")


def test_what_soundfile_cannot_read_is_refused_whatever_it_raises(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", tone(8_000), 8_000, subtype="GSM610")
    refused(tmp_path / "a.wav", "is no audio that can be read")


def test_a_full_disk_is_one_store_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.FileIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("builtins.open", lambda path, mode: Full(path, mode))
    with pytest.raises(StoreError, match="No space left"):
        write_wav(tmp_path / "a.wav", tone(16_000), 16_000)
    assert list(tmp_path.iterdir()) == []
