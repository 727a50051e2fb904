"""The settings of a run: every default and every bound.

Settings are frozen and validated; a derived number is never a setting. `settings` reads them.
"""

# DOC presets: Named starting points for the settings; what they leave out is the default of `config`.
# DOC settings: How settings are read and changed: presets, YAML text and key=value pairs to `Config`.
#
# An unknown key is an error that names it. Files are read elsewhere.
#

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from brats_seg.errors import ConfigError

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Size = tuple[int, int, int]
TaskName = Literal["segmentation", "reconstruction"]
NETWORKS = ("unet", "notebook", "segresnet", "vae-unet", "dynunet", "swin-unetr", "autoencoder")
"""Networks with a short name; any other is given by its dotted name."""
OVERLAP = 0.5
"""Default share that neighbouring windows have in common, in validation and prediction alike."""


def _parsed_size(value: object) -> object:
    """Take `[64, 64, 64]`, `64,64,64` or `whole`, with one message for everything else."""
    parts = value.split(",") if isinstance(value, str) and value != "whole" else value
    if value == "whole":
        return value
    if isinstance(parts, list | tuple) and len(parts) == 3:
        sizes = [str(part).strip() for part in parts]
        if all(size.isdigit() and int(size) > 0 for size in sizes):
            return tuple(int(size) for size in sizes)
    msg = "expected three positive whole numbers such as 64,64,64, or 'whole'"
    raise ValueError(msg)


def _network_name(name: str) -> str:
    if name not in NETWORKS and not is_dotted_name(name):
        msg = (
            f"expected one of {', '.join(NETWORKS)}, or the dotted name of a class or function, "
            "such as monai.networks.nets.UNet"
        )
        raise ValueError(msg)
    return name


def _dotted_name(name: str) -> str:
    if not is_dotted_name(name):
        msg = "expected the dotted name of a class or function, such as monai.losses.FocalLoss"
        raise ValueError(msg)
    return name


def is_dotted_name(name: str) -> bool:
    """Return whether a name has the form `package.module.attribute`."""
    return "." in name and all(part.isidentifier() for part in name.split("."))


DottedName = Annotated[str, AfterValidator(_dotted_name)]


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


class CasesConfig(Section):
    """Which cases are used, and how their label maps are read."""

    labels: Literal["brats2017", "brats2023", "brats2024", "brats2024-ped", "msd"] | None = None
    """Label convention of all cases; null detects it from release and voxels."""
    skip_bad: bool = False
    """Whether cases with problems are left out instead of ending the command."""


class FoldConfig(Section):
    """How patients are shared out."""

    n_folds: Annotated[int, Field(ge=2)] = 5
    """Groups of patients; each is held out once."""
    scheme: Literal["stratified", "notebook"] = "stratified"
    """`stratified`: by grade and age, else by tumour volume. `notebook`: 7 folds by decade of age."""
    seed: int = 55
    """The same seed gives the same folds, whatever the order of the cases."""


class StoreConfig(Section):
    """How prepared cases lie on disk."""

    compressed: bool = False
    """About a third of the disk for slower reading; needs the extra `compressed`."""


class PatchConfig(Section):
    """What the network sees of a case while it learns."""

    size: Annotated[Size | Literal["whole"], BeforeValidator(_parsed_size)] = (128, 128, 128)
    """Voxels along X, Y, Z; `whole` takes the brain crop of each case."""
    foreground: Fraction = 1 / 3
    """Share of the patches that are placed on tumour (a third in nnU-Net)."""
    per_case: PositiveInt = 1
    """Patches drawn from a case in an epoch."""


class ModelConfig(Section):
    """Which network."""

    name: Annotated[str, AfterValidator(_network_name)] = "unet"
    """`unet` and `autoencoder` are our own, `notebook` is the Kaggle notebook's, the others MONAI's.

    Any other network is given by its dotted name, for example `monai.networks.nets.UNet`.
    """
    arguments: dict[str, Any] = {}
    """Keyword arguments of a network that is given by its dotted name."""
    widths: tuple[PositiveInt, ...] = (32, 64, 128, 256, 320, 320)
    """Channels of each level of `unet` and `dynunet`; levels that the patch is too small for are left out."""
    deep_supervision: bool = True
    """Whether coarser levels of `unet` are taught as well."""
    latent: Annotated[PositiveInt, Field(multiple_of=64)] = 512
    """Numbers that `autoencoder` makes of an image: the same for each of 64 places."""

    @property
    def task(self) -> TaskName:
        """What the network is taught."""
        return "reconstruction" if self.name == "autoencoder" else "segmentation"


class LossConfig(Section):
    """Soft Dice and binary cross-entropy per region; the autoencoder's is the squared error."""

    dice: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the mean of 1 - soft Dice over regions."""
    bce: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the mean binary cross-entropy over regions and voxels."""
    batch_dice: bool = False
    """Whether Dice is taken of the effective batch as a whole instead of patch by patch."""
    name: DottedName | None = None
    """Dotted name of another loss, for example `monai.losses.DiceFocalLoss`; null for the one above."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of a loss that is given by its dotted name."""
    ssim: Annotated[float, Field(ge=0)] = 0.0
    """Weight of 1 - structural similarity beside the squared error of `autoencoder`."""


class OptimizerConfig(Section):
    """How weights move."""

    name: Literal["adam", "adamw", "sgd"] = "adamw"
    """`sgd` has Nesterov momentum."""
    lr: PositiveFloat = 3e-4
    """Learning rate at the start, after warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 1e-5
    """Decoupled in `adamw`, added to the gradient elsewhere."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Of `sgd`."""
    clip_norm: PositiveFloat | None = 12.0
    """Longest gradient of an effective batch; null leaves it alone."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay per step of the moving average of the weights; null keeps none."""


class ScheduleConfig(Section):
    """How the learning rate changes."""

    name: Literal["plateau", "cosine", "polynomial", "constant"] = "plateau"
    """`plateau` answers to the watched value; the others count optimizer steps."""
    watch: Literal["val_loss", "val_dice"] = "val_loss"
    """What a plateau is a plateau of: the loss is to fall, the mean Dice to rise."""
    patience: Annotated[int, Field(ge=0)] = 2
    """Validations without improvement that a plateau waits for."""
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """What a plateau multiplies the learning rate by."""
    minimum_lr: Annotated[float, Field(ge=0)] = 1e-7
    """The learning rate never falls below it."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises from near zero."""


class TrainingConfig(Section):
    """The epoch loop."""

    n_epochs: PositiveInt = 100
    """Passes over the training cases."""
    effective_batch: PositiveInt | dict[Annotated[int, Field(ge=0)], PositiveInt] = 4
    """Patches behind one optimizer step; `{0: 8, 40: 16}` changes it at epochs."""
    micro_batch: PositiveInt = 1
    """Patches in one forward pass: what fits in memory."""
    precision: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """`auto` takes what the device computes natively: bf16, else fp16 on a GPU, else fp32."""
    memory: Literal["auto"] | None = None
    """`auto` starts a run on the first rung predicted to fit in what is free; null on the first."""
    half_if_needed: bool = False
    """Whether float32 may give way to half precision when memory runs out on every other mode."""
    device: str = "auto"
    """`auto` takes the GPU when there is one; else `cpu`, `cuda`, `cuda:1`, `mps`."""
    n_workers: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Processes that make patches; results do not depend on it."""
    seed: int = 55
    """All randomness is a function of it and of epoch, case and draw."""
    augment: Literal["none", "light", "full"] = "light"
    """`light`: mirror, brightness, contrast, noise. `full`: the list of nnU-Net."""
    transforms: tuple[DottedName, ...] = ()
    """Dotted names of MONAI dictionary transforms (or functions that return one), applied after `augment`."""
    checkpoint_minutes: PositiveFloat = 10.0
    """Longest time of training that a power cut can cost."""

    @field_validator("effective_batch")
    @classmethod
    def _starts_at_zero(cls, value: int | dict[int, int]) -> int | dict[int, int]:
        if isinstance(value, dict) and 0 not in value:
            msg = "expected a value for epoch 0"
            raise ValueError(msg)
        return value

    def effective_batch_at(self, epoch: int) -> int:
        """Return the patches behind one step in that epoch."""
        if isinstance(self.effective_batch, int):
            return self.effective_batch
        return self.effective_batch[max(e for e in self.effective_batch if e <= epoch)]


class ValidationConfig(Section):
    """How held-out cases are scored during training."""

    every: PositiveInt = 1
    """Epochs from one validation on whole cases to the next; the last epoch always has one."""
    patches_between: bool = False
    """Whether the epochs between score patches of the held-out cases."""
    overlap: Annotated[float, Field(ge=0, lt=1)] = OVERLAP
    """Share that neighbouring windows have in common."""
    watch: Literal["val_loss", "val_dice"] = "val_dice"
    """What `best.pt` is the best of."""


class Config(Section):
    """All settings of a run."""

    cases: CasesConfig = CasesConfig()
    folds: FoldConfig = FoldConfig()
    store: StoreConfig = StoreConfig()
    patch: PatchConfig = PatchConfig()
    model: ModelConfig = ModelConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    training: TrainingConfig = TrainingConfig()
    validation: ValidationConfig = ValidationConfig()

    @model_validator(mode="after")
    def _whole_crops_have_many_sizes(self) -> Self:
        if self.patch.size == "whole" and self.training.micro_batch > 1:
            msg = (
                f"training.micro_batch is {self.training.micro_batch} with patch.size 'whole': "
                "brain crops differ in size, so expected a micro-batch of 1"
            )
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _settings_suit_the_task(self) -> Self:
        # what a task has no use for would be left aside in silence
        if self.model.task == "segmentation":
            wrong = ["loss.ssim=0"] * (self.loss.ssim > 0)
        else:
            wrong = ["loss.batch_dice=false"] * self.loss.batch_dice
            wrong += ["schedule.watch=val_loss"] * (self.schedule.watch == "val_dice")
            wrong += ["validation.watch=val_loss"] * (self.validation.watch == "val_dice")
        if wrong:
            msg = f"with model.name {self.model.name!r}, expected {', '.join(wrong)}"
            raise ValueError(msg)
        return self

    def to_yaml(self) -> str:
        """Return every setting, in the form that `load_config` reads."""
        return yaml.safe_dump(_plain(self.model_dump()), sort_keys=False)


def _plain(value: Any) -> Any:
    """Turn tuples into lists, which is all that YAML lacks."""
    if isinstance(value, dict):
        return {key: _plain(below) for key, below in value.items()}
    return list(value) if isinstance(value, tuple) else value


OF_MODEL: dict[str, dict[str, Any]] = {
    # a brain is encoded whole; what is altered would have to be reconstructed as well
    "autoencoder": {
        "patch": {"size": "whole", "foreground": 0.0, "per_case": 1},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "schedule": {"watch": "val_loss", "patience": 5},
        "training": {"effective_batch": 2, "augment": "none"},
        "validation": {"watch": "val_loss"},
    },
}
"""What a `model.name` starts from instead, whatever the preset."""
PRESETS: dict[str, dict[str, Any]] = {
    # phantom cases on two CPU cores, in minutes
    "demo": {
        "folds": {"n_folds": 3},
        "patch": {"size": [32, 32, 32], "foreground": 0.5, "per_case": 4},
        "model": {"widths": [12, 24, 48], "deep_supervision": False},
        "optimizer": {"lr": 3e-3},
        "training": {"n_epochs": 20, "effective_batch": 2},
    },
    # one 16 GB GPU without bf16, sessions of 12 hours
    "kaggle-t4": {
        "patch": {"size": [128, 128, 128], "per_case": 2},
        "training": {"n_epochs": 100, "effective_batch": 4, "augment": "light"},
        "validation": {"every": 5},
    },
    # the network and recipe of the Kaggle notebook, on patches instead of whole volumes
    "notebook": {
        "folds": {"n_folds": 7, "scheme": "notebook"},
        "patch": {"size": [128, 128, 128], "foreground": 0.0},
        "model": {"name": "notebook"},
        "optimizer": {"name": "adam", "lr": 5e-4, "weight_decay": 0.0, "clip_norm": None},
        "training": {"n_epochs": 50, "effective_batch": 4, "augment": "none"},
        "validation": {"watch": "val_loss"},
    },
    # the recipe of nnU-Net for those with the time
    "full": {
        "patch": {"size": [128, 128, 128], "per_case": 2},
        "optimizer": {"name": "sgd", "lr": 1e-2, "weight_decay": 3e-5},
        "schedule": {"name": "polynomial"},
        "training": {"n_epochs": 300, "effective_batch": 8, "augment": "full"},
        "validation": {"every": 10},
    },
}


def load_config(
    *,
    preset: str | None = None,
    text: str = "",
    assignments: Iterable[str] = (),
    values: Mapping[str, Any] | None = None,
) -> Config:
    """Build the settings of a run; each source overrides the ones before it.

    The order is: defaults, preset, the defaults of the network, YAML text, assignments, values.

    Args:
        preset: A name in `PRESETS`.
        text: The content of a YAML file.
        assignments: `key=value` texts, where the value is YAML: `training.n_epochs=10`.
        values: Values by dotted key: `{"training.n_epochs": 10}`.

    Raises:
        ConfigError: A key is unknown or a value is not allowed; the message names the key, the
            value and what was expected.

    Example:
        >>> config = load_config(preset="demo", values={"training.n_epochs": 3})
        >>> config.training.n_epochs, config.patch.size
        (3, (32, 32, 32))
    """
    given: dict[str, Any] = {}
    _merge(given, _parsed(text, "the configuration file"))
    for assignment in assignments:
        _merge(given, _assigned(assignment))
    for key, value in (values or {}).items():
        _merge(given, _nested(key, value))
    settings: dict[str, Any] = {}
    if preset is not None:
        _merge(settings, _preset(preset))
    _merge(settings, _of_model(given))
    _merge(settings, given)
    return config_of(settings)


def config_of(settings: Mapping[str, Any]) -> Config:
    """Validate settings that are already a mapping, such as those of a checkpoint."""
    model = settings.get("model")
    if isinstance(model, Mapping) and model.get("name") == "segresnet-vae":  # in older runs
        settings = {**settings, "model": {**model, "name": "vae-unet"}}
    try:
        return Config.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(_explained(error)) from None


def differing_settings(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return every setting that differs, by its dotted name, with the old and the new value."""
    before, after = _flat(old.model_dump()), _flat(new.model_dump())
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}


def _of_model(given: Mapping[str, Any]) -> dict[str, Any]:
    model = given.get("model")
    # what is no mapping, or no name, is refused when all is checked
    name = model.get("name") if isinstance(model, dict) else None
    return OF_MODEL.get(name, {}) if isinstance(name, str) else {}


def _preset(name: str) -> dict[str, Any]:
    if name not in PRESETS:
        msg = f"preset {name!r} is unknown; there are {', '.join(PRESETS)}"
        raise ConfigError(msg)
    return PRESETS[name]


def _parsed(text: str, origin: str) -> dict[str, Any]:
    try:
        value = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        msg = f"{origin} is not YAML: {error}"
        raise ConfigError(msg) from None
    if not isinstance(value, dict):
        msg = f"{origin} holds {type(value).__name__}; expected settings as key: value"
        raise ConfigError(msg)
    return value


def _assigned(assignment: str) -> dict[str, Any]:
    key, equals, text = assignment.partition("=")
    if not equals:
        msg = f"--set {assignment!r} has no '='; expected for example training.n_epochs=10"
        raise ConfigError(msg)
    return _nested(key, _parsed(f"value: {text}", f"--set {assignment}")["value"])


def _nested(key: str, value: Any) -> dict[str, Any]:
    """Return `{"a": {"b": value}}` for the key `a.b`."""
    for part in reversed(key.strip().split(".")):
        value = {part: value}
    return dict(value)


def _merge(settings: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        below = settings.get(key)
        # a schedule by epoch, {0: 8}, is one value: only sections, whose keys are words, are merged
        if isinstance(below, dict) and isinstance(value, dict) and all(map(_is_word, value)):
            _merge(below, value)
        else:
            settings[key] = _copied(value)


def _is_word(key: object) -> bool:
    return isinstance(key, str)


def _copied(value: Any) -> Any:
    return (
        {key: _copied(below) for key, below in value.items()} if isinstance(value, dict) else value
    )


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section, values in settings.items()
        for key, value in values.items()
    }


def _explained(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(f"setting {key} is unknown; {_alternatives(problem['loc'])}")
        else:
            what = problem["msg"].removeprefix("Value error, ")
            lines.append(f"setting {key}: {what} (got {problem['input']!r})" if key else what)
    return "\n".join(lines)


def _alternatives(location: tuple[int | str, ...]) -> str:
    section: Any = Config
    for part in location[:-1]:
        section = section.model_fields[str(part)].annotation
    return f"there are {', '.join(section.model_fields)}"
