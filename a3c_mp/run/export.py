"""What `play.py` writes of a trained policy: an ONNX model, its weights as safetensors, a video of a game."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

from a3c_mp.data.episodes import Episode
from a3c_mp.errors import ConfigError, one_line
from a3c_mp.nets.actor_critic import ActorCritic
from a3c_mp.run.evaluate import Policy
from a3c_mp.seeds import seed_global_generators
from wrappers import FRAME_SKIP, RECORDER, ActionScaling, Identity, is_atari, make_env, mask_in

RECORDED = Identity(RECORDER)  # it is open while other environments play


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
        return self._action(output), output, *(others[1:] if state else ())

    def _action(self, output: Tensor) -> Tensor:
        action = self.net.distribution(output).mode() if isinstance(self.net, ActorCritic) else output
        if self.scaling is None:
            return action if isinstance(self.net, ActorCritic) else output.argmax(dim=-1)
        center, half, low, high = self.scaling
        return (center + half * action).clamp(low, high)


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
        program = torch.onnx.export(
            ExportedPolicy(net, action_space).eval(),
            inputs,
            dynamo=True,
            verbose=False,
            dynamic_shapes=(batch, (batch,)) if lstm_size else (batch,),
            input_names=["obs", "state"][: len(inputs)],
            output_names=["action", "output", "next_state"][: 1 + len(inputs)],
        )
    assert program is not None
    program.model.metadata_props.update({name: json.dumps(value) for name, value in description.items()})
    program.save(path, external_data=False)


def write_safetensors(path: Path, net: nn.Module, description: Mapping[str, Any]) -> None:
    """Write the weights of a net, also of its normalization, and a description; raises as `write_onnx`."""
    if importlib.util.find_spec("safetensors") is None:
        raise ConfigError("export", path, "safetensors is not installed", "pip install safetensors")
    from safetensors.torch import save

    tensors = {name: tensor.contiguous() for name, tensor in net.state_dict().items()}
    path.write_bytes(save(tensors, {name: json.dumps(value) for name, value in description.items()}))


def open_rendered(env_id: str, video: Path) -> gymnasium.Env:
    """Make an environment that renders images. Raises ConfigError if it, or `video`, cannot be made."""
    if importlib.util.find_spec("imageio_ffmpeg") is None:
        raise ConfigError("video", video, "imageio-ffmpeg is not installed", "pip install imageio imageio-ffmpeg")
    if video.suffix != ".mp4" or video.is_dir() or not video.parent.is_dir():
        raise ConfigError("video", video, "it must be an .mp4 in a folder that is there", "for instance game.mp4")
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame renders without a screen
    try:
        with warnings.catch_warnings():  # gymnasium's, of what the error says
            warnings.simplefilter("ignore")
            RECORDED.assume()
            env = make_env(env_id, render_mode="rgb_array")
        env.reset(seed=0)
        frame_of(env)
    except Exception as error:  # an environment of the user's own can raise anything
        why = f"{env_id} cannot be rendered: {one_line(error)}"
        raise ConfigError("video", video, why, "leave --video out") from error
    return env


def record_episode(
    policy: Policy, env_id: str, env: gymnasium.Env, path: Path, *, seed: int, max_steps: int
) -> Episode:
    """Play a game of at most `max_steps`, and write it to an mp4 file at normal speed (of Atari: every 4th frame)."""
    import imageio.v2 as imageio

    fps = 60 // FRAME_SKIP if is_atari(env_id) else int(env.metadata.get("render_fps", 30))
    episode_return, length, done = 0.0, 0, False
    seed_global_generators(seed)
    RECORDED.assume()
    obs, info = env.reset(seed=seed)
    video: Any = imageio.get_writer(path, fps=fps, codec="libx264", macro_block_size=2)
    with video:
        video.append_data(frame_of(env))
        while not done:
            mask = mask_in(info, env.action_space)
            action = policy(obs[None], np.array([length == 0]), None if mask is None else mask[None])[0]
            obs, reward, terminated, truncated, info = env.step(action)
            video.append_data(frame_of(env))
            episode_return, length = episode_return + np.asarray(reward).item(), length + 1
            done = terminated or truncated or length >= max_steps
    env.close()
    return Episode(episode_return, length)


def frame_of(env: gymnasium.Env) -> np.ndarray:
    """The rendered image, uint8 [H, W, 3]; small ones are doubled, as video players blur them."""
    frame: Any = env.render()
    if not isinstance(frame, np.ndarray) or frame.ndim != 3:
        raise TypeError(f"render() returned a {type(frame).__name__}, must be an image [H, W, 3]")
    return frame.repeat(2, axis=0).repeat(2, axis=1) if frame.shape[0] < 300 else frame
