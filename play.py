"""Evaluate a trained run: raw scores of whole games, and a video. Or export its policy.

    python play.py runs/<name> --episodes 30 --video game.mp4
    python play.py runs/<name> --export policy.onnx
    python play.py zoo/PongNoFrameskip-v4.safetensors --episodes 1 --window

Games are played greedily, unless `--sampled` is given.
"""

import a3c_mp  # noqa: F401  # isort: skip  (first: Ctrl-C ends the script in one line from here on)

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import gymnasium
import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from a3c_mp.api.policy import TrainedPolicy, TrainedRun, architecture_of, load_net, load_run
from a3c_mp.cli import parse_plain
from a3c_mp.config import Between, CommonArgs, Count
from a3c_mp.data.episodes import Episode
from a3c_mp.errors import ConfigError, shown, start_here
from a3c_mp.nets.distributions import ACTIONS, ActionHead, mask_logits
from a3c_mp.run import export
from a3c_mp.run.banner import net_name
from a3c_mp.run.evaluate import Policy, make_play_envs, play_episodes
from a3c_mp.run.preflight import probe_env
from a3c_mp.run.script import exit_with
from a3c_mp.wrappers import ActionScaling, close


@dataclass(frozen=True)
class Args:
    run: Path
    """run folder, runs/<name>: evaluates its best checkpoint; or one file: a checkpoint of such a folder (.pt), or
    what --export wrote (.safetensors)"""
    episodes: Count = 20
    """number of evaluation episodes, each a whole game"""
    max_steps: Count = CommonArgs.eval_max_steps
    """longest game (agent steps): it is cut there, with the score so far; Atari ends games there itself"""
    sampled: bool = False
    """stochastic policy: sample actions instead of taking the most probable one; no effect for nets of action values"""
    random: bool = False
    """play random actions in the environment of the run: what its returns are to be compared with"""
    seed: Annotated[int, Between(0, 2**31 - 1)] = 10_000
    """random seed of environments and sampling"""
    num_envs: Count = CommonArgs.eval_envs
    """parallel environments"""
    member: Annotated[int, Between(0)] | None = None
    """population: the member at this place of the newest checkpoint, instead of the fittest so far; where members
    evolve, it is the child that the next generation begins with, which has not learned yet"""
    video: Path | None = None
    """record one more episode to this mp4 file (needs imageio and imageio-ffmpeg)"""
    window: bool = False
    """show one more episode in a window"""
    export: Path | None = None
    """write the policy to this file and play no game: .onnx, with greedy actions; .safetensors, the weights and how
    their net is made"""


def make_random_policy(env_id: str, seed: int) -> Policy:
    """A policy of uniformly random actions, among those that a mask allows."""
    _, space = probe_env(env_id, ACTIONS)
    rng, head, scaling = torch.Generator().manual_seed(seed), ActionHead(space), ActionScaling(space)
    if isinstance(space, gymnasium.spaces.Box):  # bounds like +-3.4e38 stand for infinite ones
        low = np.where(~scaling.is_bounded & (scaling.lowest < 0), -np.inf, space.low)
        high = np.where(~scaling.is_bounded & (scaling.highest > 0), np.inf, space.high)
        space = gymnasium.spaces.Box(low, high, dtype=space.dtype.type)
    space.seed(seed)

    def act(obs: np.ndarray, starts: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        if isinstance(space, gymnasium.spaces.Box):
            return np.stack([space.sample() for _ in obs]).clip(scaling.low, scaling.high).astype(space.dtype)
        logits = mask_logits(torch.zeros(len(obs), head.num_outputs), mask)
        return scaling(head.distribution(logits).sample(rng).numpy())

    return act


def export_policy(run: TrainedRun, path: Path) -> None:
    """Write the policy as ONNX or its weights as safetensors. Raises ConfigError if it cannot be written."""
    if path.suffix not in (".onnx", ".safetensors") or path.is_dir():
        raise ConfigError("export", path, "it must be a file that ends in .onnx or .safetensors", "name one")
    net, spaces = load_net(run)
    description = {"algorithm": run.algorithm, "env_id": run.env_id, "steps": run.state["steps"]}
    architecture = architecture_of(run)
    description |= {"net": net_name(architecture.get("settings", {}), net), "architecture": architecture}
    description |= export.usage_of(run.env_id, net, spaces)
    try:
        if path.suffix == ".onnx":
            export.write_onnx(path, net, spaces, description)
        else:
            export.write_safetensors(path, net, description)
    except OSError as error:
        raise ConfigError("export", path, f"it cannot be written ({error.strerror})", "choose another") from error
    what = f"{run.algorithm} on {run.env_id}, {run.state['steps']:,} steps, {path.stat().st_size:,} bytes"
    print(shown(f"{path}: {what}"))


def description(run: TrainedRun, args: Args) -> str:
    """What plays."""
    if args.random:
        return f"{run.env_id}: random actions"
    how = "sampled" if args.sampled and not run.algo else "greedy"
    of = "" if args.member is None else f" of member {args.member}"
    trained = f"{run.algorithm} on {run.env_id}, {run.state['steps']:,} steps of training"
    return f"{run.path}{of}: {trained}, {how} actions"


def play(run: TrainedRun, policy: Policy, args: Args) -> None:
    """Play games and print their scores, also of those that have ended before a signal."""
    played: list[Episode] = []
    terminal = Console(stderr=True)  # stdout has the scores alone
    with closing(make_play_envs(run.env_id, args.episodes, seed=args.seed, num_envs=args.num_envs)) as env:
        games = play_episodes(policy, env, args.episodes, args.max_steps)
        try:
            played.extend(track(games, "playing", total=args.episodes, transient=True, console=terminal))
        finally:
            print_scores(played, args)
    if (returns := run.state.get("returns")) and args.member is None and not args.random:
        text = f"training's mean return at this checkpoint: {rounded(np.mean(returns))} over {len(returns)} games"
        print(f"{text} (with exploration, in part by earlier weights)")
        scores = [game.episode_return for game in played]
        is_cut = any(game.length >= args.max_steps for game in played)
        with np.errstate(invalid="ignore"):
            is_worse = np.mean(returns) - np.mean(scores) > max(np.std(returns), np.std(scores))
        if is_worse and not (args.sampled or run.algo or is_cut):
            print("that is much more than these greedy games: --sampled plays with the policy's own probabilities")


def rounded(value: float) -> str:
    """Two decimals, or two digits of a small return; less than 1e-9 is an error of rounding."""
    return f"{value:.2g}" if 1e-9 <= abs(value) < 0.1 else f"{value:.2f}"


def print_scores(played: Sequence[Episode], args: Args) -> None:
    """Print the raw score of each game, and their mean, spread and length."""
    if not played:
        return
    if len(played) < args.episodes:
        print(f"stopped after {len(played)} of {args.episodes} games: short ones, which end first, count too much")
    scores, lengths = np.array([game.episode_return for game in played]), np.array([game.length for game in played])
    print("raw scores: " + " ".join(f"{score:.10g}" for score in scores))
    with np.errstate(invalid="ignore"):  # of infinite ones
        spread = f"standard deviation {rounded(scores.std())}, min {scores.min():.10g}, max {scores.max():.10g}"
    print(f"mean {rounded(scores.mean())}, {spread}, {len(scores)} games of {lengths.mean():.0f} steps on average")
    if cut := (lengths >= args.max_steps).sum():
        print(f"{cut} of them reached {args.max_steps:,} steps, where they are cut (--max-steps)")


def main() -> int:
    args, here = parse_plain(Args, __doc__ or ""), start_here()  # an environment may leave the current folder
    args = replace(args, video=args.video and here / args.video, export=args.export and here / args.export)
    if args.export is not None and (args.window or args.random or args.sampled or args.video is not None):
        fix = "leave --video, --window, --random and --sampled out"
        raise ConfigError("export", args.export, "it plays no game", fix)
    if args.random and (args.sampled or args.member is not None):
        raise ConfigError("random", True, "no policy plays", "leave --sampled and --member out")
    run = load_run(args.run, args.member)
    if args.export is not None:
        export_policy(run, args.export)
        return 0
    if args.random:
        policy = make_random_policy(run.env_id, args.seed)
    else:
        policy = TrainedPolicy(run, sampled=args.sampled, seed=args.seed)
    video, seed, steps = args.video, args.seed, args.max_steps
    for path in [None] * args.window + [video] * bool(video):  # errors come before the games
        close(export.open_rendered(run.env_id, path))  # of some environments a process may have one at a time
    print(f"{description(run, args)}, seed {seed}")
    play(run, policy, args)
    with ExitStack() as stack:
        if args.window:
            stack.callback(close, env := export.open_rendered(run.env_id, None))
            game = export.play_rendered(policy, env, seed=seed, max_steps=steps)
            print(f"in the window: a game of {game.length} steps, score {game.episode_return:.10g}")
            stack.close()
        if video is not None:
            stack.callback(close, env := export.open_rendered(run.env_id, video))
            try:
                game = export.record_episode(policy, run.env_id, env, video, seed=seed, max_steps=steps)
            except OSError as error:  # ffmpeg ended, as on a full disk; its own words may be long
                raise ConfigError("video", video, "it cannot be written to the end", "is the disk full?") from error
            print(f"{shown(str(video))}: a game of {game.length} steps, score {game.episode_return:.10g}")
    return 0


if __name__ == "__main__":
    exit_with(main)
