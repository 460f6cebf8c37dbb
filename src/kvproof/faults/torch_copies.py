"""Connectors that copy with torch operators instead of copy lists, turned into transfers.

ExampleConnector indexes the layer's tensor inside its two hooks. Around a load the rig takes the right result as the
store and puts KV memory back; around a save it hands the connector a private copy of the layer. Between the two stands
the planted fault, with the same page moves as for every other connector. Production computes every slot and file name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvproof.faults.pages import bytes_at
from kvproof.faults.transfer import LOAD, SAVE, Move, Transfer

if TYPE_CHECKING:
    from kvproof.faults.rig import Rig


def wire(rig: Rig) -> None:
    """Wrap the worker's hooks if the connector copies with torch."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    worker = get_kv_transfer_group()
    if not isinstance(worker, ExampleConnector):
        return
    production_load, production_save = worker.start_load_kv, worker.save_kv_layer
    alive: list[Any] = []  # memory that held moves still point to

    def requests(store: bool) -> list[Any]:
        metadata: Any = worker._get_connector_metadata()
        return [r for r in metadata.requests if r.is_store == store and len(r.slot_mapping)]

    def blocks_of(request: Any) -> list[int]:
        size = worker._block_size
        return list(dict.fromkeys((request.slot_mapping // size).tolist()))

    def load(*args: Any, **kwargs: Any) -> None:
        loads = requests(store=False) if rig.fault is not None else []
        if not loads:
            production_load(*args, **kwargs)
            return
        before = rig.pages.snapshot()
        production_load(*args, **kwargs)
        blocks = [b for request in loads for b in blocks_of(request)]
        pages = [
            (rig.pages.address(family, block), frames.nbytes)
            for family, frames in enumerate(rig.pages.families) for block in blocks
        ]  # fmt: skip
        # One page behind the other, as in a store of its own, and one to spare for faults that read too far.
        store = np.concatenate([*(bytes_at(*page) for page in pages), np.zeros(pages[-1][1], np.uint8)])
        alive.append(store)
        rig.pages.restore(before)
        moves, at = [], store.ctypes.data
        for kv, nbytes in pages:
            moves.append(_move(rig, kv, at, nbytes))
            at += nbytes
        rig.carry(Transfer(LOAD, tuple(moves)))

    def save(layer_name: str, kv_layer: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        stores = requests(store=True) if rig.fault is not None else []
        if not stores:
            production_save(layer_name, kv_layer, *args, **kwargs)
            return
        spot = rig.pages.find(kv_layer.data_ptr())
        if spot is None:
            raise RuntimeError(f"layer {layer_name}: its tensor at {kv_layer.data_ptr():#x} is not in KV memory")
        frames = rig.pages.families[spot.family]
        private = np.zeros(rig.pages.layout.num_blocks * frames.block_stride, np.uint8)
        moves = [
            _move(
                rig, rig.pages.address(spot.family, block), private.ctypes.data + block * frames.block_stride,
                frames.nbytes,
            )
            for request in stores for block in blocks_of(request)
        ]  # fmt: skip
        rig.carry(Transfer(SAVE, tuple(moves)))
        copy = torch.from_numpy(private).view(kv_layer.dtype).as_strided(kv_layer.size(), kv_layer.stride())
        production_save(layer_name, copy, *args, **kwargs)

    worker.start_load_kv = load  # type: ignore[method-assign]
    worker.save_kv_layer = save  # type: ignore[method-assign]


def _move(rig: Rig, kv: int, store: int, nbytes: int) -> Move:
    move = rig.move(kv, store, nbytes)
    if move is None:
        raise RuntimeError(f"address {kv:#x} is not in KV memory")
    return move
