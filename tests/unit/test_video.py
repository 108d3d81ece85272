"""Videos: without a display, and of environments whose images change or fail: one line, and no part of a file."""

import re
import resource
from resource import RLIMIT_FSIZE

import numpy as np
import pytest
from envs import Env

from a3c_mp.errors import ConfigError
from a3c_mp.run.export import open_rendered, play_rendered, record_episode
from a3c_mp.wrappers import make_env

pytest.importorskip("imageio_ffmpeg")


class Rendered(Env):
    """Its images are `images`, one after the other, or else what they raise."""

    images = (np.zeros((320, 320, 3), np.uint8),)
    number = -1

    def __init__(self, render_mode="rgb_array"):
        self.render_mode = render_mode

    def render(self):
        self.number = min(self.number + 1, len(self.images) - 1)
        if isinstance(image := self.images[self.number], Exception):
            raise image
        return image


def picture(*shape):
    return np.zeros(shape, np.uint8)


def stay(obs, starts, mask):
    assert isinstance(obs, np.ndarray)
    return np.zeros(len(obs), np.int64)


FAILING = {
    "larger": (picture(400, 320, 3), "change their size, from (320, 320, 3) to (400, 320, 3) after 1 steps; have rend"),
    "smaller": (
        picture(320, 318, 3),
        "change their size, from (320, 320, 3) to (320, 318, 3) after 1 steps; have rend",
    ),
    "other channels": (picture(320, 320, 4), "change their size, from (320, 320, 3) to (320, 320, 4) after 1 steps;"),
    "none": (None, "cannot be rendered: TypeError: render() returned a NoneType, must be an image [H, W, 3]"),
    "empty": (picture(0, 0, 3), "cannot be rendered: TypeError: render() returned a ndarray (0, 0, 3) uint8, must be"),
    "floats": (picture(320, 320, 3) + 1.5, "TypeError: render() returned a ndarray (320, 320, 3) float64, must be"),
    "error": (OSError("no window"), "cannot be rendered: OSError: no window (test_video.py:"),
}


@pytest.mark.parametrize("before", [None, b"an earlier video"], ids=["new", "earlier"])
@pytest.mark.parametrize(("image", "message"), FAILING.values(), ids=FAILING)
def test_images_that_cannot_be_recorded_leave_one_line_and_no_file(image, message, before, register, tmp_path):
    env_id = register(entry_point=Rendered, changes={"images": (*Rendered.images, image)})
    path = tmp_path / "game.mp4"
    if before is not None:
        path.write_bytes(before)
    with pytest.raises(ConfigError, match=re.escape(f"video={path}: ") + ".*" + re.escape(message)) as error:
        record_episode(stay, env_id, make_env(env_id), path, seed=0, max_steps=5)
    assert "\n" not in str(error.value)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == ([] if before is None else [before])


def test_an_error_in_the_middle_of_a_video_leaves_no_file(register, tmp_path):
    env_id = register(entry_point=Rendered, changes={"step": lambda self, action: 1 / 0})
    with pytest.raises(ZeroDivisionError):
        record_episode(stay, env_id, make_env(env_id), tmp_path / "game.mp4", seed=0, max_steps=5)
    assert list(tmp_path.iterdir()) == []


def test_a_video_that_cannot_be_written_to_the_end_leaves_no_file(register, tmp_path):
    """ffmpeg is ended by its first byte beyond the limit, when all images have been sent to it."""
    noise = [np.random.default_rng(i).integers(0, 255, (320, 320, 3), np.uint8) for i in range(6)]
    env_id, limits = register(entry_point=Rendered, changes={"images": noise}), resource.getrlimit(RLIMIT_FSIZE)
    resource.setrlimit(RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match="not all images are in the file"):
            record_episode(stay, env_id, make_env(env_id), tmp_path / "game.mp4", seed=0, max_steps=5)
    finally:
        resource.setrlimit(RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_an_environment_that_cannot_be_rendered_says_why_and_is_closed(register, tmp_path):
    closed = []
    changes = {"images": (OSError("no window"),), "close": lambda self: closed.append(1)}
    env_id = register(entry_point=Rendered, changes=changes)
    with pytest.raises(ConfigError, match=r"OSError: no window \(test_video.py:\d+\).*leave --video out"):
        open_rendered(env_id, tmp_path / "game.mp4")
    assert closed == [1]


def test_a_video_that_could_not_be_written_is_refused_before_the_games(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setenv("IMAGEIO_FFMPEG_EXE", "/no/ffmpeg")
        with pytest.raises(ConfigError, match="there is no ffmpeg"):
            open_rendered("CartPole-v1", tmp_path / "game.mp4")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ConfigError, match="its folder cannot be written"):
        open_rendered("CartPole-v1", tmp_path / "game.mp4")


def test_a_game_in_a_window(register, monkeypatch):
    monkeypatch.setenv("DISPLAY", ":0")
    env = open_rendered(register(entry_point=Rendered, changes={"obs": [0.0, 0.5, 1.0]}), None)
    assert env.unwrapped.render_mode == "human"
    assert play_rendered(stay, env, seed=0, max_steps=5).length == 5


def test_mujoco_renders_without_a_display(monkeypatch, tmp_path):
    pytest.importorskip("mujoco")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL", "PYOPENGL_PLATFORM"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    env = open_rendered("InvertedPendulum-v5", tmp_path / "game.mp4")
    game = record_episode(
        lambda *_: np.zeros((1, 1), np.float32), "InvertedPendulum-v5", env, tmp_path / "game.mp4", seed=0, max_steps=5
    )
    assert game.length == 5
    assert [path.name for path in tmp_path.iterdir()] == ["game.mp4"]
    assert (tmp_path / "game.mp4").stat().st_size > 500
