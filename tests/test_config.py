"""Settings: where they come from, what is refused, and in which words."""

import copy

import pytest
import yaml

from brats_seg.config import Config, TrainingConfig, differing_settings, load_config
from brats_seg.errors import ConfigError
from brats_seg.presets import LEARNING_RATES, PRESETS


def test_later_sources_win_over_earlier_ones():
    text = "training: {n_epochs: 7, micro_batch: 2}"
    assignments = ["training.micro_batch=3", "training.micro_batch=1"]
    config = load_config(preset="demo", text=text, assignments=assignments)
    assert load_config() == Config()
    assert (config.folds.n_folds, config.training.n_epochs) == (3, 7)
    assert config.training.micro_batch == 1
    assert config.training.seed == Config().training.seed


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_a_preset_is_valid_stays_as_it_is_and_is_read_back(preset):
    before = copy.deepcopy(PRESETS)
    assignments, values = (
        ["training.effective_batch={0: 8, 40: 16}"],
        {"model.arguments": {"a": (2, 2)}},
    )
    config = load_config(preset=preset, assignments=assignments, values=values)
    written = yaml.safe_load(config.to_yaml())
    encoder = load_config(preset=preset, assignments=["model.name=autoencoder"])
    assert load_config(text=config.to_yaml()) == config
    assert {name: set(values) for name, values in written.items()} == {
        name: set(type(getattr(config, name)).model_fields) for name in Config.model_fields
    }
    assert (encoder.patch.size, encoder.optimizer.lr) == ("whole", 1e-3)
    assert encoder.validation.watch == "val_loss"
    assert before == PRESETS


@pytest.mark.parametrize(
    ("assignment", "section", "key", "value"),
    [
        (" training.n_epochs = 3", "training", "n_epochs", 3),
        ("optimizer.lr=3e-4", "optimizer", "lr", 3e-4),
        ("optimizer.clip_norm=null", "optimizer", "clip_norm", None),
        ("patch.size=[32, 48, 64]", "patch", "size", (32, 48, 64)),
        ("cases.skip_bad=true", "cases", "skip_bad", True),
        ("training.device=cuda:1", "training", "device", "cuda:1"),
        ("model.widths=16,32", "model", "widths", (16, 32)),
        ("model.widths=16", "model", "widths", (16,)),
        ("store.spacing_mm=1,1, 1.5", "store", "spacing_mm", (1, 1, 1.5)),
        ("training.transforms=a.b,c.d", "training", "transforms", ("a.b", "c.d")),
        ("validation.every=auto", "validation", "every", "auto"),
    ],
)
def test_an_assignment_is_read_as_yaml(assignment, section, key, value):
    assert getattr(getattr(load_config(assignments=[assignment]), section), key) == value


@pytest.mark.parametrize("name", LEARNING_RATES)
def test_an_optimizer_gets_a_learning_rate_that_suits_it(name):
    assignment = f"optimizer.name={name}"
    assert load_config(assignments=[assignment]).optimizer.lr == LEARNING_RATES[name]
    assert load_config(assignments=[assignment, "optimizer.lr=0.5"]).optimizer.lr == 0.5
    for changes in ({"preset": "full"}, {"values": {"model.name": "autoencoder"}}):
        assert load_config(assignments=[assignment], **changes).optimizer.lr == LEARNING_RATES[name]


def test_the_effective_batch_changes_at_its_epochs_and_a_schedule_replaces_a_schedule():
    """`{0: 4}` after `{0: 8, 40: 16}` is `{0: 4}`, though both are written as mappings."""
    text = "training: {effective_batch: {0: 8, 40: 16}}"
    config = load_config(text=text, assignments=["training.effective_batch={0: 4}"])
    assert config.training.effective_batch == {0: 4}
    text = "loss: {arguments: {gamma: 3}}"
    arguments = ["loss.arguments={}", "loss.arguments={to: 1}", "loss.arguments.of=2"]
    assert load_config(text=text, assignments=arguments).loss.arguments == {"to": 1, "of": 2}
    for schedule, epoch, expected in (
        (4, 0, 4),
        (4, 99, 4),
        ({0: 8, 40: 16}, 0, 8),
        ({0: 8, 40: 16}, 40, 16),
        ({40: 16, 0: 8, 10: 12}, 39, 12),
    ):
        assert TrainingConfig(effective_batch=schedule).effective_batch_at(epoch) == expected


def test_differing_settings_are_named_with_both_values():
    new = load_config(assignments=["training.seed=1", "patch.size=whole"])
    assert differing_settings(Config(), new) == {
        "patch.size": ((128, 128, 128), "whole"),
        "training.seed": (55, 1),
    }
    assert differing_settings(new, new) == {}


def test_what_is_given_wins_over_what_the_network_starts_from():
    text = "model: {name: autoencoder}\npatch: {size: [64, 64, 64]}"
    config = load_config(text=text, assignments=["optimizer.lr=0.01"])
    assert config.patch.size == (64, 64, 64)
    assert config.optimizer.lr == 0.01
    assert load_config(text=config.to_yaml()) == config


ASSIGNMENTS = (
    ("training.lr=1", r"training\.lr is unknown; .* Did you mean optimizer\.lr\?"),
    ("trainig.n_epochs=3", r"setting trainig is unknown; .* folds,.* Did you mean training\?"),
    ("training.n_epoch=3", r"setting training\.n_epoch is unknown; there are n_epochs, "),
    ("training.n_epochs=0", r"training\.n_epochs: .*greater than 0.*got 0"),
    ("training.n_epochs=ten", r"training\.n_epochs: expected a valid integer.*got 'ten'"),
    ("patch.foreground=1.5", r"patch\.foreground: .*less than or equal to 1.*got 1\.5"),
    ("model.name=unet3", r"model\.name: .*unet, notebook.*got 'unet3'"),
    ("training.n_workers=x", r"n_workers: .* valid integer.* or expected 'auto' \(got 'x'\)"),
    ("cases.skip_bad=maybe", r"cases\.skip_bad: expected a valid boolean"),
    ("model.widths=16,x", r"model\.widths: expected a valid integer.*got 'x'"),
    ("store.spacing_mm=1,1", r"store\.spacing_mm: Field required"),
    ("optimizer.name=lion", r"name: expected 'adam', 'adamw', 'muon' or 'sgd' \(got 'lion'\)"),
    ("model.latent=100", r"model\.latent: expected a multiple of 64"),
    ("model.arguments=3", r"model\.arguments: expected a valid dictionary"),
    ("folds.n_folds=1", r"folds\.n_folds: .*greater than or equal to 2.*got 1"),
    ("optimizer.lr=.nan", r"optimizer\.lr: .*got nan"),
    ("training=5", r"setting training: .*got 5"),
    ("training.effective_batch={5: 2}", r"batch: expected a value for epoch 0 \(got \{5: 2\}\)"),
    ("model=*a", "--set"),
    ("." * 2000 + "=1", "is unknown; there are cases, folds"),
    ("model=" + "[" * 5000, "--set"),
    ("n_epochs", r"'n_epochs' has no '='; expected for example training\.n_epochs=10"),
    ("training.n_epochs=[", r"--set training\.n_epochs=\[ is not YAML"),
)
OF_AUTOENCODERS = (
    ("validation.watch=val_dice", r"model.name 'autoencoder': expected validation\.watch=val_loss"),
    ("loss.batch_dice=true", r"expected loss\.batch_dice=false"),
    ("training.modality_dropout=0.5", r"expected training\.modality_dropout=0"),
    ("training.micro_batch=2", r"expected training\.micro_batch=1 with patch\.size=whole"),
)
TEXTS = (
    ("[1, 2]", "configuration file holds list; expected settings as key: value"),
    ("a: b: c", "configuration file is not YAML"),
    ("seed: 1", "setting seed is unknown"),
    ("fold: {n: 1}\nfold: {m: 1}", "fold is given twice; expected all its values in one place"),
    ("training: {seed: 1, hours: 2, seed: 3}", "seed is given twice"),
    ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", r"the alias \*a, which is not supported"),
    ("model: &m {arguments: *m}", r"the alias \*m"),
    ("[" * 10_000, "more than 20 levels"),
    ("a: " + "x" * 40_000, "40003 characters, where settings have at most 32768"),
    ("training: {seed: 2021-13-45}", "is not YAML: month must be"),
    ("training: {seed: !!bool x}", "is not YAML: 'x'"),
    ("training: {seed: !!int ''}", "is not YAML: string index"),
    ("training: {seed: !!timestamp x}", "is not YAML"),
    ("training: {n_epochs: " + "9" * 5000 + "}", "is not YAML: Exceeds the limit"),
    ("a: !!python/object/apply:os.system [ls]", "is not YAML"),
    ("patch: {size: ['²', '²', '²']}", "expected three positive whole numbers"),
    ("patch: {size: [2000, 8, 8]}", "less than or equal to 1024"),
    ("model: {widths: [1000000000]}", "less than or equal to 4096"),
    ("model: {widths: []}", "at least 1 item"),
    ("optimizer: {lr: .nan}", "finite number"),
    ("folds: {seed: -1}", "setting folds.seed: expected greater than or equal to 0"),
    # the number of epochs is found by counting down
    ("training: {hours: 1e9}", "setting training.hours: expected less than or equal to 10000"),
    ("training: {seed: 9223372036854775808}", "less than 9223372036854775808"),
)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(({"assignments": [one]}, match) for one, match in ASSIGNMENTS),
        *(({"assignments": ["model.name=autoencoder", o]}, m) for o, m in OF_AUTOENCODERS),
        *(({"text": text}, message) for text, message in TEXTS),
        ({"values": {"loss.arguments": {"weight": object()}}}, r"loss\.arguments: .*'object'"),
        # all wrong settings are told at once
        ({"assignments": ["folds.n_folds=1", "validation.overlap=1"]}, r"(?s)folds.*\n.*overla"),
        ({"assignments": ["loss.name=a.b", "loss.bce=0"]}, r"no loss\.dice, bce or batch_dice"),
        ({"assignments": ["loss.dice=0", "loss.bce=0"]}, r"loss\.dice or loss\.bce above 0"),
        ({"preset": "T4"}, "preset 'T4' is unknown; there are demo, cpu, kaggle-t4"),
    ],
)
def test_what_is_wrong_hostile_or_absurd_is_refused_with_key_and_value(given, message):
    with pytest.raises(ConfigError, match=message):
        load_config(**given)
