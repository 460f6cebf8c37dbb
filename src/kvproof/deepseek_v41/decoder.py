"""One decoder layer (specification, section 3.2): two sublayers, each fed by the mix the one before it computed."""

from __future__ import annotations

import torch
from torch import nn

from kvproof.deepseek_v41.attention import Attention
from kvproof.deepseek_v41.config import TextConfig
from kvproof.deepseek_v41.moe import MoE
from kvproof.deepseek_v41.ops.mhc import Mixes, collapse, expand, mixes
from kvproof.deepseek_v41.parameters import Norm, parameter
from kvproof.deepseek_v41.shared import Shared


class DecoderLayer(nn.Module):
    """Attention and experts around a residual stream of ``hc_mult`` copies.

    Hyper-connection parameters are named as in the checkpoint: hc_{attn,ffn}_{fn,base,scale}, all fp32.
    """

    def __init__(self, config: TextConfig, attn: Attention, ffn: MoE) -> None:
        super().__init__()
        self.config = config
        self.attn_norm, self.attn = Norm(config.hidden_size, config.rms_norm_eps), attn
        self.ffn_norm, self.ffn = Norm(config.hidden_size, config.rms_norm_eps), ffn
        copies = config.hc_mult
        mixed = 2 * copies + copies**2
        for sublayer in ("attn", "ffn"):
            for name, shape in (("fn", (mixed, copies * config.hidden_size)), ("base", (mixed,)), ("scale", (3,))):
                setattr(self, f"hc_{sublayer}_{name}", parameter(*shape, dtype=torch.float32))

    def forward(
        self, stream: torch.Tensor, pre: torch.Tensor | None, shared: Shared
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream [T, M, H] and the mix, fp32 [T, M], after this layer.

        ``pre`` is the mix of the sublayer before; None for the first layer, whose copies are all equal.
        """
        mix = self._mixes("attn", stream)
        y = self.attn(self.attn_norm(collapse(stream, pre)), shared)
        stream, pre = expand(stream, y, mix.post, mix.comb), mix.pre
        mix = self._mixes("ffn", stream)
        y = self.ffn(self.ffn_norm(collapse(stream, pre)))
        return expand(stream, y, mix.post, mix.comb), mix.pre

    def _mixes(self, sublayer: str, stream: torch.Tensor) -> Mixes:
        fn, base, scale = (getattr(self, f"hc_{sublayer}_{name}") for name in ("fn", "base", "scale"))
        return mixes(
            stream,
            fn,
            base,
            scale,
            norm_eps=self.config.rms_norm_eps,
            hc_eps=self.config.hc_eps,
            iterations=self.config.hc_sinkhorn_iters,
        )
