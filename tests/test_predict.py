"""Test the prediction of one case, the mean over networks and mirror images, and running out of memory."""

import re
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from brats_seg import PredictionSettings, build_model, predict_folder
from brats_seg.cases.phantom import make_phantom
from brats_seg.errors import CaseError, ConfigError, UsageError
from brats_seg.inference.method import Scan, input_of_crop
from brats_seg.inference.model import Model
from brats_seg.inference.predict import Prediction, Predictor, convention_to_write
from brats_seg.inference.probabilities import PredictionFallback, PredictionMode, apply_model
from brats_seg.inference.results import OutputFolder
from brats_seg.labels import (
    BRATS2017,
    BRATS2023,
    BRATS2024,
    BRATS2024_PED,
    CONVENTIONS,
    MSD,
    REGIONS,
    label_map_of,
    regions_of,
)
from brats_seg.progress import _SCREEN, tracked
from brats_seg.runtime.device import Device
from brats_seg.runtime.weights import load_trained, shipped_network
from brats_seg.runtime.windows import Window, predict_logits
from brats_seg.voxels.regions import PARTS, Decoding, decode_regions, measure_parts
from tests.builders import BRATS_AFFINE, make_volumes, write_case
from tests.inference_builders import (
    CPU,
    NAMES,
    PLAIN_SETTINGS,
    Pointwise,
    make_model,
    read_scan,
    write_run,
    write_scan,
)

FP32 = PredictionSettings(precision="fp32", device="cpu")


def predict(folder: Path, model: Model) -> tuple[Scan, Prediction]:
    scan = read_scan(folder)
    return scan, Predictor(model=model).predict_scan(scan)


def written(folder: Path, output: Path, settings: PredictionSettings) -> nib.Nifti1Image:
    scan, result = predict(folder, make_model(settings=settings))
    names, _ = OutputFolder(output).write_case(scan, result, settings)
    return nib.load(output / names[-1])


def turned_scans(folder: Path, codes: tuple[int, int] = (1, 1)) -> list[Path]:
    """Write one scan in three orientations: as BraTS, RAS, and with axes in another order."""
    images = make_volumes(seed=2)
    flip = np.diag([-1.0, -1.0, 1.0, 1.0])
    flip[:2, 3] = np.array(images.shape[1:3]) - 1
    # voxel (i, j, k) of the third is voxel (k, i, j) of the first
    moved = BRATS_AFFINE @ np.eye(4)[[2, 0, 1, 3]]
    return [
        write_scan(folder / "lps", images, BRATS_AFFINE, codes),
        write_scan(folder / "ras", images[:, ::-1, ::-1], BRATS_AFFINE @ flip, codes),
        write_scan(folder / "sag", images.transpose(0, 2, 3, 1), moved, codes),
    ]


def assert_same_geometry(label_map: nib.Nifti1Image, scan: nib.Nifti1Image) -> None:
    assert label_map.shape == scan.shape
    assert label_map.header.get_zooms() == scan.header.get_zooms()
    np.testing.assert_array_equal(label_map.affine, scan.affine)
    for field in ("qform_code", "sform_code", "quatern_b", "quatern_c", "quatern_d"):
        if field.endswith("code") or scan.header["qform_code"]:
            np.testing.assert_allclose(label_map.header[field], scan.header[field], atol=1e-6)


@pytest.mark.parametrize("codes", [(1, 1), (0, 2), (4, 0), (0, 0)])
def test_every_orientation_gives_the_same_tumour(tmp_path: Path, codes: tuple[int, int]) -> None:
    """The result of this network depends on the direction of the axes."""
    maps = []
    for folder in turned_scans(tmp_path, codes):
        label_map = written(folder, tmp_path / f"{folder.name}-out", PLAIN_SETTINGS)
        assert_same_geometry(label_map, nib.load(folder / f"{folder.name}_t1.nii.gz"))
        assert label_map.get_data_dtype() == np.uint8
        assert set(np.unique(np.asarray(label_map.dataobj))) == {0, 1, 2, 4}
        maps.append(nib.as_closest_canonical(label_map))
    # without codes the file does not say how its axes run
    for one in maps[1:] if any(codes) else ():
        np.testing.assert_allclose(one.affine, maps[0].affine, atol=1e-6)
        assert np.array_equal(np.asarray(one.dataobj), np.asarray(maps[0].dataobj))


def test_nothing_is_found_in_the_air(tmp_path: Path) -> None:
    """This network returns tumour everywhere."""
    folder = write_case(tmp_path, labelled=False)
    _, result = predict(folder, make_model(decoding=Decoding(thresholds=(1e-9, 1e-9, 1e-9))))
    air = (make_volumes() == 0).all(axis=0)
    assert not result.label_map[air].any()
    assert (result.label_map[~air] == 4).all()


def test_probabilities_and_uncertainty_lie_on_the_grid_of_the_scan(tmp_path: Path) -> None:
    folder = turned_scans(tmp_path)[2]
    settings = PredictionSettings(probabilities=True, uncertainty=True, preview=False)
    label_map = written(folder, tmp_path / "out", settings)
    wt, tc, et = (
        np.asarray(nib.load(tmp_path / "out" / "probabilities" / f"sag-{region}.nii.gz").dataobj)
        for region in ("wt", "tc", "et")
    )
    uncertainty = nib.load(tmp_path / "out" / "uncertainty" / "sag.nii.gz")
    labels = np.asarray(label_map.dataobj)
    assert np.array_equal(labels == 4, et > 0.5)
    assert np.array_equal(labels > 0, (wt > 0.5) | (tc > 0.5) | (et > 0.5))
    np.testing.assert_array_equal(uncertainty.affine, label_map.affine)
    bits, brain = np.asarray(uncertainty.dataobj), wt > 0
    inside = np.clip([wt, tc, et], 1e-7, 1 - 1e-7).astype(np.float64)
    expected = -(inside * np.log2(inside) + (1 - inside) * np.log2(1 - inside))
    np.testing.assert_allclose(bits[brain], np.max(expected, axis=0)[brain], atol=5e-3)
    assert not bits[~brain].any()


def test_probabilities_that_are_not_finite_are_no_empty_label_map(tmp_path: Path) -> None:
    network = Pointwise()
    network.steepness.data[...] = np.nan
    with pytest.raises(CaseError, match=r"network that are NaN or infinite.*--precision fp32"):
        predict(write_case(tmp_path), make_model(network))


def test_a_predictor_takes_files_arrays_and_a_network(tmp_path: Path) -> None:
    folder = write_case(tmp_path / "scans", labelled=False)
    files = {name: folder / f"{folder.name}_{suffix}.nii.gz" for name, suffix in NAMES.items()}
    run = write_run(tmp_path / "run")
    settings = FP32.model_copy(update={"probabilities": True, "window": (8, 8, 8)})
    predictor = Predictor.load([run], settings)
    images = [nib.load(path) for path in files.values()]
    arrays = np.stack([np.asarray(image.dataobj) for image in images])
    aliases = dict(zip(("T1", "t1ce", "t2", "flair"), files.values(), strict=True))
    # the run has the identity; the network is built by the caller
    trained = load_trained(run / "best.pt")
    network = build_model(trained.card.config.model, trained.card.identity.patch)
    network.load_state_dict(trained.weights)
    of_network = Predictor.of_network(network, trained.card.identity, settings, multiple=(2, 2, 2))
    unset = Predictor.of_network(network, trained.card.identity, FP32)
    assert unset.model.members[0].window.size == trained.card.identity.patch
    results = [
        predictor.predict_files(files),
        predictor.predict_files(aliases),
        predictor.predict_arrays(arrays, images[0].affine, case_id=folder.name),
        of_network.predict_scan(read_scan(folder)),
    ]
    predict_folder([tmp_path / "scans"], [run], tmp_path / "out", settings)
    label_map = np.asarray(nib.load(tmp_path / "out" / f"{folder.name}.nii.gz").dataobj)
    for result in results:
        assert (result.summary.case_id, result.convention) == (folder.name, BRATS2017)
        assert np.array_equal(result.label_map, label_map)
        assert result.probabilities.shape == (3, *label_map.shape)
    foreign = replace(trained.card.identity, normalisation="none")
    with pytest.raises(UsageError, match="trained with normalisation none"):
        Predictor.of_network(network, foreign, settings)
    # background and three tissues, as of many networks
    four = Predictor.of_network(nn.Conv3d(4, 4, 1), trained.card.identity, FP32)
    with pytest.raises(ConfigError, match=r"returned \(1, 4, .*; expected logits of \(1, 3, "):
        four.predict_arrays(arrays, images[0].affine)


IMAGE = np.random.default_rng(0).standard_normal((4, 12, 10, 9)).astype(np.float32)


class Constant(nn.Module):
    def __init__(self, *logits: float) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits, dtype=torch.float32))

    def forward(self, image: Tensor) -> Tensor:
        return self.logits[None, :, None, None, None].expand(1, 3, *image.shape[2:])


def applied(model: Model, image: np.ndarray = IMAGE, *, tta: bool = False) -> np.ndarray:
    return apply_model(model, input_of_crop(image), PredictionFallback("case", CPU), tta=tta)


def test_a_network_gets_its_modalities_and_gives_its_regions_in_its_own_order():
    class Reordered(Pointwise):
        def forward(self, image: Tensor) -> Tensor:
            # FLAIR first, as in the decathlon; ET, TC, WT
            return super().forward(image[:, [1, 2, 3, 0]])[:, [2, 1, 0]]

    other = make_model(Reordered())
    member = replace(other.members[0], channels=(3, 0, 1, 2), regions=(2, 1, 0))
    other = replace(other, members=(member,))
    np.testing.assert_allclose(applied(make_model()), applied(other), atol=1e-6)


def test_probabilities_not_logits_are_averaged():
    """By hand: sigmoid(-2) = 0.1192 and sigmoid(4) = 0.9820, mean 0.5506; of logits it were 0.73."""
    mean = applied(make_model(Constant(-2, 0, 1), Constant(4, 0, 3)))
    assert mean[0] == pytest.approx(0.5506, abs=1e-4)
    assert mean[1] == pytest.approx(0.5)


@pytest.mark.parametrize("mean_of", ["probabilities", "logits"])
def test_all_eight_mirror_images_are_turned_back_and_averaged(mean_of):
    """Compare with a slow loop, for a network whose result depends on directions."""
    network, sigmoid = Pointwise(), torch.sigmoid
    model = make_model(network)
    member = model.members[0]
    method = replace(member.method, mean_of=mean_of)
    model = replace(model, members=(replace(member, method=method),))
    inner, outer = (sigmoid, Tensor) if mean_of == "probabilities" else (Tensor, sigmoid)
    expected = np.zeros((3, *IMAGE.shape[1:]))
    for mirror in np.ndindex(2, 2, 2):
        axes = tuple(axis + 1 for axis in range(3) if mirror[axis])
        flipped = torch.from_numpy(np.flip(IMAGE, axes).copy())
        with torch.no_grad():
            logits = predict_logits(network, flipped, window=(8,) * 3, overlap=0.5, device=CPU)
        expected += np.flip(inner(logits).numpy(), axes) / 8
    expected = outer(torch.from_numpy(expected)).numpy()
    np.testing.assert_allclose(applied(model, tta=True), expected, atol=1e-6)
    assert np.abs(applied(model) - expected).max() > 0.1


def test_a_case_that_does_not_fit_is_computed_in_smaller_windows(tmp_path: Path) -> None:
    seen = []

    class Picky(Pointwise):
        def forward(self, image: Tensor) -> Tensor:
            seen.append(tuple(image.shape[2:]))
            if image[0, 0].numel() > 16**3:
                raise torch.OutOfMemoryError("full")
            return super().forward(image)

    fallback = PredictionFallback("a", CPU)
    model = make_model(Picky(), window=Window(size=(32, 40, 32), overlap=0.5))
    apply_model(model, input_of_crop(np.ones((4, 20, 36, 12), dtype=np.float32)), fallback)
    assert seen[0] == (20, 36, 12)
    assert seen[-1] == (16, 18, 12)
    scan = read_scan(write_case(tmp_path / "scans"))
    scan = replace(scan, case=replace(scan.case, remarks=("thick slices",)))
    model = replace(model, settings=PredictionSettings(labels="msd"))
    summary = Predictor(model=model).predict_scan(scan).summary
    said = "memory ran out: computed with windows of 1/2 along each axis on cpu"
    assert fallback.warnings == (said,)
    assert summary.warnings[:2] == ("thick slices", said)
    assert summary.convention == "msd"


def test_the_fallback_goes_from_the_gpu_to_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    """The device is any that is not the CPU: the fallback itself does not compute."""
    tried: list[tuple[str, bool, int]] = []

    def work(mode: PredictionMode) -> int:
        kind = mode.device.torch_device.type
        tried.append((kind, mode.stitch_on_host, mode.n_halvings))
        if kind != "cpu":
            raise torch.OutOfMemoryError("GPU memory is full\nand so on")
        return len(tried)

    fallback = PredictionFallback("a", Device(torch_device=torch.device("meta")))
    assert (fallback.warnings, fallback.run(work), fallback.run(work)) == ((), 5, 6)
    on_host = [("meta", True, n_halvings) for n_halvings in range(3)]
    # the next part of the case starts where the last one ended, and the next case at the top
    assert tried == [("meta", False, 0), *on_host, *[("cpu", False, 1)] * 2]
    assert PredictionFallback("b", CPU).mode.n_halvings == 0
    said = "memory ran out: computed with windows of 1/2 along each axis on cpu"
    assert fallback.warnings == (said,)
    assert "case a: computing it again" in caplog.text


def test_a_case_that_fits_nowhere_is_refused_and_other_errors_stay() -> None:
    def work(error: Exception) -> None:
        raise error

    fallback = PredictionFallback("a", CPU)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        fallback.run(lambda _: work(RuntimeError("shapes do not match")))
    nowhere = "case a, .*ran out in every mode .*1/4 along.* smaller windows with"
    with pytest.raises(CaseError, match=nowhere):
        fallback.run(lambda _: work(MemoryError()))


@pytest.mark.parametrize("tta", [False, True])
def test_windows_are_counted_as_progress(monkeypatch: pytest.MonkeyPatch, *, tta: bool) -> None:
    """The total covers all networks and mirror images, so that the remaining time is known."""
    model = make_model(Pointwise(), Pointwise(), window=Window(size=(8, 8, 8), overlap=0))
    positions = []
    monkeypatch.setattr(_SCREEN, "refresh", lambda work: positions.append(work.position))
    for _ in tracked("a", what="predicting", total=1):
        applied(model, np.ones((4, 16, 8, 8), dtype=np.float32), tta=tta)
    n_windows = 2 * 2 * (8 if tta else 1)
    assert positions[:n_windows] == [(n + 1) / n_windows for n in range(n_windows)]
    assert positions[-1] == 1


NESTED = Decoding()


def fields(wt: list[float], tc: list[float], et: list[float]) -> np.ndarray:
    return np.array([wt, tc, et], dtype=np.float32)[:, :, None, None]


def row(regions: np.ndarray) -> list[str]:
    return ["-" if not n else REGIONS[n - 1] for n in regions.sum(axis=0).ravel()]


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_regions_are_nested_in_every_convention_whatever_the_probabilities(convention):
    for seed in range(5):
        probabilities = np.random.default_rng(seed).random((3, 5, 4, 3), dtype=np.float32)
        wt, tc, et = regions = decode_regions(probabilities, NESTED, 1.0)
        assert np.array_equal(regions_of(label_map_of(regions, convention), convention), regions)
        assert not (et & ~tc).any()
        assert not (tc & ~wt).any()
        assert np.array_equal(et, probabilities[2] > 0.5)


@pytest.mark.parametrize(
    ("thresholds", "probabilities", "expected"),
    [
        # an inner region takes the outer ones with it
        ((0.5, 0.5, 0.5), ([0.1, 0.1], [0.1, 0.9], [0.9, 0.1]), ["et", "tc"]),
        # a voxel at the threshold is outside, as in training, where a logit of 0 is background
        ((0.5, 0.5, 0.5), ([0.5], [0.5], [0.5]), ["-"]),
        (
            (0.2, 0.4, 0.6),
            ([0.3] * 4, [0, 0.5, 0.3, 0.5], [0, 0, 0.5, 0.7]),
            ["wt", "tc", "wt", "et"],
        ),
    ],
)
def test_regions_by_threshold(thresholds, probabilities, expected):
    decoding = Decoding(thresholds=thresholds)
    assert row(decode_regions(fields(*probabilities), decoding, 1.0)) == expected


def test_small_components_are_left_out_with_what_is_inside_them():
    wt = [0.9, 0, 0.9, 0.9, 0.9]
    probabilities = fields(wt, wt, wt)
    for smallest, expected in ((2.0, "et"), (2.1, "-"), (6.0, "-")):
        decoding = Decoding(smallest_mm3=(smallest, 0, 0))
        assert row(decode_regions(probabilities, decoding, 2.0)) == [expected, "-", *["et"] * 3]
    assert row(decode_regions(probabilities, Decoding(smallest_mm3=(6.1, 0, 0)), 2.0)) == ["-"] * 5
    # a small part of an inner region stays in the outer one
    probabilities = fields([0.9] * 5, [0.9, 0, 0.9, 0.9, 0.9], [0.9, 0, 0, 0, 0.9])
    for smallest, expected in (
        ((0, 2, 0), ["wt", "wt", "tc", "tc", "et"]),
        ((0, 0, 2), ["tc", "wt", "tc", "tc", "tc"]),
    ):
        assert row(decode_regions(probabilities, Decoding(smallest_mm3=smallest), 1.0)) == expected
    # voxels that share a corner are one component
    probabilities = np.zeros((3, 2, 2, 2), dtype=np.float32)
    probabilities[0, 0, 0, 0] = probabilities[0, 1, 1, 1] = 1
    assert decode_regions(probabilities, Decoding(smallest_mm3=(2, 0, 0)), 1.0)[0].sum() == 2


def test_little_or_unsure_enhancing_tumour_becomes_necrosis():
    wt, tc, et = [0.1, 0.9, 0.9, 0.9, 0.9], [0.1, 0.1, 0.9, 0.9, 0.9], [0.1, 0.1, 0.9, 0.1, 0.9]
    kept, dropped = [0, 2, 4, 1, 4], [0, 2, 1, 1, 1]
    for decoding, expected in (
        (Decoding(smallest_et_mm3=2), kept),
        (Decoding(smallest_et_mm3=3), dropped),
        (Decoding(surest_et=0.89), kept),
        (Decoding(surest_et=0.91), dropped),
    ):
        found = label_map_of(decode_regions(fields(wt, tc, et), decoding, 1.0), BRATS2017)
        assert found.dtype == np.uint8
        assert found.ravel().tolist() == expected


def test_volumes_and_components_by_hand():
    """Six voxels of 500 mm3 in a row: necrosis, enhancing, enhancing, air, oedema, air."""
    label_map = np.array([1, 4, 4, 0, 2, 0], dtype=np.uint8).reshape(6, 1, 1)
    measured = measure_parts(regions_of(label_map, BRATS2017), 500)
    parts = {part.name: (part.ml, part.n_components) for part in measured}
    inner = {"et": (1.0, 1), "ed": (0.5, 1), "ncr": (0.5, 1)}
    assert parts == {"wt": (2.0, 2), "tc": (1.5, 1), **inner}
    empty = measure_parts(np.zeros((3, 2, 2, 2), dtype=np.bool_), 1.0)
    names = [(part.name, part.ml, part.n_components) for part in empty]
    assert names == [(name, 0.0, 0) for name in PARTS]


@pytest.mark.parametrize(
    ("release", "trained", "expected", "reason"),
    [
        ("brats2021", ("brats2023",), BRATS2017, ""),
        ("brats2023-gli", ("brats2017",), BRATS2023, ""),
        ("brats2024-gli", ("brats2017",), BRATS2024, ""),
        ("msd", ("brats2017",), MSD, ""),
        ("unknown", ("brats2017",), BRATS2017, "show no release, and the model was trained on thi"),
        ("unknown", ("brats2017", "msd"), BRATS2023, "no release, .* trained on brats2017, msd"),
        ("brats-ped", ("brats2024-ped",), BRATS2024_PED, "brats-ped exists in several conventions"),
        ("nnunet", ("msd",), MSD, "the names of the scans show no release"),
    ],
)
def test_labels_are_in_the_convention_of_the_release(release, trained, expected, reason):
    written, why = convention_to_write(None, release, trained)
    asked, why_asked = convention_to_write("msd", release, trained)
    assert written == expected
    assert bool(why) == bool(reason)
    assert re.search(reason, why)
    assert asked == MSD
    assert why_asked.startswith("asked for; ") or (release, why_asked) == ("msd", "")


@pytest.mark.skipif(shipped_network() is None, reason="this installation carries no network")
def test_the_network_of_the_package_outlines_the_tumour_of_a_made_up_brain() -> None:
    made = make_phantom(np.random.default_rng([9, 1]), with_et=True)
    affine = np.diag([-2.5, -2.5, 2.5, 1.0])
    predictor = Predictor.load()
    result = predictor.predict_arrays(made.images.astype(np.float32), affine)
    drawn, expected = result.label_map > 0, made.label_map > 0
    for mask, is_good in ((drawn, True), (drawn[::-1], False)):
        assert (2 * (mask & expected).sum() / (mask.sum() + expected.sum()) > 0.5) == is_good
    # the nine patients of its last step have other ids in other years
    seen = {predictor.model.seen(f"Brats{name}") for name in ("18_TCIA02_135_1", "17_TCIA_135_1")}
    assert (seen, result.summary.in_training) == ({"yes"}, "no")
    assert result.summary.remark
    assert len(predictor.model.subsets) == 14


@pytest.mark.real
@pytest.mark.slow
def test_a_real_scan_keeps_its_geometry(real_data: Path, tmp_path: Path) -> None:
    folder = real_data / "unlabelled" / "TCGA-FG-6692_atlas"
    label_map = written(folder, tmp_path, PredictionSettings(window="whole", preview=False))
    (path,) = folder.glob("*t1_bet*")
    assert_same_geometry(label_map, nib.load(path))
