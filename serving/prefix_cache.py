"""Which KV blocks hold what a request is about to compute: blocks by tokens, mix and all that comes before them.

The keys and values of a block depend on its tokens, on every token before them, and on the adapters and weights that
they were computed with. A block's key is therefore a chain: SHA-256 of the key before it and of the block's tokens,
beginning with that of the mix. Two requests share a block only if keys agree, so never across mixes, and a collision
would be one of SHA-256. The two KV caches of an X-LoRA request have different keys, both of them its mix's own.
"""

import array
import hashlib

from serving.block_pool import BlockPool
from serving.request import Request


class PrefixCache:
    """Finds the leading blocks of a request among those that others have computed, and lets its own be found.

    Only full blocks are shared, so nobody writes a shared one. `register` wants tokens that the host knows, and KV
    writes that are dispatched: a step that reads a block comes after them on the device. The registered blocks that
    nobody owns are free for all others: see `BlockPool`, which evicts the end of a sequence before its beginning.

    Requests that compute the same tokens side by side each fill blocks of their own, of which the first to register
    is kept. If it is evicted first, blocks that follow the other are not found until it is computed again.
    """

    def __init__(self, block_pool: BlockPool) -> None:
        """Nothing is registered.

        Args:
          block_pool: the blocks, shared with the scheduler.
        """
        self.block_pool = block_pool

    def find(self, request: Request) -> list[int]:
        """The blocks that hold the longest known prefix of a request, in order; none of them its last known token.

        That token is computed even if its block is there: the next one is sampled from what it gives.
        """
        block_ids: list[int] = []
        num_caches = request.num_caches
        keys, most = request.block_keys, (request.num_known_tokens - 1) // self.block_pool.block_size * num_caches
        while len(block_ids) < most:
            i = len(block_ids)
            if i == len(keys):  # twice as many each time: few for a prompt that nobody has asked before
                self._extend_keys(request, min(2 * i + num_caches, most))
            block_id = self.block_pool.find(keys[i])
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids[: len(block_ids) // num_caches * num_caches]

    def register(self, request: Request) -> None:
        """Lets every full block of a running request be found, as far as its tokens are computed and known."""
        num_tokens = min(request.num_computed_tokens, request.num_known_tokens)
        num_full = num_tokens // self.block_pool.block_size * request.num_caches
        self._extend_keys(request, num_full)
        for i in range(request.num_registered_blocks, num_full):
            self.block_pool.register(request.block_table[i], request.block_keys[i])
        request.num_registered_blocks = num_full

    def _extend_keys(self, request: Request, num_blocks: int) -> None:
        """Sees to the keys of the request's first blocks, whose tokens are known; each is computed once a request.

        With two caches, the blocks of one position have one key in the chain, and the second a key made of that.
        """
        keys, num_caches = request.block_keys, request.num_caches
        if len(keys) >= num_blocks:
            return
        block_size = self.block_pool.block_size
        first, stop = len(keys) // num_caches * block_size, num_blocks // num_caches * block_size
        token_ids = array.array("i", request.token_ids(first, stop))
        num_bytes = block_size * token_ids.itemsize
        content = token_ids.tobytes()
        key = keys[-num_caches] if keys else _mix_key(request)
        for start in range(0, len(content), num_bytes):
            key = hashlib.sha256(key + content[start : start + num_bytes]).digest()
            keys.append(key)
            keys += [hashlib.sha256(key + bytes([cache])).digest() for cache in range(1, num_caches)]


def _mix_key(request: Request) -> bytes:
    """What the chain begins with: adapters and weights, in no order; the gated set and the adapters it draws on."""
    # repr tells any two of these apart: names are quoted, and floats given in full.
    mix = (request.mix.entries, request.mix.gated_set, tuple(sorted(request.adapters)))
    return hashlib.sha256(repr(mix).encode()).digest()
