"""Small stand-ins that only one release or one build needs, on classes of the same shape."""

from types import SimpleNamespace

import pytest

from kvproof.findings.case import Case
from kvproof.platforms import ascend_hooks, engram_tables, graphs, installed, tokenizers

torch = pytest.importorskip("torch")


def release(monkeypatch, number):
    monkeypatch.setattr(installed, "version", lambda name: number if name == "vllm" else "")


@pytest.mark.parametrize(("number", "read"), [("0.32.0", (0, 32)), ("0.33.0+cu130", (0, 33)), ("", (0, 0))])
def test_the_release_of_vllm_is_read(monkeypatch, number, read):
    release(monkeypatch, number)
    assert installed.vllm_release() == read


def test_engram_tables_have_shape_and_type_and_no_bytes():
    class Embedding:
        part_num_embeddings, dim, block_size = 10**9, 64, 32

        def _allocate_weights(self):
            raise AssertionError("64 GB")

    engram_tables._patch(SimpleNamespace(ParallelEngramEmbedding=Embedding))
    rows, scales = Embedding()._allocate_weights()
    assert (rows.shape, rows.dtype, rows.device.type) == ((10**9, 64), torch.float8_e4m3fn, "meta")
    assert (scales.shape, scales.dtype, scales.device.type) == ((10**9, 2), torch.uint8, "meta")


def test_a_release_that_needs_nothing_gets_nothing(monkeypatch):
    release(monkeypatch, "0.33.0")
    assert engram_tables.leave_on_meta() == ()
    release(monkeypatch, "0.32.0")
    assert engram_tables.leave_on_meta() == (engram_tables.ON_META,)


def test_a_model_with_a_tokenizer_keeps_it(monkeypatch, tmp_path):
    release(monkeypatch, "0.32.0")
    (tmp_path / "config.json").write_text('{"engram_layer_ids": [1], "vocab_size": 9}')
    (tmp_path / "tokenizer.json").write_text("{}")
    assert tokenizers.stand_in(Case("m", str(tmp_path))) == ()


def test_a_graph_wrapper_runs_what_it_wraps():
    class Wrapper:
        runnable = staticmethod(lambda *args, **kwargs: (args, kwargs))

        def __call__(self, *args, **kwargs):
            raise AssertionError("captured")

    graphs._run_what_is_wrapped(Wrapper)
    assert Wrapper()(1, a=2) == ((1,), {"a": 2})


class WithHooks:
    def _core(self):
        wait_for_kv_layer_from_connector(self.prefix)  # noqa: F821 - named, as production does, never called


class Inherits(WithHooks):
    def other(self):
        return 1


class Without:
    attribute = 5

    def _core(self):
        return len([])


def test_an_operator_has_hooks_of_its_own_where_its_code_names_them():
    assert ascend_hooks._names(WithHooks, ascend_hooks.WAIT)
    assert ascend_hooks._names(Inherits, ascend_hooks.WAIT)
    assert not ascend_hooks._names(Without, ascend_hooks.WAIT)
    assert ascend_hooks.of("model.layers.0", Without()) is None
    assert ascend_hooks.of("model.layers.0", SimpleNamespace(impl=Without())) is None
