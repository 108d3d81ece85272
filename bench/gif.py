"""The README's GIF: a video of a trained agent beside the learning curve of its game (median and range over the seeds).

python play.py runs/<name> --video game.mp4 && python bench/gif.py game.mp4 bench/results/solve_<...>.json
"""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

import imageio.v3 as imageio
import numpy as np
from PIL import Image

from a3c_mp.cli import parse_plain
from bench import common


@dataclass(frozen=True)
class Args:
    video: Path
    """mp4 file written by play.py"""
    result: Path
    """result file of bench/solve.py whose curves are drawn"""
    out: Path = common.ROOT / "docs" / "pong.gif"
    """GIF to write"""
    start: float = 0.0
    """second of the video to start at"""
    seconds: float = 12.0
    """length of the GIF"""
    fps: int = 15
    """frames a second of the GIF"""
    height: int = 336
    """height in pixels"""
    colours: int = 64
    """size of the palette"""


def curve_picture(result: dict, width: int, height: int) -> Image.Image:
    """Mean return over minutes: median and range of the seeds, each held at its last value once it has ended."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    runs = result["runs"]
    minutes = np.linspace(0.0, max(run["curve"][-1][1] for run in runs) / 60, 200)
    returns = [np.interp(minutes, *np.array([(p[1] / 60, p[2]) for p in run["curve"]]).T) for run in runs]
    figure, axis = plt.subplots(figsize=(width / 100, height / 100), dpi=100, layout="constrained")
    axis.fill_between(minutes, np.min(returns, axis=0), np.max(returns, axis=0), alpha=0.25, linewidth=0)
    axis.plot(minutes, np.median(returns, axis=0), linewidth=2)
    axis.set(xlabel=f"minutes on {result['machine']['cores']:.0f} CPU cores", ylabel="mean return of 100 games")
    axis.set_title(f"{result['env_id'].split('NoFrameskip')[0]}: median and range of {len(runs)} seeds", fontsize=10)
    axis.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture)
    plt.close(figure)
    return Image.open(picture).convert("RGB")


def main() -> int:
    args = parse_plain(Args, __doc__)
    video_fps = imageio.immeta(args.video)["fps"]
    frames = imageio.imread(args.video)
    chosen = [round((args.start + i / args.fps) * video_fps) for i in range(round(args.seconds * args.fps))]
    game_width = round(args.height * frames.shape[2] / frames.shape[1])
    curve = curve_picture(json.loads(args.result.read_text()), 640 - game_width, args.height)
    pictures = []
    for i in chosen:
        if i < len(frames):
            picture = Image.new("RGB", (640, args.height), "white")
            picture.paste(
                Image.fromarray(frames[i]).resize((game_width, args.height), Image.Resampling.LANCZOS), (0, 0)
            )
            picture.paste(curve, (game_width, 0))
            pictures.append(picture)
    palette = pictures[0].quantize(args.colours, method=Image.Quantize.MAXCOVERAGE)  # keeps the colours of small things
    first, *rest = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    first.save(args.out, save_all=True, append_images=rest, duration=round(1000 / args.fps), loop=0, optimize=True)
    print(f"{args.out}: {len(pictures)} frames, {args.out.stat().st_size / 2**20:.2f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
