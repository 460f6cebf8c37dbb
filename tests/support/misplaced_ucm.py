"""UCM with a wrong idea of where the cache is: what its binaries are told is what they do."""

import ctypes

import numpy as np
from ucm.integration.vllm.ucm_connector import UCMConnector


class BeyondTheEnd(UCMConnector):
    """Every address lies one whole cache too far."""

    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        layout = self.connector.kv_cache_layout
        layout.base_ptrs = layout.base_ptrs + np.uint64(int(layout.buffer_sizes.sum()))


class OneBlockTooHigh(UCMConnector):
    """Every address lies one block too far, on both ways."""

    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        layout = self.connector.kv_cache_layout
        layout.base_ptrs = layout.base_ptrs + layout.block_stride_lists


class Nowhere(UCMConnector):
    """Every address lies a tebibyte too far, where a device has no memory."""

    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        layout = self.connector.kv_cache_layout
        layout.base_ptrs = layout.base_ptrs + np.uint64(1 << 40)


class Faults(UCMConnector):
    """Reads where nothing is, once every library of UCM was loaded and its store was used."""

    saved = False

    def start_load_kv(self, *args, **kwargs):
        if self.saved:
            ctypes.string_at(0)
        super().start_load_kv(*args, **kwargs)

    def wait_for_save(self):
        super().wait_for_save()
        self.saved = True
