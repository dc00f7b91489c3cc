"""The comparison of tests/soak/torch_distributed.py; the suite itself does not run here."""

from __future__ import annotations

from soak.torch_distributed import PASSED, SKIPPED, Outcomes, problems_of, report


def outcomes(**on_weft: str) -> dict[str, Outcomes]:
    on_gloo = {"test_a": PASSED, "test_b": PASSED, "test_c": "RuntimeError: c", "test_d": SKIPPED}
    return {"gloo": on_gloo, "weft": {**on_gloo, **on_weft}}


def test_only_tests_that_gloo_passes_count() -> None:
    assert problems_of({3: outcomes(), 4: outcomes(test_c="RuntimeError: another", test_d=PASSED)}, {}) == []
    failed = outcomes(test_a="RuntimeError: no", test_b=SKIPPED)
    first = "test_a passes with gloo on 4 ranks, and with weft: RuntimeError: no"
    second = "test_b passes with gloo on 4 ranks, and with weft: skipped"
    assert problems_of({3: outcomes(), 4: failed}, {}) == [first, second]
    assert problems_of({3: outcomes(), 4: failed}, {"test_a": "a text"}) == [second]
    del failed["weft"]["test_a"]
    assert problems_of({4: failed}, {"test_b": "a text"}) == [
        "test_a passes with gloo on 4 ranks, and with weft: did not run"
    ]


def test_reasons_without_a_difference_are_problems() -> None:
    stale = "test_a passes with weft: remove it from EXEMPTED"
    assert problems_of({3: outcomes()}, {"test_a": "a text"}) == [stale]
    assert problems_of({3: outcomes(), 4: outcomes(test_a="no")}, {"test_a": "a text"}) == []
    assert problems_of({3: outcomes()}, {"test_c": "gloo fails it", "test_e": "did not run"}) == []


def test_report_lists_what_gloo_runs() -> None:
    lines: list[str] = []
    report(3, outcomes(test_a="RuntimeError: no"), lines.append)
    assert lines == [
        "3 ranks, 3 tests that run with gloo of 4",
        "  test_a  gloo passed   weft failed",
        "      weft: RuntimeError: no",
        "  test_b  gloo passed   weft passed",
        "  test_c  gloo failed   weft failed",
        "      gloo: RuntimeError: c",
        "      weft: RuntimeError: c",
        "  gloo passes 2; weft passes 1 of them, and 0 are exempted",
    ]
