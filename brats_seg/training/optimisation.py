"""Update weights from gradients: the optimizers, Muon for filters among them, and the learning rate.

Muon replaces the momentum of a matrix by the nearest matrix with orthogonal rows or columns, so that an
update changes all directions equally (Jordan 2024, https://kellerjordan.github.io/posts/muon/).
`torch.optim.Muon` takes only matrices. This one flattens filters to matrices and updates all other
parameters, such as biases, the parameters of norms and the layers of few channels that give the logits,
as AdamW does.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from brats_seg.config import OptimizerConfig, ScheduleConfig

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
    result = (factors @ wide).to(matrix.dtype)
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
    return _OPTIMIZERS[config.name](parameters, lr=config.lr, weight_decay=config.weight_decay)


PLATEAU_FACTOR = 0.1
"""Factor by which `plateau` lowers the learning rate."""
LOWEST_RATE = 1e-7
_CURVES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    # the exponent of nnU-Net (Isensee 2021)
    "polynomial": lambda progress: (1 - progress) ** 0.9,
}


class Schedule:
    """Sets the learning rate over a run, by its optimizer steps or by its validation loss."""

    def __init__(self, optimizer: Optimizer, config: ScheduleConfig) -> None:
        """Set the rate of the first step."""
        self.n_steps: int | None = None
        """Steps of the run; as long as it is None the rate does not fall."""
        self._config = config
        self._floor = min(LOWEST_RATE / float(optimizer.param_groups[0]["lr"]), 1.0)
        self._scheduler: LambdaLR | ReduceLROnPlateau
        if config.name == "plateau":
            self._scheduler = ReduceLROnPlateau(
                optimizer, patience=config.patience, factor=PLATEAU_FACTOR, min_lr=LOWEST_RATE
            )
        else:
            self._scheduler = LambdaLR(optimizer, lambda step: self._factor(step))

    def after_step(self) -> None:
        """Count an optimizer step that updated the weights."""
        if isinstance(self._scheduler, LambdaLR):
            self._scheduler.step()

    def after_validation(self, loss: float) -> None:
        """Let `plateau` lower the rate after more than `patience` validations without improvement."""
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(loss)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain values, without the number of steps."""
        return self._scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self._scheduler.load_state_dict(state)

    def _factor(self, step: int) -> float:
        n_warmup = self._config.warmup_steps
        if step < n_warmup:
            return (step + 1) / (n_warmup + 1)
        if self.n_steps is None:
            return 1.0
        progress = (step - n_warmup) / max(self.n_steps - n_warmup, 1)
        return max(_CURVES[self._config.name](min(progress, 1.0)), self._floor)
