"""Evaluate a trained run: raw scores of whole games, and a video.

python play.py runs/<name> --episodes 30 --video game.mp4
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import gymnasium
import numpy as np
import tyro
from gymnasium.spaces import Discrete
from rich.progress import track

from a3c_mp.algorithms import ddpg, dqn
from a3c_mp.cli import parse_plain
from a3c_mp.config import Between, Count, Fraction
from a3c_mp.errors import ConfigError
from a3c_mp.nets.actor_critic import make_actor_critic
from a3c_mp.run import checkpoint
from a3c_mp.run.evaluate import Policy, make_policy, play_episodes, record_episode, with_random_actions
from a3c_mp.run.preflight import check_env
from a3c_mp.run.script import exit_with

APEX = {"apex_dqn": dqn, "apex_ddpg": ddpg}


@dataclass(frozen=True)
class Args:
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """run folder (its best checkpoint is played), or one checkpoint file (.pt) in it"""
    episodes: Count = 20
    """whole games to play"""
    sampled: bool = False
    """draw actions from the policy instead of taking the likeliest; has no meaning for Ape-X"""
    epsilon: Fraction = 0.0
    """share of actions that are random"""
    seed: Annotated[int, Between(0, 2**31 - 1)] = 10_000
    """seed of environments and sampling"""
    num_envs: Count = 8
    """games played at once"""
    video: Path | None = None
    """write one more game to this mp4 file (needs imageio-ffmpeg)"""


def find_checkpoint(run: Path) -> tuple[Path, Path]:
    """(run folder, checkpoint): the best of a run folder, else its newest; or the file that was named."""
    if run.suffix == ".pt":
        return run.parent.parent, run
    folder = run / "checkpoints"
    paths = checkpoint.list_checkpoints(folder, "best") or checkpoint.list_checkpoints(folder)
    if not paths:
        raise ConfigError("run", run, "there is no checkpoint in this folder", "name a folder below runs/")
    return run, paths[0]


def main() -> int:
    args = parse_plain(Args, __doc__)
    if args.video is not None and importlib.util.find_spec("imageio_ffmpeg") is None:
        raise ConfigError("video", args.video, "imageio-ffmpeg is not installed", "pip install imageio imageio-ffmpeg")
    if args.video is not None and not args.video.parent.is_dir():
        raise ConfigError("video", args.video, "its folder does not exist", "make the folder first")
    if args.video is not None and (args.video.suffix != ".mp4" or args.video.is_dir()):
        raise ConfigError("video", args.video, "it must be a file that ends in .mp4", "for instance game.mp4")
    folder, path = find_checkpoint(args.run)
    try:
        config = json.loads((folder / "config.json").read_text())
        env_id, algorithm = config["args"]["env_id"], config["algorithm"]
        kind = {name: config["args"][name] for name in ("net", "lstm") if name in config["args"]}
        state = checkpoint.load(path, algorithm=algorithm, env_id=env_id)
    except (OSError, ValueError, KeyError, TypeError, checkpoint.CheckpointError) as error:
        raise ConfigError("run", args.run, str(error), "name another run or checkpoint") from error

    algo = APEX.get(algorithm)
    obs_space, action_space = check_env(env_id, algo.ACTIONS if algo else Discrete)
    net = algo.make_net(obs_space, action_space) if algo else make_actor_critic(obs_space, action_space, **kind)
    try:
        net.load_state_dict(state["net"])
    except RuntimeError as error:
        raise ConfigError("run", args.run, f"{path} does not fit {env_id} as it is now", "name another run") from error
    if algo:
        policy: Policy = lambda obs, starts: algo.act_greedily(net, action_space, obs)  # noqa: E731
    else:
        policy = make_policy(net, greedy=not args.sampled, seed=args.seed)
    if args.epsilon:
        policy = with_random_actions(policy, action_space, args.epsilon, seed=args.seed)
    how = "sampled" if args.sampled and not algo else "greedy"
    how += f" and {args.epsilon:.1%} random" if args.epsilon else ""
    print(f"{path}: {algorithm} on {env_id}, {state['steps']:,} steps of training, {how} actions, seed {args.seed}")
    games = play_episodes(policy, env_id, args.episodes, seed=args.seed, num_envs=args.num_envs)
    played = list(track(games, "playing", total=args.episodes, transient=True))
    scores = np.array([episode.episode_return for episode in played])
    print("raw scores: " + " ".join(f"{score:g}" for score in scores))
    print(
        f"mean {scores.mean():.2f}, standard deviation {scores.std():.2f}, min {scores.min():g}, max {scores.max():g}, "
        f"{len(scores)} games of {np.mean([episode.length for episode in played]):.0f} steps on average"
    )
    if args.video is not None:
        try:
            episode = record_episode(policy, env_id, args.video, seed=args.seed)
        except gymnasium.error.Error as error:
            raise ConfigError("video", args.video, f"{env_id} cannot be drawn: {error}", "leave --video out") from error
        print(f"{args.video}: a game of {episode.length} steps, score {episode.episode_return:g}")
    return 0


if __name__ == "__main__":
    exit_with(main)
