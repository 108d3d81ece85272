"""Signs that a run does not learn, in the figures that its curves have: a warning for each, once, with what to try."""

import logging
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gymnasium.spaces import Box

from a3c_mp.nets.layers import is_image
from a3c_mp.run.mean_return import MIN_EPISODES, WINDOW, short_return
from a3c_mp.run.progress import Progress
from a3c_mp.wrappers import num_choices

LONGEST = {False: 1_000_000, True: 3_000_000}
"""observations are images -> agent steps by which a run is judged that has more: a sign is not to come hours late"""
LOOKS, IN_A_ROW = 50, 3
"""looks at the medians of the curves in a run of that length; those in a row that a sign is in before it is shown"""
LATE = 0.3  # share of the run before which a mean return that does not rise is no sign by itself
LEAST = {False: (10_000, 50_000), True: (100_000, 600_000)}
"""observations are images -> agent steps before which there is no sign, and none of this kind"""
GAMES_STEPS = 2_000  # steps of each environment in which a game should end
DEVIATIONS = 2.0  # standard errors by which a mean return that has risen is above the one at first


class Sign(NamedTuple):
    """A sign that a run does not learn."""

    is_in: Callable[[Any], bool]  # of `Signs` at a look
    text: Callable[[Any], str]
    advice: str


SIGNS: dict[str, Sign] = {
    "gradients": Sign(
        lambda look: look["losses/grad_norm"] > 1000 * vars(look.progress.args).get("max_grad_norm", math.inf),
        lambda look: f"gradient norms of {look['losses/grad_norm']:,.0f} are clipped (--max-grad-norm)",
        "rewards are large: use --reward-scale none if their scale is fixed, or lower --learning-rate",
    ),
    "no_game": Sign(
        lambda look: (
            not look.progress.args.has_fitness  # generations begin new games
            and look.endless
            >= max(0.2 * look.length, GAMES_STEPS * look.window.total * look.window.num_envs / len(look.window.counted))
        ),
        lambda look: f"no game has ended in {look.endless:,} steps, so the mean return says nothing new",
        "give the environment an end, or register it with max_episode_steps",
    ),
    "same_return": Sign(
        lambda look: (
            bool({"explore_envs", "epsilon"} & vars(look.progress.args).keys())  # flags of this chapter
            and len({*look.window.first, *look.window.returns}) == 1
            and look.stands_still
        ),
        lambda look: f"the first and the newest of {look.window.episodes:,} games had the same return",
        "explore in longer stretches (--explore-envs 0.25 --explore-steps 50; continuous actions: --noise-steps 16; "
        "dqn: a higher --epsilon; ddpg, td3: --noise-memory 0.9)",
    ),
    "values": Sign(
        lambda look: abs(look["values/explained_variance"]) < 1e-5 and look.stands_still,
        lambda look: "the value function is the same in all states",
        "look whether observations change, and whether rewards do; with --gamma 0 only the next reward counts",
    ),
    "deterministic": Sign(
        lambda look: look["policy/entropy"] < look.certain and look.stands_still,
        lambda look: f"the policy no longer explores (entropy {look['policy/entropy']:.3f}) and has not learned",
        "lower --learning-rate, or use --reward-scale none if rewards are large and their scale is fixed",
    ),
    "random": Sign(
        lambda look: abs(look["policy/entropy"] - look.at_first) < 0.001 * look.unit and look.stands_still,
        lambda look: f"the policy is as random as at first (entropy {look['policy/entropy']:.3f})",
        "raise --learning-rate, or lower --entropy-coef",
    ),
    "bounds": Sign(
        lambda look: look["policy/at_bounds"] > 0.9 and look.stands_still,
        lambda look: f"{look['policy/at_bounds']:.0%} of actions lie on their bounds",
        "lower --learning-rate (ddpg, td3: --policy-learning-rate) or --entropy-coef",
    ),
    "still": Sign(
        lambda look: look.stands_still and look.share >= LATE and look.steps >= look.least[1],
        lambda look: f"the mean return of {short_return(look.window.mean)} is no better than that of the first games",
        "compare it with `play.py --random`",
    ),
}


def has_risen(first: list[float], last: list[float]) -> bool:
    """Whether the newest games of a run have higher returns than its first 20, or its first 100."""
    for num in (MIN_EPISODES, WINDOW):
        before, now = first[:num], last[-num:]
        error = math.sqrt(sum(statistics.variance(games) / len(games) for games in (before, now)))
        if statistics.fmean(now) - statistics.fmean(before) > DEVIATIONS * error:
            return True
    return False


class Signs:
    """Looks for `SIGNS` in the curves of a run, and warns of each once."""

    def __init__(self, progress: Progress, spaces: Sequence[Any], log: logging.Logger):
        self.progress, self.window, self.log = progress, progress.window, log
        obs_space, action_space, *_ = spaces
        image = is_image(obs_space)
        self.length, self.least = min(progress.args.total_steps, LONGEST[image]), LEAST[image]
        self.at_first = self.unit = sum(map(math.log, num_choices(action_space).tolist()))  # entropies (nats)
        self.certain = 0.01 * self.unit  # so is a policy that acts alike nearly always
        if isinstance(action_space, Box):
            self.unit = math.prod(action_space.shape)
            log_std = vars(progress.args).get("log_std_init", 0.0)
            self.at_first = self.unit * (log_std + 0.5 * math.log(2 * math.pi * math.e))  # of a Gaussian
            self.certain = self.at_first + self.unit * math.log(0.01)
        self.seen = dict.fromkeys(SIGNS, 0)  # looks in a row
        self.warned = set[str]()
        self._points, self._next = defaultdict[str, list[float]](list), progress.steps
        self.curves: dict[str, float] = {}  # medians of their points between the last two looks
        self._ended = progress.steps, progress.window.ended  # agent steps and games at the last end of one
        self.steps: int = 0  # agent steps at the last look
        self.share: float = 0.0  # of the run's steps

    def __getitem__(self, name: str) -> float:
        return self.curves.get(name, math.nan)

    @property
    def stands_still(self) -> bool:
        """Whether there are enough games to compare, and the newest have no higher returns than the first."""
        window = self.window
        return window.episodes >= 2 * MIN_EPISODES and not has_risen(window.first, list(window.returns))

    @property
    def endless(self) -> int:
        """Agent steps since a game has ended."""
        return self.steps - self._ended[0]

    def add(self, means: Mapping[str, float]) -> None:
        """Add a point of the curves; look for signs when the next look is due."""
        for name, value in means.items():
            self._points[name].append(value)
        steps, ended = self.progress.steps, self.window.ended
        self._ended = self._ended if ended == self._ended[1] else (steps, ended)
        if steps < max(self._next, self.least[0]):
            return
        self.steps, self.share = steps, steps / self.length
        self._next = steps + self.length // LOOKS
        self.curves = {name: statistics.median(values) for name, values in self._points.items()}
        self._points.clear()
        for name, sign in SIGNS.items():
            self.seen[name] = self.seen[name] + 1 if sign.is_in(self) else 0
        lasting = [name for name, number in self.seen.items() if number >= IN_A_ROW]
        if lasting and lasting[0] not in self.warned:  # those after it in the table may be what it leads to
            self.warned.add(lasting[0])
            self.log.warning(f"{SIGNS[lasting[0]].text(self)}: {SIGNS[lasting[0]].advice} (docs/learning.md)")
