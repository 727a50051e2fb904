"""Define the optimizers and the learning rate over a run.

Muon replaces the momentum of a matrix by the nearest matrix with orthogonal rows or columns, so that an
update changes all directions equally (Jordan 2024, https://kellerjordan.github.io/posts/muon/).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from brats_seg.config import OptimizerConfig, ScheduleConfig
from brats_seg.errors import ConfigError

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic polynomial that brings singular values close to one (Jordan 2024)."""
N_ITERATIONS = 5
MOMENTUM = 0.95
"""Share of the last momentum that is kept (Jordan 2024)."""
MATCHED_RMS = 0.2
"""Root mean square of the update of a matrix, in learning rates: about that of AdamW (Liu 2025, arXiv
2502.16982)."""
FEWEST_ROWS = 8
"""Rows and columns below which a parameter is updated by AdamW: three orthogonal rows mean little."""
BETAS = (0.9, 0.999)
EPSILON = 1e-8


class Muon(Optimizer):
    """Update filters by their orthogonal momentum, and all other parameters as AdamW.

    `torch.optim.Muon` takes only matrices. This one flattens filters to matrices. Biases, the parameters of
    norms and the layers of few channels that give the logits are updated as AdamW does.
    Its state is one number for each number of a filter; that of AdamW is two.

    Example:
        >>> network = nn.Conv3d(8, 16, 3)
        >>> optimizer = Muon(network.parameters(), lr=1e-2)
        >>> network(torch.ones(1, 8, 4, 4, 4)).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[network.weight]), sorted(optimizer.state[network.bias])
        (['momentum'], ['mean', 'square', 'step'])
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, lr: float, weight_decay: float = 0.0
    ) -> None:
        """Take the parameters.

        Args:
            parameters: Parameters; those of two axes and more are filters if they are large enough.
            lr: Learning rate.
            weight_decay: Decoupled weight decay, as in AdamW.
        """
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; the closure is called first, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, decay = float(group["lr"]), float(group["weight_decay"])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - lr * decay)
                    update = self._update_filter if _is_filter(parameter) else self._update_as_adamw
                    update(parameter, parameter.grad, lr)
        return loss

    def _update_filter(self, filters: Tensor, gradient: Tensor, lr: float) -> None:
        state = self.state[filters]
        if not state:
            state["momentum"] = torch.zeros_like(filters)
        state["momentum"].lerp_(gradient, 1 - MOMENTUM)
        # Nesterov's correction: the momentum that the next step would have
        ahead = gradient.lerp(state["momentum"], MOMENTUM).flatten(1)
        size = MATCHED_RMS * math.sqrt(max(ahead.shape))
        filters.add_(orthogonal(ahead).reshape(filters.shape), alpha=-lr * size)

    def _update_as_adamw(self, parameter: Tensor, gradient: Tensor, lr: float) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["mean"] = torch.zeros_like(parameter)
            state["square"] = torch.zeros_like(parameter)
        state["step"] += 1
        state["mean"].lerp_(gradient, 1 - BETAS[0])
        state["square"].lerp_(gradient.square(), 1 - BETAS[1])
        of_mean, of_square = (1 - beta ** state["step"] for beta in BETAS)
        root = (state["square"] / of_square).sqrt_().add_(EPSILON)
        parameter.addcdiv_(state["mean"], root, value=-lr / of_mean)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return about the nearest matrix with orthogonal rows, or columns where those are fewer.

    Singular values become 0.7 to 1.2, except those below a thousandth of the norm. The iteration of
    Newton and Schulz multiplies the matrix by polynomials of its product with itself. They are
    multiplied with each other first, because that product is small where filters are long.
    """
    wide = (matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T).float()
    wide = wide / wide.norm().clamp(min=1e-7)
    product = wide @ wide.T
    identity = torch.eye(len(product), dtype=product.dtype, device=product.device)
    factors = identity
    a, b, c = COEFFICIENTS
    for _ in range(N_ITERATIONS):
        factor = a * identity + b * product + c * (product @ product)
        factors = factor @ factors
        product = factor @ product @ factor
    result = factors @ wide
    return result if matrix.shape[0] <= matrix.shape[1] else result.T


def _is_filter(parameter: Tensor) -> bool:
    return parameter.ndim > 1 and min(parameter.flatten(1).shape) >= FEWEST_ROWS


_OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "muon": Muon,
    # the momentum of nnU-Net (Isensee 2021)
    "sgd": partial(torch.optim.SGD, momentum=0.99, nesterov=True),
}


def build_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> Optimizer:
    """Return the optimizer of the settings, for the given parameters."""
    parameters = list(parameters)
    if not any(parameter.requires_grad for parameter in parameters):
        msg = "neither the network nor the loss has parameters that require a gradient: nothing can be trained"
        raise ConfigError(msg)
    return _OPTIMIZERS[config.name](parameters, lr=config.lr, weight_decay=config.weight_decay)


PLATEAU_FACTOR = 0.1
"""Factor by which `plateau` lowers the learning rate."""
_LEAST_GAIN = 1e-4
"""Share by which a loss must be below the lowest one to count as an improvement."""
LOWEST_RATE = 1e-7
_CURVES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    # the exponent of nnU-Net (Isensee 2021)
    "polynomial": lambda progress: (1 - progress) ** 0.9,
}


@dataclass(kw_only=True, slots=True)
class _Position:
    """What changes in a schedule over a run."""

    step: int
    """Optimizer steps that updated the weights."""
    lowest_loss: float
    n_worse: int
    """Losses in a row that were not below the lowest."""
    lowered: float
    """Factor of the rate after a start from weights, and after all plateaus."""


class Schedule:
    """Sets the learning rate over a run, by its optimizer steps and its validation loss."""

    def __init__(self, optimizer: Optimizer, config: ScheduleConfig) -> None:
        """Set the rate of the first step of a run whose length is not known."""
        self._config, self._optimizer = config, optimizer
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._at = _Position(step=0, lowest_loss=math.inf, n_worse=0, lowered=1.0)
        self.set_length(None)

    def set_length(self, n_steps: int | None) -> None:
        """Set the steps of the run; as long as there is no number only a plateau lowers the rate."""
        self._n_steps = n_steps
        self._set_rates()

    def lower_to(self, factor: float) -> None:
        """Multiply the rates of the settings by a factor, from this step on."""
        self._at.lowered = factor
        self._set_rates()

    def after_step(self) -> None:
        """Count an optimizer step that updated the weights."""
        self._at.step += 1
        self._set_rates()

    def after_validation(self, loss: float) -> None:
        """Let `plateau` lower the rate after more than `patience` losses without improvement."""
        if self._config.name != "plateau":
            return
        at = self._at
        at.n_worse += 1
        if loss < at.lowest_loss * (1 - _LEAST_GAIN):
            at.lowest_loss, at.n_worse = loss, 0
        if at.n_worse > self._config.patience:
            at.n_worse = 0
            self.lower_to(at.lowered * PLATEAU_FACTOR)

    def state_dict(self) -> dict[str, float]:
        """Return the state in plain values, without the number of steps."""
        return asdict(self._at)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; the rate follows with `set_length`."""
        self._at = _Position(**state)

    def _set_rates(self) -> None:
        factor = self._at.lowered * self._curve()
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = max(rate * factor, min(LOWEST_RATE, rate))

    def _curve(self) -> float:
        config, at, n_warmup = self._config, self._at, self._config.warmup_steps
        if at.step < n_warmup:
            return (at.step + 1) / (n_warmup + 1)
        n_steps = self._n_steps or math.inf
        left = 1 - min((at.step - n_warmup) / max(n_steps - n_warmup, 1), 1.0)
        if config.name == "plateau":
            return left / config.cool_down if left < config.cool_down else 1.0
        return _CURVES[config.name](1 - left)
