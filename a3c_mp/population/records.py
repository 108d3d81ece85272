"""A member as it travels between processes: its genome, nets and optimizer as one record in shared memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import gymnasium
import torch
from torch import Tensor, nn

from a3c_mp.algorithms import dqn
from a3c_mp.errors import ConfigError
from a3c_mp.nets.layers import is_image
from a3c_mp.population.genome import Genome, Range
from a3c_mp.population.growth import MemberState
from a3c_mp.processes.slots import Spec
from a3c_mp.run.preflight import check_system, probe_env

GENOME_BYTES = 512
"""longest genome as JSON"""
FIELDS = ("genome", "net", "target_net", "exp_avg", "exp_avg_sq", "adam_step")
"""names of a record's fields"""


class Spaces(NamedTuple):
    """Of one environment."""

    obs: gymnasium.Space
    action: gymnasium.Space


def find_spaces(env_id: str) -> Spaces:
    """Return the spaces of an environment. Raises ConfigError if it has images, or as `probe_env` does."""
    check_system()  # the population's memory comes before the run
    spaces = Spaces(*probe_env(env_id, dqn.ACTIONS))
    if is_image(spaces.obs):
        why = f"observations are images {spaces.obs.shape}, members need vectors"
        raise ConfigError("env-id", env_id, why, "choose another, or train_apex.py")
    return spaces


def make_net(spaces: Spaces, genome: Genome) -> Any:
    """Make a Q network with the architecture of a genome, random weights, and torch's random numbers as they were."""
    with torch.random.fork_rng(devices=[]):
        return dqn.make_net(spaces.obs, spaces.action, genome.hidden, genome.activation)


def make_state(spaces: Spaces, genome: Genome, adam_eps: float) -> MemberState:
    """Make a new member: random weights, the same ones in its target net, Adam without moments."""
    net = make_net(spaces, genome)
    target_net = make_net(spaces, genome).requires_grad_(False)
    target_net.load_state_dict(net.state_dict())
    return MemberState(net, target_net, make_optimizer(net, genome, adam_eps))


def make_optimizer(net: nn.Module, genome: Genome, adam_eps: float) -> torch.optim.Adam:
    return torch.optim.Adam(net.parameters(), lr=genome.learning_rate, eps=adam_eps, fused=True)


def record_spec(spaces: Spaces, ranges: Mapping[str, Range]) -> Spec:
    """Return shapes and dtypes of a record that has room for the largest net of these ranges."""
    hidden = (int(ranges["units"].high),) * int(ranges["layers"].high)
    with torch.device("meta"):
        net = dqn.make_net(spaces.obs, spaces.action, hidden)
    weights = sum(tensor.numel() for tensor in net.state_dict().values())
    trained = sum(parameter.numel() for parameter in net.parameters())
    sizes = (weights, weights, trained, trained, len(list(net.parameters())))
    floats = {name: ((size,), torch.float32) for name, size in zip(FIELDS[1:], sizes, strict=True)}
    return {"genome": ((GENOME_BYTES,), torch.uint8), **floats}


def write_member(record: Mapping[str, Tensor], genome: Genome, state: MemberState) -> None:
    """Write a member to a record; what it does not need of it becomes 0."""
    text = genome.to_json().encode()
    _fill(record["genome"], [torch.frombuffer(bytearray(text), dtype=torch.uint8)])
    _fill(record["net"], state.net.state_dict().values())
    _fill(record["target_net"], state.target_net.state_dict().values())
    moments = [state.optimizer.state.get(parameter) for parameter in state.net.parameters()]
    shapes = [torch.zeros_like(parameter) for parameter in state.net.parameters()]
    for name in ("exp_avg", "exp_avg_sq"):
        _fill(record[name], [zeros if m is None else m[name] for m, zeros in zip(moments, shapes, strict=True)])
    steps = [0.0 if m is None else float(m["step"]) for m in moments]
    _fill(record["adam_step"], [torch.tensor(steps)])


def read_member(record: Mapping[str, Tensor], spaces: Spaces, adam_eps: float) -> tuple[Genome, MemberState]:
    """Return the member in a record, in tensors of its own."""
    genome = read_genome(record)
    net, target_net, optimizer = state = make_state(spaces, genome, adam_eps)
    _restore(record["net"], net.state_dict().values())
    _restore(record["target_net"], target_net.state_dict().values())
    parameters = list(net.parameters())
    moments = {name: [torch.empty_like(parameter) for parameter in parameters] for name in ("exp_avg", "exp_avg_sq")}
    for name, tensors in moments.items():
        _restore(record[name], tensors)
    for i, parameter in enumerate(parameters):
        if step := float(record["adam_step"][i]):
            optimizer.state[parameter] = {
                "step": torch.tensor(step), "exp_avg": moments["exp_avg"][i], "exp_avg_sq": moments["exp_avg_sq"][i]
            }  # fmt: skip
    return genome, state


def read_genome(record: Mapping[str, Tensor]) -> Genome:
    return Genome.from_json(bytes(record["genome"].tolist()).rstrip(b"\0").decode())


def sha256_of_member(record: Mapping[str, Tensor]) -> str:
    """SHA-256 of all that a record holds of a member."""
    digest = hashlib.sha256()
    for name in FIELDS:
        digest.update(record[name].numpy().tobytes())
    return digest.hexdigest()


def _fill(field: Tensor, tensors: Iterable[Tensor]) -> None:
    values = torch.cat([tensor.detach().flatten() for tensor in tensors])
    field[: len(values)] = values
    field[len(values) :] = 0


@torch.no_grad()
def _restore(field: Tensor, tensors: Iterable[Tensor]) -> None:
    start = 0
    for tensor in tensors:
        tensor.copy_(field[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()
