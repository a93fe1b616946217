"""Two implementations of one attention with the same weights and inputs: how far apart are outputs and gradients?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch

Ours = Callable[[dict[str, jax.Array]], jax.Array]
Theirs = Callable[[dict[str, torch.Tensor]], torch.Tensor]
Right = Literal["ours", "theirs", "neither", "open"]


@dataclasses.dataclass(frozen=True)
class Difference:
    """What two implementations mean differently.

    Attributes:
      what: theirs against ours, in a sentence.
      source: the line of the paper that decides, or where it is silent.
      right: who does as that line says; "open" where it says nothing, "neither" where it says a third thing.
      kept: why ours stays as it is, where it is not the one that is right.
    """

    what: str
    source: str
    right: Right
    kept: str = ""


@dataclasses.dataclass(frozen=True)
class Run:
    """One measurement: both functions of the same arrays, in float64.

    Attributes:
      what: how the two were set.
      inputs: name -> float64 array, tokens and weights alike; gradients are taken by all of them.
      ours, theirs: functions of those arrays that give `[batch, length, ...]`.
      real: bool `[batch, length]`, tokens that are no padding; outputs elsewhere don't count. None: all.
      differences: why the two differ; where there is none they must agree.
      tolerance: largest difference that rounding explains, as a share of the largest number.
    """

    what: str
    inputs: Mapping[str, np.ndarray]
    ours: Ours
    theirs: Theirs
    real: np.ndarray | None = None
    differences: tuple[Difference, ...] = ()
    tolerance: float = 1e-9

    def measure(self) -> dict[str, Any]:
        """Largest absolute differences, and whether they are as expected."""
        out, transposed = jax.vjp(self.ours, {name: jnp.asarray(x) for name, x in self.inputs.items()})
        weight = np.random.default_rng(1).standard_normal(out.shape)
        if self.real is not None:
            weight *= self.real.reshape(self.real.shape + (1,) * (out.ndim - 2))
        given = {name: torch.tensor(x, requires_grad=True) for name, x in self.inputs.items()}
        other = self.theirs(given).reshape(out.shape)
        other.backward(torch.tensor(weight))
        of_ours = jax.tree.map(np.asarray, transposed(jnp.asarray(weight, out.dtype))[0])
        of_theirs = {name: np.zeros(x.shape) if x.grad is None else x.grad.numpy() for name, x in given.items()}
        seen = np.broadcast_to(weight != 0, out.shape)
        pairs = {"output": (np.where(seen, out, 0), np.where(seen, other.detach().numpy(), 0))}
        pairs |= {f"gradient of {name}": (of_ours[name], of_theirs[name]) for name in self.inputs}
        apart = {name: float(np.abs(a - b).max()) for name, (a, b) in pairs.items()}
        size = {name: float(np.abs(a).max()) for name, (a, _) in pairs.items()}
        agree = all(apart[name] <= self.tolerance * max(size[name], 1.0) for name in apart)
        return {
            "what": self.what,
            "agree": agree,
            "as_expected": agree == (not self.differences),
            "largest_difference": apart,
            "largest_number": size,
            "differences": [dataclasses.asdict(one) for one in self.differences],
        }


@dataclasses.dataclass(frozen=True)
class Comparison:
    """An op of ours beside a package's.

    Attributes:
      variant: its name in `ATTENTIONS`, or in `POSITIONS`.
      package: as the registry has it.
      theirs: the class or function.
      runs: measurements; one that differs says why, and where it can be, one without those differences agrees.
      remarks: differences that no run shows, for instance that the other refuses an argument.
    """

    variant: str
    package: str
    theirs: str
    runs: tuple[Run, ...]
    remarks: tuple[Difference, ...] = ()

    def measure(self) -> dict[str, Any]:
        runs = [run.measure() for run in self.runs]
        remarks = [dataclasses.asdict(one) for one in self.remarks]
        named = {"variant": self.variant, "package": self.package, "theirs": self.theirs}
        return {**named, "runs": runs, "remarks": remarks}


def arrays(seed: int, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Normal numbers of the given shapes."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def projected(inputs: Mapping[str, Any], name: str, num_heads: int) -> Any:
    """`x [batch, length, width]` through PyTorch's linear layer `name`, `[batch, length, num_heads, depth]`."""
    out = inputs["x"] @ inputs[f"{name}.weight"].T
    out = out + inputs[f"{name}.bias"] if f"{name}.bias" in inputs else out
    return out.reshape(*out.shape[:2], num_heads, -1)


def weights_of(module: torch.nn.Module, seed: int, *leave: str) -> dict[str, np.ndarray]:
    """Random numbers for the parameters of a module, as large as layers draw them; not for those that `leave` names."""
    rng, found = np.random.default_rng(seed), {}
    for name, x in module.named_parameters():
        if not name.startswith(leave):
            found[name] = rng.standard_normal(tuple(x.shape)) / max(x.shape[-1], 1) ** 0.5
    return found


def call(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor], *args: Any, **options: Any) -> Any:
    """The module with those of the inputs that have its parameters' names for weights."""
    params = {name: inputs.get(name, x.detach()) for name, x in module.named_parameters()}
    return torch.func.functional_call(module, params, args, options)


def heads_first(x: Any) -> Any:
    """`[batch, length, heads, depth]` to `[batch, heads, length, depth]`, or back."""
    return x.swapaxes(1, 2)


def padding(real: np.ndarray) -> jax.Array:
    """Our mask of which keys are real, bool `[batch, 1, 1, length]`."""
    return jnp.asarray(real)[:, None, None]


def lengths(length: int, *real: int) -> np.ndarray:
    """Which tokens are real, bool `[batch, length]`, in examples of so many."""
    return np.arange(length) < np.array(real)[:, None]
