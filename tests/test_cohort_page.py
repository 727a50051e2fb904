"""The page of a folder of predictions, in a browser and without one."""

import time
from pathlib import Path

import pytest
from PIL import Image

from brats_seg.cases.many import Failure
from brats_seg.pages.case import Fact
from brats_seg.pages.cohort_page import Cohort, CohortCase, dice_by_case, write_cohort_page
from tests.browser import Page
from tests.test_case_page import HOSTILE, outside
from tests.test_charts import make_scores
from tests.test_html import Tags


def make_cohort(preview: Path | None = None) -> Cohort:
    """Three cases with a reference, one of them with warnings; one without; one failed."""
    dice = {"good": (0.9, 0.9, 0.9), "bad": (0.5, 0.1, 0.0), "fair": (0.8, 0.7, 0.6)}
    cases = [
        CohortCase(
            case_id=name,
            ml=(90.0 - place, (0.5, 0.12, 10.0)[place], 3.0),
            dice=values,
            warnings=("the tumour is large",) if name == "fair" else (),
            preview=preview,
            page=f"reports/{name}.html",
        )
        for place, (name, values) in enumerate(dice.items())
    ]
    cases.append(CohortCase(case_id="unknown", ml=(200.0, 9.0, 1.0), preview=preview))
    failure = Failure(case_id="lost", error="CaseError", message="a file is empty")
    facts = (Fact(name="Model", words="0123"),)
    return Cohort(cases=tuple(cases), failures=(failure,), facts=facts)


@pytest.fixture(scope="module")
def cohort_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cohort")
    Image.new("RGB", (90, 66), "red").save(folder / "preview.png")
    write_cohort_page(make_cohort(folder / "preview.png"), folder / "cohort.html", title="Mine")
    return folder / "cohort.html"


@pytest.fixture
def page(browser: Page, cohort_file: Path) -> Page:
    browser.open(cohort_file)
    return browser


def shown(page: Page) -> list[str]:
    """Return the cases that are seen, in their order."""
    rows = "[...document.querySelectorAll('#cases tbody tr')].filter((row) => !row.hidden)"
    return list(page.run(f"{rows}.map((row) => row.querySelector('.name').dataset.value)"))


def press(page: Page, heading: str) -> None:
    heads = "[...document.querySelectorAll('#cases th button')]"
    page.run(f"{heads}.find((b) => b.textContent === {heading!r}).click()")


def test_the_worst_case_is_first_and_those_without_a_reference_are_last(page: Page) -> None:
    assert shown(page) == ["bad", "fair", "good", "unknown"]


def test_nothing_is_asked_for_from_outside_and_nothing_complained_about(page: Page) -> None:
    assert (page.complaints, outside(page)) == ([], [])


def test_a_column_is_sorted_up_and_down(page: Page) -> None:
    press(page, "WT, ml")
    rising = shown(page)
    press(page, "WT, ml")
    falling = shown(page)

    assert rising == ["fair", "bad", "good", "unknown"]
    assert falling == rising[::-1]


def test_numbers_are_sorted_by_their_value(page: Page) -> None:
    """As text, 0.5 comes before 0.12."""
    press(page, "TC, ml")

    assert shown(page) == ["bad", "good", "unknown", "fair"]


def test_cases_without_a_value_stay_last_in_both_directions(page: Page) -> None:
    press(page, "Mean Dice")
    assert shown(page) == ["good", "fair", "bad", "unknown"]
    press(page, "Mean Dice")
    assert shown(page) == ["bad", "fair", "good", "unknown"]


def test_cases_are_found_by_name_and_by_their_warnings(page: Page) -> None:
    page.run("document.getElementById('find').focus()")
    page.key("o")
    by_name = shown(page)
    page.run("document.getElementById('find').value = ''")
    page.click("#warned")

    assert by_name == ["good", "unknown"]
    assert shown(page) == ["fair"]
    assert page.run("document.getElementById('shown').textContent") == "1 of 4 cases"


def test_a_heading_is_sorted_by_the_keyboard_and_says_so(page: Page) -> None:
    page.run("document.querySelector('#cases th button').focus()")
    page.key(" ")

    assert shown(page) == ["bad", "fair", "good", "unknown"]
    assert page.run("document.querySelector('#cases th[aria-sort]').innerText").startswith("Case")


@pytest.mark.parametrize("scale", [1, 1.25])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_the_window_in_light_and_dark(
    browser: Page, cohort_file: Path, dark: bool, scale: float
) -> None:
    browser.dark(dark)
    browser.open(cohort_file, scale=scale)

    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    back = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(255, 255, 255)") is not dark
    browser.dark(False)


def test_pictures_links_and_failures_are_there(page: Page) -> None:
    pictures = page.run("document.querySelectorAll('#cases img').length")
    links = page.run(
        "[...document.querySelectorAll('#cases a')].map((a) => a.getAttribute('href'))"
    )

    width = page.run("getComputedStyle(document.querySelector('#cases img')).width")

    assert pictures == 4
    assert width == "128px"
    assert links == ["reports/bad.html", "reports/fair.html", "reports/good.html"]
    assert "a file is empty" in page.run("document.getElementById('failures').textContent")


def test_ids_warnings_and_messages_cannot_add_tags(tmp_path: Path) -> None:
    def tags(text: str) -> list[str]:
        case = CohortCase(case_id=text, ml=(1.0, 1.0, 1.0), warnings=(text,), page=text)
        failure = Failure(case_id=text, error="CaseError", message=text)
        cohort = Cohort(cases=(case,), failures=(failure,), facts=(Fact(name=text, words=text),))
        write_cohort_page(cohort, tmp_path / "a.html", title=text)
        return [tag for tag, _ in Tags((tmp_path / "a.html").read_text()).found]

    assert tags(HOSTILE) == tags("plain")


def test_a_picture_that_is_gone_or_damaged_leaves_its_case(tmp_path: Path) -> None:
    (tmp_path / "damaged.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    previews = (tmp_path / "damaged.png", tmp_path / "gone.png")
    cases = tuple(CohortCase(case_id=p.stem, ml=(1.0, 1.0, 1.0), preview=p) for p in previews)

    write_cohort_page(Cohort(cases=cases), tmp_path / "a.html", title="Mine")

    text = (tmp_path / "a.html").read_text()
    assert "damaged" in text
    assert "gone" in text


def test_an_empty_cohort_has_a_page(tmp_path: Path) -> None:
    failure = Failure(case_id="lost", error="CaseError", message="a file is empty")

    write_cohort_page(Cohort(cases=(), failures=(failure,)), tmp_path / "a.html", title="Mine")

    assert "a file is empty" in (tmp_path / "a.html").read_text()


@pytest.mark.slow
def test_two_thousand_cases_are_written_and_sorted_in_seconds(
    browser: Page, tmp_path: Path
) -> None:
    """The pictures are small ones here: real ones take 20 ms and 3 kB each."""
    Image.new("RGB", (90, 66), "red").save(tmp_path / "preview.png")
    cases = tuple(
        CohortCase(
            case_id=f"BraTS-GLI-{number:05d}-000",
            ml=(float(number), 1.0, 1.0),
            dice=(number % 97 / 97, 0.5, 0.5),
            preview=tmp_path / "preview.png",
        )
        for number in range(2000)
    )
    began_s = time.monotonic()
    write_cohort_page(Cohort(cases=cases), tmp_path / "a.html", title="Mine")
    written_s = time.monotonic() - began_s
    browser.open(tmp_path / "a.html")
    press(browser, "WT, ml")

    names = shown(browser)
    assert names == sorted(names)
    assert len(names) == 2000
    assert (tmp_path / "a.html").stat().st_size < 5e6
    assert written_s < 30


def test_scores_become_the_dice_of_cases_that_have_all_regions() -> None:
    scores = make_scores()

    found = dice_by_case(scores[:-1])

    assert found == {f"case{k}": ((k + 1) / 10,) * 3 for k in range(3)}
