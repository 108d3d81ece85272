"""What `play.py` writes of a trained policy: an ONNX model, its weights as safetensors, a video of a game."""

import importlib.util
import json
import logging
import math
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from gymnasium.spaces.utils import flatdim
from torch import Tensor, nn

from a3c_mp.data.episodes import Episode
from a3c_mp.errors import ConfigError, describe, one_line
from a3c_mp.nets.actor_critic import ActorCritic
from a3c_mp.nets.distributions import num_outputs, num_params
from a3c_mp.run.evaluate import Policy
from a3c_mp.run.run_dir import write_atomically, write_together
from a3c_mp.run.script import raise_received
from a3c_mp.seeds import seed_global_generators
from a3c_mp.wrappers import FRAME_SKIP, RECORDER, ActionScaling, assume_identity, close, is_atari, make_env, mask_in
from a3c_mp.wrappers.actions import PlainActions, num_choices
from a3c_mp.wrappers.atari import screen_settings
from a3c_mp.wrappers.observations import ImageAndVector, Part, Prepared, leaves


class ExportedPolicy(nn.Module):
    """A policy as one function: (observations[, LSTM state]) -> (action, output of the net[, next state])."""

    def __init__(self, net: nn.Module, space: gymnasium.Space):
        super().__init__()
        self.net, self.scaling = net, None
        if isinstance(space, Box):
            s, dtype = ActionScaling(space), torch.from_numpy(space.low).dtype
            self.scaling = [torch.as_tensor(numbers, dtype=dtype) for numbers in (s.center, s.half, s.low, s.high)]

    def forward(self, obs: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        output, *others = self.net(obs, *state)
        action = self.net.distribution(output).mode() if isinstance(self.net, ActorCritic) else output
        if self.scaling is not None:
            center, half, low, high = self.scaling
            action = (center + half * action).clamp(low, high)
        elif not isinstance(self.net, ActorCritic):
            action = output.argmax(dim=-1)
        return action, output, *(others[1:] if state else ())


def usage_of(env_id: str, net: nn.Module, spaces: tuple[gymnasium.Space, gymnasium.Space]) -> dict[str, Any]:
    """How a program uses an exported policy, for the metadata of its file; docs/export.md has a loop for each kind.

    Shapes are without the batch's axis. `layout` and `parts` are of observations that are made of parts, `screen` is of
    Atari; `start` is what to add to choices, which begin at 0 here, for the environment's own.
    """
    (obs_space, actions), is_policy = spaces, isinstance(net, ActorCritic)
    obs, action = array_of(obs_space.dtype, obs_space.shape), array_of(np.int64, actions.shape)
    outputs_of_q = actions.shape if isinstance(actions, Box) else (num_outputs(actions),)
    output = array_of(np.float32, (num_params(actions),) if is_policy else outputs_of_q)
    obs["normalization"] = "in the file"
    if isinstance(actions, Box):
        action = array_of(actions.dtype, actions.shape)
        action["meaning"] = "center + half * (means of output, flat), clipped to low and high, in this shape"
        for name in ("center", "half", "low", "high"):  # JSON has no infinity
            numbers = getattr(ActionScaling(actions), name).ravel().tolist()
            action[name] = [number if math.isfinite(number) else None for number in numbers]
        output["meaning"] = "means, then logs of deviations" if is_policy else "means, from -1 to 1"
        output |= {"mean_limit": net.head.mean_limit} if isinstance(net, ActorCritic) else {}
    else:
        action["meaning"] = "the place of the largest output, of each part"
        output["meaning"] = "logits of each part: softmax gives the probabilities" if is_policy else "Q values"
        output["parts"] = num_choices(actions).tolist()
    with ExitStack() as stack:
        stack.callback(close, env := make_env(env_id))
        structure = (inner := env.env if isinstance(env, Prepared) else env).observation_space
        if isinstance(inner, PlainActions) and not isinstance(actions, Box):
            starts = [0 * num_choices(part) + np.ravel(getattr(part, "start", 0)) for _, part, _ in leaves(inner.own)]
            action["start"] = np.concatenate(starts).reshape(actions.shape or ()).tolist()
        if isinstance(env, Prepared) and env.layout:
            image = obs_space.image_shape if isinstance(obs_space, ImageAndVector) else (0,)
            obs |= {"layout": env.layout, "parts": list(parts_of(env.parts, math.prod(image)))}
        if is_atari(env_id):
            obs["screen"] = screen_settings(env_id, env)
    inputs, outputs = {"obs": obs}, {"action": action, "output": output}
    if lstm_size := getattr(net, "lstm_size", 0):
        outputs["next_state"] = array_of(np.float32, (lstm_size,))
        inputs["state"] = outputs["next_state"] | {"meaning": "zeros at the start of an episode, then next_state"}
    return {"obs_space": str(structure), "action_space": str(actions), "inputs": inputs, "outputs": outputs}


def array_of(dtype: Any, shape: tuple[int, ...] | None) -> dict[str, Any]:
    return {"dtype": str(np.dtype(dtype)), "shape": shape or ()}


def parts_of(parts: Iterable[Part], start: int = 0) -> Iterator[dict[str, Any]]:
    """What the numbers of an observation are, from `start` on: each part's name, place, shape; of choices, how many."""
    for part in parts:
        space, end = part.space, start + flatdim(part.space)
        found = {"name": part.path, "first": start, "last": end - 1, **array_of(space.dtype, space.shape)}
        if isinstance(space, Discrete | MultiDiscrete):
            sizes = num_choices(space)
            found |= {"one_hot": sizes.tolist(), "start": (0 * sizes + np.ravel(space.start)).tolist()}
        yield found
        start = end


def write_onnx(
    path: Path, net: nn.Module, spaces: tuple[gymnasium.Space, gymnasium.Space], description: Mapping[str, Any]
) -> None:
    """Write a policy as an ONNX model with batches of any size; docs/export.md says what it takes and returns.

    Raises ConfigError if a package is missing, OSError if the file cannot be written.
    """
    if importlib.util.find_spec("onnxscript") is None:
        raise ConfigError("export", path, "onnx and onnxscript are not installed", "pip install onnxscript")
    obs_space, action_space = spaces
    lstm_size = getattr(net, "lstm_size", 0)
    # Two observations: with a batch of 1 the exporter would drop the axis.
    example = torch.from_numpy(obs_space.sample())[None].expand(2, *obs_space.shape or ()).contiguous()
    inputs: tuple[Tensor, ...] = (example, torch.zeros(2, lstm_size)) if lstm_size else (example,)
    batch = {0: torch.export.Dim("batch")}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = torch.onnx.export(
                ExportedPolicy(net, action_space).eval(),
                inputs,
                dynamo=True,
                verbose=False,
                dynamic_shapes=(batch, (batch,)) if lstm_size else (batch,),
                input_names=["obs", "state"][: len(inputs)],
                output_names=["action", "output", "next_state"][: 1 + len(inputs)],
            )
        except Exception as error:  # a net of the user's own
            why = f"this net cannot be exported as ONNX ({one_line(error.__cause__ or error)[:300]})"
            raise ConfigError("export", path, why, "use a name that ends in .safetensors") from error
    assert program is not None
    program.model.metadata_props.update({name: json.dumps(value) for name, value in description.items()})
    write_together({path: lambda file: program.save(file.name, external_data=False)})


def write_safetensors(path: Path, net: nn.Module, description: Mapping[str, Any]) -> None:
    """Write the weights of a net, also of its normalization, and a description; raises as `write_onnx`."""
    if importlib.util.find_spec("safetensors") is None:
        raise ConfigError("export", path, "safetensors is not installed", "pip install safetensors")
    from safetensors.torch import save

    tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in net.state_dict().items()}
    write_atomically(path, save(tensors, {name: json.dumps(value) for name, value in description.items()}))


def open_rendered(env_id: str, video: Path | None) -> gymnasium.Env:
    """Make an environment that renders images for `video`, or into a window. Raises ConfigError if it cannot."""
    has_screen = bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    if video is None:
        if not has_screen:
            raise ConfigError("window", True, "this machine has no screen", "use --video game.mp4")
        os.environ.setdefault("SDL_AUDIODRIVER", "dummy")  # a machine without a sound card says so in many lines
    else:
        if missing := [name for name in ("imageio", "imageio_ffmpeg") if importlib.util.find_spec(name) is None]:
            why = f"{missing[0].replace('_', '-')} is not installed"
            raise ConfigError("video", video, why, "pip install imageio imageio-ffmpeg")
        if video.suffix != ".mp4" or video.is_dir() or not video.parent.is_dir():
            raise ConfigError("video", video, "it must be an .mp4 in a folder that is there", "for instance game.mp4")
        if not os.access(video.parent, os.W_OK):
            raise ConfigError("video", video, "its folder cannot be written", "choose another")
        from imageio_ffmpeg import get_ffmpeg_exe

        ffmpeg = None
        with suppress(RuntimeError):  # it found none
            ffmpeg = shutil.which(get_ffmpeg_exe())
        if ffmpeg is None:
            fix = "pip install imageio-ffmpeg, or correct IMAGEIO_FFMPEG_EXE"
            raise ConfigError("video", video, "there is no ffmpeg", fix)
        if not has_screen:
            os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame renders without a screen
            os.environ.setdefault("MUJOCO_GL", "egl")  # by itself MuJoCo takes GLFW, which needs a display
    assume_identity(RECORDER)
    try:
        with warnings.catch_warnings(), ExitStack() as stack:  # gymnasium's and GLFW's, of what the error says
            warnings.simplefilter("ignore")
            stack.callback(close, env := make_env(env_id, render_mode="human" if video is None else "rgb_array"))
            env.reset(seed=0)
            if video is not None:
                frame_of(env)
            stack.pop_all()
    except Exception as error:  # an environment of the user's own can raise anything
        flag, without = ("video", "leave --video out") if video else ("window", "use --video game.mp4")
        fix = f"let it take render_mode and give images (docs/environments.md), or {without}"
        if "mujoco" in sys.modules:
            fix = f"set MUJOCO_GL to a library that this machine has (egl, osmesa, glfw), or {without}"
        raise ConfigError(flag, video or True, f"{env_id} cannot be rendered: {describe(error)}", fix) from error
    return env


def play_rendered(
    policy: Policy, env: gymnasium.Env, *, seed: int, max_steps: int, after: Callable[[], None] = lambda: None
) -> Episode:
    """Play a game of at most `max_steps` in an environment of `open_rendered`; `after` is called after each step."""
    episode_return, length, done = 0.0, 0, False
    seed_global_generators(seed)
    obs, info = env.reset(seed=seed)
    after()
    while not done:
        mask = mask_in(info, env.action_space)
        action = policy(np.asarray(obs)[None], np.array([length == 0]), None if mask is None else mask[None])[0]
        obs, reward, terminated, truncated, info = env.step(action)
        episode_return, length = episode_return + np.asarray(reward).item(), length + 1
        after()
        raise_received()
        done = terminated or truncated or length >= max_steps
    return Episode(episode_return, length)


def record_episode(
    policy: Policy, env_id: str, env: gymnasium.Env, path: Path, *, seed: int, max_steps: int
) -> Episode:
    """`play_rendered` into an mp4 file at normal speed (of Atari: every 4th frame).

    Raises ConfigError if an image cannot be rendered or is of another size than the first, OSError if the file cannot
    be written. Nothing is left at `path` then, or what was there before.
    """
    import imageio.v2 as imageio
    from imageio_ffmpeg import count_frames_and_secs

    def append_frame() -> None:
        try:
            frame = frame_of(env)
        except Exception as error:
            raise ConfigError("video", path, f"{env_id} cannot be rendered: {describe(error)}") from error
        shapes.append(frame.shape)
        if frame.shape != shapes[0]:
            steps = len(shapes) - 1
            why = f"images of {env_id} change their size, from {shapes[0]} to {frame.shape} after {steps} steps"
            raise ConfigError("video", path, why, "have render() return images of one size")
        video.append_data(frame)

    fps = 60 // FRAME_SKIP if is_atari(env_id) else max(1, round(env.metadata.get("render_fps") or 30))
    shapes = list[Any]()
    unfinished = path.with_name(f".unfinished-{os.getpid()}.mp4")
    try:
        video: Any = imageio.get_writer(unfinished, fps=fps, codec="libx264", macro_block_size=2)
        with closing(video):  # after an error it would leave ffmpeg running, by itself
            game = play_rendered(policy, env, seed=seed, max_steps=max_steps, after=append_frame)
        with suppress(RuntimeError):  # ffmpeg cannot read it
            if count_frames_and_secs(str(unfinished))[0] == len(shapes):
                unfinished.replace(path)
                return game
        raise OSError("not all images are in the file")  # ffmpeg fails without an error where its last bytes do not fit
    finally:
        unfinished.unlink(missing_ok=True)


def frame_of(env: gymnasium.Env) -> np.ndarray:
    """The rendered image, uint8 [H, W, 3]; small ones are doubled, as video players blur them."""
    frame: Any = env.render()
    is_image = isinstance(frame, np.ndarray) and frame.ndim == 3 and frame.size > 0 and frame.shape[2] <= 4
    if is_image and frame.dtype.kind == "f" and frame.max() <= 1:
        frame = (255 * frame).round()
    elif is_image and frame.dtype.kind not in "iu":
        is_image = False
    if not is_image or not 0 <= frame.min() <= frame.max() <= 255:
        given = " ".join(str(getattr(frame, name, "")) for name in ("shape", "dtype"))
        given = f"{type(frame).__name__} {given}".rstrip()
        raise TypeError(f"render() returned a {given}, must be an image [H, W, 3] from 0 to 255, or from 0.0 to 1.0")
    frame = frame.astype(np.uint8, copy=False)
    return frame.repeat(2, axis=0).repeat(2, axis=1) if frame.shape[0] < 300 else frame
