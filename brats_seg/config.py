"""Settings of a run: defaults and bounds, how they are read from YAML and `key=value` texts, and described.

Every default stands here; `presets` has the settings to start from. Settings are frozen and validated by
pydantic; an unknown key is an error that names it. A short text can be endless as YAML, or nested too deeply
for Python, so that length, depth and aliases are checked before it is parsed.
"""

import re
import reprlib
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
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
from pydantic_core import ErrorDetails, to_jsonable_python

from brats_seg import presets
from brats_seg.errors import ConfigError, unknown_name

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
LONGEST_AXIS = 1024
"""Most voxels along an axis of a patch or a window: twice those of a scan."""
Length = Annotated[int, Field(gt=0, le=LONGEST_AXIS)]
Size = tuple[Length, Length, Length]
Width = Annotated[int, Field(gt=0, le=4096)]
"""Channels of a layer; the widest networks in use have 1024."""
VoxelEdge = Annotated[float, Field(ge=0.2, le=10)]
"""Millimetres; scanners make voxels of 0.4 to 7 mm an edge."""
VoxelSpacing = tuple[VoxelEdge, VoxelEdge, VoxelEdge]
Overlap = Annotated[float, Field(ge=0, lt=1)]
"""Share that neighbouring windows have in common."""
CubicMillimetres = Annotated[float, Field(ge=0, le=1e7)]
"""Volume of tissue: a head has about 5e6."""
Threshold = Annotated[float, Field(gt=0, lt=1)]
"""Probability between none and certainty, which would make all or no voxels tumour."""
OVERLAP = 0.5
"""Default share of a window that the next one overlaps, in validation and in prediction."""

LONGEST_YAML = 1 << 15
"""Characters of the longest text that is parsed as YAML; all settings together have 2,000."""
_DEEPEST_YAML = 20
"""Levels of lists and mappings in YAML; settings have three."""
_SIZE = re.compile(",".join([r"\s*0*([1-9][0-9]{0,8})\s*"] * 3))


def parse_size(value: object) -> object:
    """Parse `[64, 64, 64]`, `64,64,64` or `whole`; any other value gets one error message."""
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else value
    if text == "whole":
        return text
    if isinstance(text, str) and (sizes := _SIZE.fullmatch(text)):
        return tuple(map(int, sizes.groups()))
    msg = "expected three positive whole numbers such as 64,64,64, or 'whole'"
    raise ValueError(msg)


def _parse_list(value: object) -> object:
    """Parse `16,32` and a single number as a list; any other value is returned unchanged."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return [value] if isinstance(value, int | float) else value


def _path_or_none(value: object) -> object:
    return None if value == "none" else value


def _named(name: str, known: Sequence[str] = ()) -> str:
    if name in known or is_dotted_name(name):
        return name
    kinds = f"one of {', '.join(known)}, or the dotted name" if known else "the dotted name"
    msg = f"expected {kinds} of a class or function, such as package.module.Name"
    raise ValueError(msg)


def is_dotted_name(name: str) -> bool:
    """Return whether a name has the form `package.module.attribute`."""
    return "." in name and all(part.isidentifier() for part in name.split("."))


def import_by_name(name: str, setting: str) -> Any:
    """Import the class or function with a dotted name; an error names the setting."""
    try:
        return resolve_name(name)
    # a module of the user may raise anything while it is imported
    except Exception as error:
        msg = f"{setting} {name!r} cannot be imported: {type(error).__name__}: {error}; expected a package that is installed, or on PYTHONPATH"
        raise ConfigError(msg) from error


DottedName = Annotated[str, AfterValidator(_named)]
Arguments = Annotated[dict[str, Any], AfterValidator(to_jsonable_python)]
"""Keyword arguments as the files of a run and of an exported model hold them: a tuple is a list."""


class Section(BaseModel):
    """A frozen group of values that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ConfigSection(Section):
    """A section of `Config`; the text below each setting is its description."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class CasesConfig(ConfigSection):
    """Settings of the cases: label convention, and what happens to cases with problems."""

    labels: presets.ConventionName | None = None
    """Label convention of all cases; null detects it from the release and the voxels."""
    label_files: Annotated[str, Field(min_length=1)] | None = None
    """Pattern of the names of label maps, such as `*_tumour.nii.gz`, or of their paths; null finds them."""
    skip_bad: bool = False
    """Whether cases with problems are skipped; otherwise they end the command with an error."""


class FoldConfig(ConfigSection):
    """Settings of the folds."""

    n_folds: Annotated[int, Field(ge=2)] = 5
    """Number of folds; each is held out once."""
    scheme: Literal["stratified", "notebook"] = "stratified"
    """`stratified` balances grade and age, or tumour volume; `notebook` makes 7 folds by decade of age."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 55
    """Seed of the split; the order of the cases does not matter."""


class StoreConfig(ConfigSection):
    """Settings of the prepared cases on disk."""

    spacing_mm: Annotated[VoxelSpacing, BeforeValidator(_parse_list)] | None = None
    """Edges of a voxel along X, Y and Z (towards left, back and head) that cases are resampled to; null takes
    the median of the cases, which is 1 mm for BraTS."""


class PatchConfig(ConfigSection):
    """Settings of the training patches."""

    size: Annotated[Size | Literal["whole"], BeforeValidator(parse_size)] = (128, 128, 128)
    """Voxels along X, Y, Z; `whole` uses the brain crop of each case."""
    foreground: Fraction = 1 / 3
    """Share of the patches that are centred on tumour (a third in nnU-Net)."""
    per_case: PositiveInt = 1
    """Patches drawn from each case in an epoch."""


class ModelConfig(ConfigSection):
    """Settings of the network."""

    name: Annotated[str, AfterValidator(partial(_named, known=presets.NETWORKS))] = "unet"
    """`unet` and `autoencoder` are our own, `notebook` is the Kaggle notebook's, the others MONAI's.

    Any other network is given by its dotted name, for example `monai.networks.nets.UNet`.
    """
    arguments: Arguments = {}
    """Keyword arguments of a network that is given by its dotted name; `{}` drops those of a file."""
    widths: Annotated[
        tuple[Width, ...], Field(min_length=1, max_length=10), BeforeValidator(_parse_list)
    ] = (32, 64, 128, 256, 320, 320)
    """Channels of each level of `unet` and `dynunet`; levels that a small patch cannot have are dropped."""
    latent: Annotated[int, Field(gt=0, le=65536, multiple_of=64)] = 512
    """Length of the latent vector of `autoencoder`, a multiple of 64."""

    @property
    def task(self) -> presets.TaskName:
        """The task of the network: segmentation or reconstruction."""
        return "reconstruction" if self.name == "autoencoder" else "segmentation"


class StartConfig(ConfigSection):
    """Settings of the weights that a run starts from."""

    path: Annotated[str | None, BeforeValidator(_path_or_none)] = presets.SHIPPED_START
    """Run, checkpoint or exported model to take weights from; `none` draws all from the seed, and `auto` too,
    unless the network that the package carries has the very layers of this one."""
    lr_factor: PositiveFloat = 0.3
    """Factor of the learning rate of a run that starts from weights."""


class LossConfig(ConfigSection):
    """Settings of the loss: soft Dice and binary cross-entropy per region.

    The autoencoder is trained with the squared error instead.
    """

    dice: Annotated[float, Field(ge=0)] = 1.0
    """Weight of 1 - soft Dice, averaged over regions."""
    bce: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the binary cross-entropy, averaged over regions and voxels."""
    batch_dice: bool = False
    """Whether Dice is computed over the whole effective batch instead of patch by patch."""
    name: DottedName | None = None
    """Dotted name of another loss, for example `monai.losses.DiceFocalLoss`; null for Dice and BCE."""
    arguments: Arguments = {}
    """Keyword arguments of a loss that is given by its dotted name; `{}` drops those of a file."""


class OptimizerConfig(ConfigSection):
    """Settings of the optimizer."""

    name: Literal["adam", "adamw", "muon", "sgd"] = "muon"
    """Optimizer. `muon` makes the updates of filters orthogonal and treats all else as `adamw`; `sgd` uses
    Nesterov momentum of 0.99."""
    lr: PositiveFloat = presets.LEARNING_RATES["muon"]
    """Initial learning rate, reached at the end of the warm-up; where it is not given, 1e-2 for `muon` and
    `sgd`, 1e-3 for `adam` and `adamw`."""
    weight_decay: Annotated[float, Field(ge=0)] = 1e-5
    """Weight decay, decoupled in `adamw` and `muon`, and added to the gradient in the others."""
    clip_norm: PositiveFloat | None = 12.0
    """Largest norm of the gradient of an effective batch; null disables clipping."""

    @model_validator(mode="before")
    @classmethod
    def _rate_of_the_optimizer(cls, given: Any) -> Any:
        # the rate of one optimizer is ten times too large for another
        name = given.get("name") if isinstance(given, dict) else None
        # a name that is a list is refused by the validation of the field
        if name in tuple(presets.LEARNING_RATES) and given.get("lr") is None:
            return {**given, "lr": presets.LEARNING_RATES[name]}
        return given


class ScheduleConfig(ConfigSection):
    """Settings of the learning rate schedule."""

    name: Literal["plateau", "cosine", "polynomial", "constant"] = "plateau"
    """`plateau` lowers the rate to a tenth when the loss of held-out patches, or of held-out cases where these
    are validated after each epoch, stops improving; the others follow the number of optimizer steps."""
    patience: Annotated[int, Field(ge=0)] = 8
    """Epochs without improvement before `plateau` lowers the learning rate."""
    cool_down: Fraction = 0.5
    """Share of the steps of a run, at its end, in which the rate of `plateau` falls to zero."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps over which the learning rate rises from near zero."""


class TrainingConfig(ConfigSection):
    """Settings of the training loop."""

    n_epochs: PositiveInt = 100
    """Number of epochs: passes over the training cases."""
    hours: Annotated[float, Field(gt=0, le=10_000)] | None = None
    """Hours of a run in all its sessions: it has as many epochs as they hold, judged by the first one, in place
    of `n_epochs`."""
    effective_batch: PositiveInt | dict[Annotated[int, Field(ge=0)], PositiveInt] = 2
    """Patches per optimizer step; `{0: 8, 40: 16}` changes the number at epoch 40."""
    micro_batch: PositiveInt = 1
    """Patches per forward pass, as many as fit in memory."""
    precision: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """`auto` uses what the device computes natively: bf16, else fp16 on a GPU, else fp32."""
    device: str = "auto"
    """`auto` uses the GPU if there is one; otherwise `cpu`, `cuda`, `cuda:1` or `mps`."""
    n_workers: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Worker processes that load patches; results do not depend on the number."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 55
    """Seed of the run; all randomness is a function of seed, epoch, case and draw."""
    augment: Literal["none", "light", "full"] = "light"
    """`light`: mirroring, brightness, contrast, noise. `full`: the augmentation of nnU-Net."""
    modality_dropout: Fraction = 0.0
    """Probability that a patch loses modalities: one of the 14 subsets of one to three remains, all equally
    likely. A model trained with it predicts scans without some of their modalities."""
    transforms: Annotated[tuple[DottedName, ...], BeforeValidator(_parse_list)] = ()
    """Dotted names of functions or classes, called without arguments, that return a MONAI dictionary transform.

    It is applied to `image` and `label` after the transforms of `augment`.
    """
    checkpoint_minutes: PositiveFloat = 10.0
    """Longest time between two checkpoints, in minutes."""

    @field_validator("effective_batch")
    @classmethod
    def _starts_at_zero(cls, value: int | dict[int, int]) -> int | dict[int, int]:
        if isinstance(value, dict) and 0 not in value:
            msg = "expected a value for epoch 0"
            raise ValueError(msg)
        return value

    def effective_batch_at(self, epoch: int) -> int:
        """Return the number of patches per optimizer step in an epoch."""
        if isinstance(self.effective_batch, int):
            return self.effective_batch
        return self.effective_batch[max(e for e in self.effective_batch if e <= epoch)]


class ValidationConfig(ConfigSection):
    """Settings of the validation on held-out cases during training."""

    every: PositiveInt | Literal["auto"] = 1
    """Epochs between two validations on whole cases; the last epoch is always validated. `auto` takes as
    many as keep the validations below a quarter of the computation of the training."""
    overlap: Overlap = OVERLAP
    """Share of a window that the next one overlaps."""
    watch: Literal["val_loss", "val_dice"] = "val_dice"
    """Value by which `best.pt` is chosen."""


class TrackingConfig(ConfigSection):
    """Settings of the programs that show a run, besides its `history.csv`."""

    to: Annotated[tuple[Literal["tensorboard"], ...], BeforeValidator(_parse_list)] = ()
    """Trackers: `[]` for none, or `tensorboard`, which needs the extra of its name."""


class Config(Section):
    """All settings of a run."""

    cases: CasesConfig = CasesConfig()
    folds: FoldConfig = FoldConfig()
    store: StoreConfig = StoreConfig()
    patch: PatchConfig = PatchConfig()
    model: ModelConfig = ModelConfig()
    start: StartConfig = StartConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    training: TrainingConfig = TrainingConfig()
    validation: ValidationConfig = ValidationConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def _settings_fit_each_other(self) -> Self:
        loss, training, is_whole = self.loss, self.training, self.patch.size == "whole"
        is_autoencoder = self.model.task == "reconstruction"
        named_loss = LossConfig(name=loss.name, arguments=loss.arguments)
        rules = (
            # brain crops differ in size
            (is_whole and training.micro_batch > 1, "training.micro_batch=1 with patch.size=whole"),
            # what the task or the loss does not use would otherwise be ignored without a message
            (is_autoencoder and loss.batch_dice, "loss.batch_dice=false"),
            (not (loss.dice or loss.bce), "loss.dice or loss.bce above 0"),
            (loss.name and loss != named_loss, "no loss.dice, bce or batch_dice with loss.name"),
            (is_autoencoder and self.validation.watch == "val_dice", "validation.watch=val_loss"),
            # the image is its target too: the autoencoder would learn to leave modalities out
            (is_autoencoder and training.modality_dropout > 0, "training.modality_dropout=0"),
        )
        if wrong := [text for is_broken, text in rules if is_broken]:
            msg = f"model.name {self.model.name!r}: expected {', '.join(wrong)}"
            raise ValueError(msg)
        return self

    def to_yaml(self) -> str:
        """Return all settings as YAML text, which `load_config` reads."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False)


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
        (3, (40, 40, 40))
    """
    if preset is not None and preset not in presets.PRESETS:
        raise ConfigError(unknown_name(f"preset {preset!r}", preset, presets.PRESETS))
    origin = "the configuration file"
    given = parse_yaml(text, origin) or {}
    if not isinstance(given, dict):
        msg = f"{origin} holds {type(given).__name__}; expected settings as key: value"
        raise ConfigError(msg)
    of_values = (_nested(key, value) for key, value in (values or {}).items())
    for source in (*map(_parse_assignment, assignments), *of_values):
        _merge(given, source)
    settings: dict[str, Any] = {}
    for source in (presets.PRESETS[preset] if preset else {}, _network_defaults(given), given):
        _merge(settings, source)
    try:
        return Config.model_validate(settings)
    except ValidationError as error:
        unknown = [issue["loc"] for issue in error.errors() if issue["type"] == "extra_forbidden"]
        lines = [_unknown(location) for location in unknown] or validation_problems(error, depth=2)
        raise ConfigError("\n".join(f"setting {line}" for line in lines)) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One setting, as a table of settings shows it."""

    key: str
    """Dotted name, such as `training.n_epochs`."""
    value: str
    """Value as YAML."""
    allowed: str
    """Values that are allowed, in words."""
    meaning: str
    """First paragraph of its documentation."""


def describe_settings(config: Config) -> tuple[Setting, ...]:
    """Return all settings with their values, in the order in which they are declared."""
    schema, values = Config.model_json_schema()["$defs"], flat_settings(config)
    return tuple(
        Setting(
            key=f"{name}.{key}",
            value=_to_yaml(values[f"{name}.{key}"]),
            allowed=_allowed(schema[type(section).__name__]["properties"][key]),
            meaning=(field.description or "").partition("\n\n")[0],
        )
        for name, section in config
        for key, field in type(section).model_fields.items()
    )


def _to_yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return text.removesuffix("...\n").strip()


def _allowed(schema: Mapping[str, Any]) -> str:
    """Describe a JSON schema in words."""
    if "anyOf" in schema:
        return " or ".join(map(_allowed, schema["anyOf"]))
    if "const" in schema or "enum" in schema:
        return ", ".join(map(str, schema.get("enum", [schema.get("const")])))
    if schema["type"] == "array":
        items = schema.get("prefixItems", [schema.get("items")])
        return f"{f'{len(items)} x' if len(items) > 1 else 'list of'} {_allowed(items[0])}"
    bounds = [sign + str(schema[key]) for key, sign in _BOUNDS.items() if key in schema]
    return " ".join([schema["type"], " and ".join(bounds)]).strip()


_BOUNDS = {
    "exclusiveMinimum": "> ",
    "minimum": ">= ",
    "exclusiveMaximum": "< ",
    "maximum": "<= ",
    "multipleOf": "multiple of ",
}


def validation_problems(error: ValidationError, *, depth: int | None = None) -> list[str]:
    """Return a line for each value that a validation has refused: its key, what was expected, the value.

    Parts of a location below the depth are the types that were tried, and indices in a list.
    """
    problems: dict[str, list[ErrorDetails]] = {}
    for problem in error.errors(include_url=False):
        problems.setdefault(".".join(map(str, problem["loc"][:depth])), []).append(problem)
    lines = []
    for key, refused in problems.items():
        messages = (problem["msg"].removeprefix("Value error, ") for problem in refused)
        text = " or ".join(dict.fromkeys(messages)).replace("Input should be", "expected")
        lines.append(f"{key}: {text} (got {reprlib.repr(refused[0]['input'])})" if key else text)
    return lines


def differing_settings(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, by dotted name, with the old and the new value."""
    before, after = flat_settings(old), flat_settings(new)
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}


def flat_settings(config: Config) -> dict[str, Any]:
    """Return all settings by dotted name."""
    return {
        f"{section}.{key}": value
        for section, values in config.model_dump().items()
        for key, value in values.items()
    }


def _network_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    model = given.get("model")
    # values of a wrong type are refused by the validation of the whole
    name = model.get("name") if isinstance(model, dict) else None
    return presets.NETWORK_DEFAULTS.get(name, {}) if isinstance(name, str) else {}


def read_yaml(path: Path) -> str:
    """Return the text of a YAML file, cut off where it is too long to be accepted."""
    try:
        # it may be a pipe of the shell, as in --config <(command)
        with path.open(encoding="utf-8") as file:
            return file.read(LONGEST_YAML + 1)
    except OSError as error:
        msg = f"{path} cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        msg = f"{path} is not a text file: {error.reason} at byte {error.start}"
    raise ConfigError(msg)


def parse_yaml(text: str, origin: str) -> Any:
    """Return the value of a YAML text, which messages call by its origin.

    Example:
        >>> parse_yaml("{0: 8, 40: 16}", "--effective-batch")
        {0: 8, 40: 16}
    """
    try:
        if wrong := _wrong_yaml(text):
            msg = f"{origin} holds {wrong}; expected settings as key: value"
            raise ConfigError(msg)
        return yaml.load(text, _Loader)
    # values such as a date of the 99th day, a number of 5,000 digits, or `!!bool x`
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
        msg = f"{origin} is not YAML: {error}"
        raise ConfigError(msg) from None


class _Loader(yaml.SafeLoader):
    """Loader that refuses a key that is given twice, of which YAML would take the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = Counter(str(key.value) for key, _ in node.value)
        if repeated := [key for key, n in keys.items() if n > 1]:
            msg = f"{', '.join(repeated)} is given twice; expected all its values in one place"
            raise yaml.YAMLError(msg)
        return super().construct_mapping(node, deep)


def _wrong_yaml(text: str) -> str:
    """Return what is wrong with a text that may be YAML, or nothing."""
    if len(text) > LONGEST_YAML:
        return f"{len(text)} characters, where settings have at most {LONGEST_YAML}"
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            return f"the alias *{event.anchor}, which is not supported: write the value itself"
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST_YAML:
            return f"more than {_DEEPEST_YAML} levels of lists or mappings"
    return ""


def _parse_assignment(assignment: str) -> dict[str, Any]:
    key, equals, text = assignment.partition("=")
    if not equals:
        msg = f"--set {assignment!r} has no '='; expected for example training.n_epochs=10"
        raise ConfigError(msg)
    return _nested(key, parse_yaml(f"value: {text}", f"--set {assignment}")["value"])


def _nested(key: str, value: Any) -> dict[str, Any]:
    """Return `{"a": {"b": value}}` for the key `a.b`; levels below the deepest are not split."""
    for part in reversed(key.strip().split(".", _DEEPEST_YAML)):
        value = {part: value}
    return dict(value)


def _merge(settings: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        below = settings.get(key)
        # a mapping by epoch such as {0: 8} is one value; only sections, whose keys are texts, are merged,
        # and arguments, unless there are to be none
        is_section = isinstance(value, dict) and all(isinstance(name, str) for name in value)
        if isinstance(below, dict) and is_section and (value or key != "arguments"):
            _merge(below, value)
        else:
            settings[key] = deepcopy(value)


def _unknown(location: tuple[int | str, ...]) -> str:
    section: Any = Config
    for part in location[:-1]:
        section = section.model_fields[str(part)].annotation
    name = str(location[-1])
    # it may be a setting of another section
    nearest = [key for key in flat_settings(Config()) if key.endswith(f".{name}")]
    return unknown_name(".".join(map(str, location)), name, section.model_fields, nearest)
