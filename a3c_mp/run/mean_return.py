"""The mean return, over games in the order in which they started: short games must not enter it first."""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from a3c_mp.data.episodes import Episode

WINDOW = 100  # episodes in the mean return
MIN_EPISODES = 20  # fewest episodes that can show a game solved
PATIENCE, FEW, LONG_PATIENCE = 2, 0.05, 20
"""later games for each environment after which an unfinished game is no longer waited for, if only this share of all
environments has such a game (rallies in Pong can last for 27,000 steps); and after which none is, however many have"""


def short_return(value: float) -> str:
    """A return for the log: one decimal, two if it is smaller than 10, two digits if it is smaller than 0.1."""
    digits = ".2g" if 0 < abs(value) < 0.1 else ".1f" if abs(value) >= 10 else ".2f"
    return f"{value:{digits}}"


CountedEpisode = tuple[int, Episode]  # actor, and its game that enters the mean return


@dataclass(slots=True)
class _Game:
    actor: int
    env: int
    episode: Episode | None = None  # once it has ended
    ended: bool = False  # or was lost with its actor
    overdue: bool = False  # passed over, and not ended since
    reported: bool = False  # its actor has sent something since it started
    number: int = 0  # of games that had started then
    endless: bool = False


class ReturnWindow:
    """Mean raw return of the last `WINDOW` whole games; a game counts once all that started before it have ended.

    Taken as they finish, games would give a biased mean: after a common start the short ones come first.

    A game that does not end would hold up the others for ever: when `PATIENCE` later games for each environment wait
    behind it, it is passed over, and counts when it ends. Not so if its actor has sent nothing since it started: where
    games are short, one rollout of another actor holds as many. Where games differ much in length (in Acrobot those
    that fail are five times as long), passing over many would leave the short ones, so only `FEW` may be outstanding.

    The first `explorers` of the `num_envs` environments of each actor are ignored: they say little about the policy.
    """

    def __init__(self, num_actors: int, num_envs: int, explorers: int = 0, goal: float | None = None):
        self.num_actors, self.num_envs, self.counted = num_actors, num_envs, range(explorers, num_envs)
        self.goal = goal  # of the mean
        self.returns: deque[float] = deque(maxlen=WINDOW)
        self.first: list[float] = []  # returns of the first `WINDOW` games of the run
        self.episodes = 0  # of the whole run
        self.ended = 0  # games, also those that are not counted yet
        self.endless: list[tuple[int, int]] = []  # (actor, environment) of games longer than `LONG_PATIENCE`
        self.restart_games()

    def restart_games(self) -> None:
        """Have all actors start new games."""
        self._started = self._overdue = 0  # games; those passed over that have not ended
        self._queue: deque[_Game] = deque()  # by start: games in progress, and finished ones behind them
        self._playing = [self._start(actor, self.counted) for actor in range(self.num_actors)]
        self._set_limits()

    def _set_limits(self) -> None:
        self.total = sum(map(len, self._playing))  # environments in which games are played
        self.limit, self.long_limit = (1 + PATIENCE) * self.total, (1 + LONG_PATIENCE) * self.total
        self.few = max(1, int(FEW * self.total))

    def _start(self, actor: int, envs: Iterable[int]) -> dict[int, _Game]:
        games = {env: _Game(actor, env) for env in envs}
        self._started += len(games)
        self._queue.extend(games.values())
        return games

    @property
    def mean(self) -> float:
        """NaN before the first game."""
        return float(np.mean(self.returns)) if self.returns else math.nan

    @property
    def is_representative(self) -> bool:
        """Whether there are enough games to call the task solved or a checkpoint the best."""
        return len(self.returns) >= MIN_EPISODES

    @property
    def has_reached_goal(self) -> bool:
        return self.goal is not None and self.is_representative and self.mean >= self.goal

    def end(self, actor: int, episodes: Sequence[Episode]) -> list[CountedEpisode]:
        """Add games of an actor that ended, in order of time; returns those that enter the mean now."""
        playing, late = self._playing[actor], list[_Game]()
        for game in playing.values():
            if not game.reported:
                game.reported, game.number = True, self._started
        for episode in episodes:
            if episode.env not in self.counted:
                continue
            game = playing[episode.env]
            game.episode, game.ended = episode, True
            self.ended += 1
            playing |= self._start(actor, [episode.env])
            if game.overdue:
                self._overdue, game.overdue = self._overdue - 1, False
                late.append(game)
        for game in playing.values():
            if game.reported and not game.endless and self._started - game.number >= self.long_limit:
                game.endless = True
                self.endless.append((actor, game.env))
        self._queue.extendleft(reversed(late))
        return self._count(self._release())

    def lose(self, actor: int) -> list[CountedEpisode]:
        """Drop the unfinished games of an actor, and start others; returns those that enter the mean now."""
        self.leave(actor)
        self._playing[actor] = self._start(actor, self.counted)
        self._set_limits()
        return self._count(self._release())

    def leave(self, actor: int) -> None:
        """Drop the games that an actor was playing; until `lose` it plays no others."""
        for game in self._playing[actor].values():
            game.ended = True
            self._overdue -= game.overdue
        self._playing[actor] = {}
        self._set_limits()

    def _release(self) -> Iterator[CountedEpisode]:
        while self._queue and (self._queue[0].ended or self._is_passed_over()):
            game = self._queue.popleft()
            if game.episode is not None:
                yield game.actor, game.episode
            elif not game.ended:
                game.overdue = True
                self._overdue += 1

    def _is_passed_over(self) -> bool:
        """Whether the first game of the queue, which has not ended, is no longer waited for."""
        limit = self.limit if self._overdue < self.few else self.long_limit
        return self._queue[0].reported and len(self._queue) > limit

    def _count(self, games: Iterator[CountedEpisode]) -> list[CountedEpisode]:
        """Count games one after another until the mean reaches the goal: of many that a long one has held up, the
        last ones may be worse."""
        counted = list[CountedEpisode]()
        while not self.has_reached_goal and (game := next(games, None)) is not None:
            if math.isfinite(game[1].episode_return):
                counted.append(game)
                self.returns.append(game[1].episode_return)
        self.first += [episode.episode_return for _, episode in counted][: max(WINDOW - self.episodes, 0)]
        self.episodes += len(counted)
        return counted

    def state_dict(self) -> dict[str, Any]:
        """All games by start, overdue ones first, each as its fields."""
        overdue = [game for games in self._playing for game in games.values() if game.overdue]
        games = *overdue, *self._queue
        rows = [[g.actor, g.env, g.episode and list(g.episode), g.ended, g.overdue, g.reported] for g in games]
        return {"sizes": [self.num_actors, self.num_envs], "games": rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the games of a `state_dict`. Raises ValueError for other numbers of actors or environments."""
        if state["sizes"] != [self.num_actors, self.num_envs]:
            raise ValueError(f"it has (actors, environments) {state['sizes']}")
        rows = [row for row in state["games"] if row[1] in self.counted]  # earlier versions saved all
        games = [_Game(actor, env, end and Episode(*end), *flags) for actor, env, end, *flags in rows]
        self._overdue = sum(game.overdue for game in games)
        self._queue = deque(game for game in games if not game.overdue)
        for game in games:
            if not game.ended:
                self._playing[game.actor][game.env] = game
        self._set_limits()
