"""--soc: never guessed, asserted against the installed build unless it is declared. No Ascend package is needed."""

import pytest

from kvproof.findings.case import Case
from kvproof.platforms.ascend_sim import soc


@pytest.mark.parametrize(("name", "words"), [("", "no --soc given"), ("ascend310p", "--soc ascend310p")])
def test_an_unknown_soc_is_refused_with_the_known_ones(name, words):
    with pytest.raises(ValueError, match=f"{words}, expected one of ascend910b, ascend910c, ascend950"):
        soc.soc(name)


def test_the_soc_must_be_the_one_of_the_build(monkeypatch):
    monkeypatch.setattr(soc, "built_for", lambda: "A2")
    soc.require_build("ascend910b", declared=False)
    with pytest.raises(ValueError, match=r"built for ascend910b \(A2\), not A5; --declare-soc declares ascend950"):
        soc.require_build("ascend950", declared=False)
    soc.require_build("ascend950", declared=True)


def test_the_build_is_read_and_not_imported(monkeypatch, tmp_path):
    package = tmp_path / "vllm_ascend"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "_build_info.py").write_text("# generated\n__device_type__ = 'A3'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert soc.built_for() == "A3"
    (package / "_build_info.py").write_text("# generated\n")
    with pytest.raises(ValueError, match="no __device_type__ in it"):
        soc.built_for()


def test_quantities_that_may_be_varied_are_fields_of_the_soc():
    from kvproof.platforms.ascend_sim import AscendSim

    for name, values in AscendSim.variations.items():
        for value in values:
            varied = soc.soc("ascend910b", {name: value})
            assert getattr(varied, name) == value != getattr(soc.soc("ascend910b"), name)


def test_the_case_is_refused_where_vllm_ascend_is_missing(monkeypatch):
    from kvproof.platforms import installed
    from kvproof.platforms.ascend_sim import AscendSim

    monkeypatch.setattr(installed, "version", lambda name: "")
    with pytest.raises(ValueError, match=r"no vllm-ascend.*make env-ascend.*\.venv-ascend/bin/kvproof"):
        AscendSim().require(Case("m", "d", platform="ascend-sim", soc="ascend910b"))
