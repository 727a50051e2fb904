import typing
from dataclasses import fields

from brats_seg.config import TrainingConfig
from brats_seg.data.transforms import AUGMENTATIONS, Augmentation


def test_every_name_in_the_settings_has_a_list() -> None:
    allowed = typing.get_args(TrainingConfig.model_fields["augment"].annotation)

    assert set(AUGMENTATIONS) == set(allowed)


def test_none_changes_nothing() -> None:
    none = AUGMENTATIONS["none"]

    assert [getattr(none, field.name) for field in fields(Augmentation)] == [0] * 10


def test_light_is_a_part_of_full() -> None:
    light, full = AUGMENTATIONS["light"], AUGMENTATIONS["full"]

    for field in fields(Augmentation):
        assert getattr(light, field.name) in {0, getattr(full, field.name)}
