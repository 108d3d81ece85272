"""Actions of environments: their units, which ones they allow now (masks), and the outer wrapper that checks them.

An environment with masks gives `info["action_mask"]` with each observation: an array of 0 and 1, or booleans, for each
choice. Discrete(A) has [A]; MultiDiscrete and MultiBinary have the choices of all parts, one part after another.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
from ale_py.vector_env import AtariVectorEnv
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from gymnasium.vector import VectorEnv, VectorWrapper

from a3c_mp.wrappers.observations import leaves

ACTIONS = Discrete | Box | MultiDiscrete | MultiBinary  # supported classes of action spaces
SEEDS = 2**31  # number of seeds; ALE's are an int32
WIDEST = float(np.sqrt(np.finfo(np.float32).max))  # widest distance of bounds (1.8e19); wider ones count as infinite


class MaskedDiscrete(Discrete):
    """Discrete actions 0, ..., n - 1 of an environment with masks, which a replay stores with every observation."""

    def __repr__(self) -> str:
        return f"Discrete({self.n}) masked"


class PlainActions(gymnasium.Wrapper):
    """Actions as one array: choices that begin at 0, `MultiDiscrete` for a `Tuple` or `Dict` of them, or one `Box`."""

    def __init__(self, env: gymnasium.Env, space: Space):
        super().__init__(env)
        self.action_space, self.own = space, env.action_space
        sizes = [int(np.prod(part.shape)) for _, part, _ in leaves(self.own)]  # type: ignore[arg-type]
        self.cuts = np.cumsum(sizes)[:-1]

    def reset(self, **kwargs: Any):
        obs, info = self.env.reset(**kwargs)
        return obs, self._with_mask(info)

    def step(self, action):
        *result, info = self.env.step(_structured(self.own, iter(np.split(np.ravel(action), self.cuts))))
        return *result, self._with_mask(info)

    def _with_mask(self, info: Any) -> Any:
        """The info with masks of all parts in the order of their actions, as far as there are any."""
        if not isinstance(info, dict) or not isinstance(info.get("action_mask"), Mapping | tuple):
            return info
        try:
            return info | {"action_mask": [mask for _, _, mask in leaves(self.own, info["action_mask"])]}
        except ValueError as error:
            raise ValueError(f"an action_mask with other parts: {error}") from None


def _structured(space: Space, parts: Iterator[np.ndarray]) -> Any:
    """An action of an environment's own space, of the next ones of flat parts whose choices begin at 0."""
    if isinstance(space, Dict):
        return {name: _structured(part, parts) for name, part in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(_structured(part, parts) for part in space.spaces)
    return (next(parts).reshape(space.shape or ()) + getattr(space, "start", 0)).astype(space.dtype)[()]


def with_plain_actions(env: gymnasium.Env) -> gymnasium.Env:
    """An environment in `PlainActions`, where that makes its actions some that policies have."""
    space = env.action_space
    parts: list[Any] = [part for _, part, _ in leaves(space)]
    if isinstance(space, Dict | Tuple) and parts and all(isinstance(p, Box) and p.dtype.kind == "f" for p in parts):
        low, high = (np.concatenate([getattr(part, end).ravel() for part in parts]) for end in ("low", "high"))
        return PlainActions(env, Box(low, high, dtype=low.dtype.type))
    choices = [num_choices(part) for part in parts]
    if isinstance(space, Dict | Tuple) and parts and all(map(len, choices)):
        return PlainActions(env, MultiDiscrete(np.concatenate(choices)))
    is_one = isinstance(space, Discrete)
    if not np.any(getattr(space, "start", 0)) and not (is_one and space.dtype != np.int64):
        return env
    shape = space.shape or ()
    return PlainActions(env, Discrete(choices[0][0]) if is_one else MultiDiscrete(choices[0].reshape(shape)))


def num_choices(space: gymnasium.Space) -> np.ndarray:
    """Number of choices in each part of an action, int64; none for continuous actions."""
    if isinstance(space, Discrete):
        return np.array([space.n])
    if isinstance(space, MultiDiscrete):
        return space.nvec.ravel().astype(np.int64)
    return np.full(int(np.prod(space.shape or ())) if isinstance(space, MultiBinary) else 0, 2)


def bounds(space: gymnasium.Space) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest action, [*shape] each."""
    if isinstance(space, Box):
        return space.low, space.high
    low = np.broadcast_to(getattr(space, "start", 0), space.shape or ())
    return low, low + num_choices(space).reshape(space.shape or ()) - 1


class ActionScaling:
    """Maps actions of a policy, [..., *shape], to those that environments with this action space take.

    A bounded dimension of a Box, one with two finite bounds not farther apart than `WIDEST`, is mapped linearly from
    [-1, 1] to its bounds. Other dimensions keep their units, and begin at 0 or, where that is no action, at the bound.
    Both are clipped to the bounds. Choices stay as they are.
    """

    def __init__(self, space: gymnasium.Space):
        self.space = space
        if isinstance(space, Box):
            with np.errstate(over="ignore"):
                distance = (space.high - space.low).astype(np.float64)
            self.low, self.high = space.low.astype(np.float64), space.high.astype(np.float64)
            self.is_bounded = distance <= WIDEST  # bool [*shape]
            low, high = np.where(self.is_bounded, self.low, -1.0), np.where(self.is_bounded, self.high, 1.0)
            self.half = (high - low) / 2
            self.center = np.where(self.is_bounded, (low + high) / 2, np.clip(0.0, self.low, self.high))
            self.lowest = np.where(self.is_bounded, -1.0, self.low - self.center)  # of a policy's actions, not clipped
            self.highest = np.where(self.is_bounded, 1.0, self.high - self.center)

    def __call__(self, actions: np.ndarray) -> np.ndarray:
        if isinstance(self.space, Discrete):
            return actions
        if isinstance(self.space, Box):
            actions = (self.center + self.half * actions).clip(self.low, self.high)
        return actions.astype(self.space.dtype)

    def __str__(self) -> str:
        """What it does to a Box, for the log; empty for choices."""
        if not isinstance(self.space, Box):
            return ""
        if self.is_bounded.all():
            return "scaled from [-1, 1]"
        num = int(self.is_bounded.sum())
        return f"{num} of {self.is_bounded.size} scaled from [-1, 1]" if num else "not scaled"


def mask_in(info: Mapping[str, Any], space: gymnasium.Space, *, ended: bool = False) -> np.ndarray | None:
    """The choices that an environment's info allows: bool [sum of `num_choices`]; None if it has no mask.

    If the episode has `ended`, no action follows, and a mask without choices allows all. Raises ValueError if the mask
    does not fit the space, or allows nothing; the message begins with "an action_mask".
    """
    if (given := info.get("action_mask")) is None:
        return None
    choices = num_choices(space)
    if not len(choices):
        raise ValueError(f"an action_mask for actions {space}, which have no choices")
    mask = _flat(given)
    if mask.shape != (choices.sum(),):
        raise ValueError(f"an action_mask of {len(mask)} values, {space} has {choices.sum()} choices")
    if mask.dtype.kind not in "biuf" or not np.isin(mask, (0, 1)).all():
        raise ValueError(f"an action_mask {mask}, must be of 0 and 1")
    if all(part.any() for part in np.split(mask, choices.cumsum()[:-1])):
        return mask.astype(np.bool_)
    if not ended:
        raise ValueError("an action_mask that allows no action")
    return np.ones(mask.shape, np.bool_)


def _flat(mask: Any) -> np.ndarray:
    """A mask, or those of several parts, as one array."""
    is_nested = isinstance(mask, tuple | list) and len(mask)
    return np.concatenate([_flat(part) for part in mask]) if is_nested else np.ravel(mask)


def allows(space: gymnasium.Space, mask: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """Whether masks [N, choices] allow the actions [N, ...]: bool [N]."""
    choices = num_choices(space)
    chosen = actions.reshape(len(mask), -1) + (choices.cumsum() - choices)
    return np.asarray(np.take_along_axis(mask, chosen.astype(np.int64), axis=1).all(axis=1))


def allowed_action(space: gymnasium.Space, mask: np.ndarray, choose: Callable[[np.ndarray], Any]) -> Any:
    """An action that a mask [choices] allows; `choose` picks each part of it from the allowed choices."""
    parts = np.split(mask, num_choices(space).cumsum()[:-1])
    chosen = [choose(np.flatnonzero(part)) for part in parts]
    return np.array(chosen, space.dtype).reshape(space.shape or ())[()]


def env_seed(seed: int, env: int, seedings: int = 0) -> int:
    """Seed of environment `env` after it was seeded `seedings` times; the first is `seed + env`."""
    if seedings == 0:
        return (seed + env) % SEEDS
    return int(np.random.SeedSequence((seed, env, seedings)).generate_state(1)[0]) % SEEDS


class GuardedEnvs(VectorWrapper):
    """Seeds the first games, refuses actions outside the action space, on which ALE would hang, and masked ones.

    Discrete actions arrive as int64 [N], others in the dtype of their space [N, *shape]. Where episodes ended,
    `infos["final_mask"]` has the masks of their final observations, and elsewhere what allows all. The first `reset()`
    seeds environment i with (seed + i) % 2^31. `beat` is called after each `reset` and `step`.
    """

    mask: np.ndarray | None = None  # of the newest observations: bool [N, choices]; None: environments without masks

    def __init__(self, env: VectorEnv, seed: int, beat: Callable[[], object] = lambda: None):
        super().__init__(env)
        self.seed, self.is_new, self.beat = seed, True, beat
        self.space = env.single_action_space  # cached: gymnasium's property goes through all wrappers
        self.low, self.high = bounds(self.space)
        self.shape = env.num_envs, *self.low.shape  # of actions

    def reset(self, *, seed=None, options=None):
        """Start new games: the first time with the seed, later with the environments' own random numbers."""
        if seed is not None or options:
            raise ValueError("the seed is that of make_vec_env; reset_some(which) resets some of the environments")
        seedings = np.zeros(self.num_envs, np.int64) if self.is_new else None
        self.is_new = False
        return self.reset_some(np.ones(self.num_envs, np.bool_), seedings)

    def reset_some(self, which: np.ndarray, seedings: np.ndarray | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Reset the environments in `which`, bool [N]; with `seedings` [N], how often each was seeded, seed them."""
        seeds: Any = None
        if seedings is not None:
            seeds = [env_seed(self.seed, env, count) for env, count in enumerate(seedings.tolist())]
            if isinstance(self.unwrapped, AtariVectorEnv):  # it takes a seed for each that is reset, others for all
                seeds = np.array(seeds)[which]
        return self._kept(*self.env.reset(seed=seeds, options=None if which.all() else {"reset_mask": which}))

    def step(self, actions: np.ndarray):
        self._check(actions)
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        self._kept(obs, infos)
        if self.mask is not None and "final_info" in infos:
            final = infos["final_info"]
            infos["final_mask"] = np.where(final["_action_mask"][:, None], final["action_mask"], True)
        return obs, rewards, terminated, truncated, infos

    def _kept(self, obs: np.ndarray, infos: dict[str, Any]) -> tuple[np.ndarray, dict[str, Any]]:
        """Keep the masks of the environments that have given an observation, and count a heartbeat."""
        self.beat()
        if "action_mask" in infos:
            given = infos["_action_mask"]
            self.mask = np.ones_like(infos["action_mask"]) if self.mask is None else self.mask.copy()
            self.mask[given] = infos["action_mask"][given]
        return obs, infos

    def _check(self, actions: np.ndarray) -> None:
        if actions.shape != self.shape:
            raise ValueError(f"actions have shape {actions.shape}, must be {self.shape}")
        if not ((actions >= self.low) & (actions <= self.high)).all():  # false for NaN too
            raise ValueError(f"actions {actions} are outside {self.space}")
        if self.mask is not None and not (allowed := allows(self.space, self.mask, actions)).all():
            env = int(np.flatnonzero(~allowed)[0])
            raise ValueError(f"action {actions[env]} is masked in environment {env}")
