"""The text model (specification, section 3.1): embedding, layers, final collapse, norm, logits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.sequence import IntermediateTensors

from kvproof.deepseek_v41.attention import Attention
from kvproof.deepseek_v41.config import TextConfig
from kvproof.deepseek_v41.decoder import DecoderLayer
from kvproof.deepseek_v41.loading import load_weights
from kvproof.deepseek_v41.moe import MoE
from kvproof.deepseek_v41.ops.mhc import collapse
from kvproof.deepseek_v41.ops.rope import Rope
from kvproof.deepseek_v41.parameters import Norm
from kvproof.deepseek_v41.plan import Plan
from kvproof.deepseek_v41.serving import check
from kvproof.deepseek_v41.shared import Rotation, Shared


class DeepseekV41ForCausalLM(nn.Module):
    """DeepSeek V4.1, text. Parameters are named as the tensors of the released checkpoint.

    Raises:
        ValueError: a field of the configuration, or an option of the engine, that this model cannot honour.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        hf_config = vllm_config.model_config.hf_config
        self.config = config = TextConfig.from_hf(hf_config)
        self.plan = Plan.of(config)
        check(config, self.plan, vllm_config)
        root = f"{prefix}." if prefix else ""
        dtype = vllm_config.model_config.dtype
        self.ropes = [Rope(config.qk_rope_head_dim, *astuple(config.rope(ratio))) for ratio in (0, 1)]

        self.embed = VocabParallelEmbedding(config.vocab_size, config.hidden_size, prefix=f"{root}embed")
        self.layers = nn.ModuleList()
        attention: dict[int, Attention] = {}
        for role in self.plan.layers:
            attn = Attention(
                config,
                role,
                attention,
                block_size=vllm_config.cache_config.block_size,
                dtype=dtype,
                speculative_tokens=vllm_config.num_speculative_tokens,
                prefix=f"{root}layers.{role.layer}.attn",
            )
            attention[role.layer] = attn
            moe = MoE(config, expert_parallel=vllm_config.parallel_config.enable_expert_parallel)
            self.layers.append(DecoderLayer(config, attn, moe))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        # fp32, so that logits are: a bf16 weight is exact in it, and no step has to widen the matrix anew.
        self.head = ParallelLMHead(
            config.vocab_size, config.hidden_size, params_dtype=torch.float32, prefix=f"{root}head"
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """ids int [T] → embeddings [T, H]."""
        return self.embed(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The normed state [T, H] of every token of the step, from ids int [T] or embeddings [T, H].

        ``positions`` is int64 [T]. Rows beyond the step's real tokens, where an engine pads, come back as zeros.
        """
        e = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        padded = len(e)
        step = self.layers[0].attn.swa_cache.step
        if step is not None:
            e, positions = e[: step.tokens], positions[: step.tokens]
        stream = e.unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        shared = Shared(window=Rotation.at(self.ropes[0], positions), long=Rotation.at(self.ropes[1], positions))
        pre = None
        for layer in self.layers:
            stream, pre = layer(stream, pre, shared)
        h = self.norm(collapse(stream, pre))
        return nn.functional.pad(h, (0, 0, 0, padded - len(h)))

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """h [T, H] → fp32 logits [T, V]."""
        return self.logits_processor(self.head, hidden_states.float())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill every parameter from the tensors of a checkpoint (:mod:`kvproof.deepseek_v41.loading`)."""
        return load_weights(self, weights, self.config.quantisation)
