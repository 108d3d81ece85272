"""Train the policies in zoo/ again, each by the command on its card, and compare.

    python bench/zoo.py --rows CartPole-v1 Pendulum-v1   seconds to minutes each; Atari takes far longer
    python bench/zoo.py --rows PongNoFrameskip-v4 --replace   keep what came out, with a new card
    python bench/zoo.py --table                               write the table in zoo/README.md from the cards

On a processor of the card's kind, with the same versions, the weights must be the same to the last bit: trainings are
`--deterministic`. Elsewhere 30 greedy games must reach the policy's aim. Exit code 1 says that one does not.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

from a3c_mp.api.policy import TrainedPolicy, load_run
from a3c_mp.cli import parse_plain
from a3c_mp.config import CommonArgs
from a3c_mp.errors import ConfigError
from a3c_mp.run.checkpoint import list_checkpoints, sha256_of_weights
from a3c_mp.run.evaluate import make_play_envs, play_episodes
from a3c_mp.run.script import exit_with
from bench import common, records
from bench.records import Result

FOLDER = common.ROOT / "zoo"
GAMES, SEED = 30, 10_000
"""greedy games of a score, as `play.py --episodes 30 --seed 10000` plays them"""
SAME = ("processor", "python", "torch", "ale-py", "gymnasium", "numpy", "opencv-python-headless")
"""what must be equal for equal bits"""


class Entry(NamedTuple):
    """How a policy is trained, and what it must reach."""

    aim: float  # mean score of the games
    flags: str = ""
    chapter: str = "a3c_data"

    def command(self, env_id: str) -> list[str]:
        return [*common.CHAPTERS[self.chapter], "--env-id", env_id, "--deterministic", *shlex.split(self.flags)]


BREAKOUT = (
    "--net a3c --update-epochs 2 --repeat-fraction 0.5 --total-steps 2_500_000 "
    "--entropy-coef-end 0.001 --entropy-steps 2_000_000"
)
ZOO = {
    "CartPole-v1": Entry(475),
    "Pendulum-v1": Entry(-200),
    "LunarLander-v3": Entry(200, "--total-steps 1_000_000 --reward-scale 0.1 --stop-return 230"),
    "PongNoFrameskip-v4": Entry(18),
    "BreakoutNoFrameskip-v4": Entry(80, BREAKOUT),
}


@dataclass(frozen=True)
class Args:
    rows: tuple[str, ...] = ()
    """policies to train again"""
    replace: bool = False
    """write them to zoo/"""
    table: bool = False
    """write the table of all cards"""
    runs_dir: Path = Path("runs")
    """where run folders are made"""


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.safetensors"


def metadata_of(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return file.metadata()


def read_card(path: Path) -> Result:
    """How a policy was made, from the metadata of its file."""
    return json.loads(metadata_of(path)["card"])


def score(path: Path, games: int = GAMES) -> list[float]:
    """Raw scores of greedy games."""
    policy = TrainedPolicy(load_run(path))
    with closing(make_play_envs(policy.env_id, games, seed=SEED)) as env:
        return [game.episode_return for game in play_episodes(policy, env, games, CommonArgs.eval_max_steps)]


def make(name: str, args: Args, folder: Path) -> tuple[Path, Result]:
    """Train a policy; return (its file in `folder`, its card)."""
    from safetensors.torch import load_file, save

    command = ZOO[name].command(name)
    run = common.train(command, args, f"zoo-{name}")
    newest = list_checkpoints(run / "checkpoints")[0]  # which net was the best depends on the clock
    path = folder / f"{name}.safetensors"
    with common.running_script(["play.py", str(newest), "--export", str(path)]) as process:
        if code := process.wait():
            raise SystemExit(code)
    scores, summary, weights = score(path), common.read_summary(run), load_run(path).state["net"]
    card = {
        "command": shlex.join(["python", *command]), "commit": records.commit_of(), "seed": CommonArgs.seed,
        "processor": records.machine()["name"], **records.versions(),
        "steps": load_run(path).state["steps"], "minutes": round(summary["wall_seconds"] / 60, 1),
        "weights_sha256": sha256_of_weights(weights), "games": len(scores),
        "score": round(statistics.fmean(scores), 2), "lowest": min(scores), "highest": max(scores),
    }  # fmt: skip
    path.write_bytes(save(load_file(path), metadata_of(path) | {"card": json.dumps(card)}))
    return path, card


def verdict(name: str, card: Result, kept: Result | None) -> tuple[str, bool]:
    """(What to say of a policy that was trained again, whether it is as good as its card)."""
    text = f"{name}: score {card['score']:g}, weights {card['weights_sha256'][:8]}, {card['minutes']:g} minutes"
    if card["score"] < ZOO[name].aim:
        return f"{text}: below its aim, {ZOO[name].aim:g}", False
    if kept is None:
        return f"{text}: it is not in the zoo", True
    if others := [key for key in SAME if card.get(key) != kept.get(key)]:
        return f"{text}: at its aim; another {', '.join(others)}, so weights may differ", True
    same = card["weights_sha256"] == kept["weights_sha256"]
    return f"{text}: {'the same' if same else 'OTHER'} weights as in the zoo", same


def table(names: Sequence[str]) -> str:
    """The cards as a table, and each as a list."""
    header = ["policy", "score", "lowest, highest", "steps", "minutes", "kB"]
    rows, cards = [], []
    for name in names:
        size, card = path_of(name).stat().st_size, read_card(path_of(name))
        texts = {key: f"{value:.5g}" if isinstance(value, float) else f"{value}" for key, value in card.items()}
        figures = [texts["score"], f"{texts['lowest']}, {texts['highest']}", f"{card['steps']:,}", texts["minutes"]]
        rows.append([f"[{name}]({name}.safetensors)", *figures, f"{size / 1000:,.0f}"])
        cards += [f"\n**{name}**\n", *(f"- {key}: `{text}`" for key, text in texts.items())]
    return "\n".join([records.markdown_table(header, rows), *cards])


def write_table() -> None:
    """Write what the cards say into zoo/README.md, after its first part."""
    path = FOLDER / "README.md"
    mark = "<!-- cards -->\n"
    head = path.read_text().partition(mark)[0]
    path.write_text(f"{head}{mark}\n{table([name for name in ZOO if path_of(name).exists()])}\n")


def main() -> int:
    args, code = parse_plain(Args, __doc__), 0
    if unknown := [name for name in args.rows if name not in ZOO]:
        raise ConfigError("rows", unknown[0], "no such policy", f"choose of {' '.join(ZOO)}")
    for name in args.rows:
        with tempfile.TemporaryDirectory() as folder:
            path, card = make(name, args, Path(folder))
            text, is_good = verdict(name, card, read_card(path_of(name)) if path_of(name).exists() else None)
            print(text, flush=True)
            if args.replace and card["score"] >= ZOO[name].aim:
                path_of(name).write_bytes(path.read_bytes())
            elif not is_good:
                code = 1
    if args.table or args.replace:
        write_table()
    return code


if __name__ == "__main__":
    exit_with(main)
