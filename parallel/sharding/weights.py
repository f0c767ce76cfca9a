"""BucketWeights: the weights of a bucket in the compute dtype, full or sharded, and the master weights.

An all-gather starts when its input is ready and is waited for when its result is needed: start_unshard() ..
wait_unshard() (called by zero.py). Between steps, start_gather_updated() sends the weights that the optimizer
has updated. Each all-gather covers the whole bucket, in the compute dtype or in the codec's 8 bits.
"""
from torch import Tensor
from torch import dtype as Dtype

from kernels.fp8_weight import QuantizedWeight
from parallel.offload import to_host
from parallel.sharding.packing import BucketLayout
from parallel.sharding.slots import ShardingConfig, ShardingGroups, Slot
from parallel.wire import compress
from parallel.wire.algorithms import start_gather
from parallel.wire.comm import PendingExchange


class BucketWeights:
    """full [size] holds the weights in the compute dtype; None while ZeRO-3 keeps them sharded.

    local [shard size] is this rank's shard of them. master [shard size] is what the optimizer updates, in
    fp32 or fp64 (bf16 on request): the same tensor as `local` if the dtypes agree, unless it is offloaded to
    the host, or the weights are sent in 8 bits. Of frozen weights it is always `local`.
    """

    def __init__(
        self,
        slots: tuple[Slot, ...],
        layout: BucketLayout,
        groups: ShardingGroups,
        sharding: ShardingConfig,
        *,
        initial: Tensor,
        dtype: Dtype,
        trains: bool = True,
    ) -> None:
        """initial [size] holds the initial values, in fp32 or fp64; dtype is the compute dtype.
        trains: False for frozen weights."""
        self.slots = slots
        self.size = layout.size
        self.zero = sharding.zero
        self.group = groups.shard
        # frozen weights are sent once before ZeRO-3, and in every microbatch with it
        self.codec = sharding.weight_codec if trains or self.zero == 3 else "none"
        self.block = sharding.alignment
        # whether the other ranks see this rank's weights in 8 bits
        is_gathered = sharding.zero > 0 and groups.shard.size > 1
        self.is_quantized = self.codec != "none" and is_gathered
        self.pending_gather: PendingExchange | compress.CompressedAllGather | None = None
        owned = slice(layout.shard_start, layout.shard_end)

        # full weights in the compute dtype, and this rank's shard of them
        if sharding.bf16_master:
            initial = initial.bfloat16()
        shares_storage = dtype == initial.dtype and not self.is_quantized
        full = initial if shares_storage else initial.to(dtype, copy=True)
        if self.is_quantized and self.zero < 3:  # from the first step on, as the other ranks see them
            full.copy_(compress.quantized_copy(full, self.group.size, self.codec, self.block))
        self.full: Tensor | None = full
        self.local = full[owned] if self.zero < 3 else full[owned].clone()

        # masters: on the host, aliasing the local weights, or a copy
        if not trains:
            self.master = self.local
        elif sharding.offload_master:
            self.master = to_host(initial[owned])
        elif self.local.dtype == initial.dtype and (self.zero == 3 or not self.is_quantized):
            self.master = self.local
        else:
            self.master = initial[owned].clone()

        for slot in self.slots:
            slot.param.quantized = QuantizedWeight()
        self.bind_parameters(full)
        if self.zero == 3:
            self.reshard()

    def bind_parameters(self, full: Tensor) -> None:
        """Make every parameter's data a view of the full weights [size]."""
        for slot in self.slots:
            slot.param.data = slot.view_in(full)

    def start_unshard(self) -> None:
        """Start all-gathering sharded weights (ZeRO-3), ahead of their use."""
        if self.full is None:
            self.full = self.local.new_empty(self.size)
            self.pending_gather = start_gather(
                self.local, self.group, out=self.full, codec=self.codec, block=self.block
            )

    def wait_unshard(self) -> None:
        """Wait until the full weights are on this rank: unsharded, or gathered after the last step."""
        self.start_unshard()
        self.wait_gather()

    def wait_gather(self) -> None:
        """Wait for the all-gather in flight, if any."""
        if self.pending_gather is not None:
            self.bind_parameters(self.pending_gather.wait())
            self.pending_gather = None

    def reshard(self) -> None:
        """Free all but the local shard (ZeRO-3, after use)."""
        if self.pending_gather is not None:
            self.pending_gather.wait()
        self.full = None
        self.pending_gather = None
        for slot in self.slots:
            slot.param.data = slot.param.data.new_empty(0)
            slot.param.quantized.free()

    def drop_quantized(self) -> None:
        """Drop the cached 8-bit weights (kernels/fp8_weight.py)."""
        for slot in self.slots:
            slot.param.quantized.drop()

    def copy_master_to_local(self) -> None:
        """Round the masters to the compute dtype, unless the optimizer did so in its update."""
        if self.local is not self.master:
            self.local.copy_(self.master)

    def start_gather_updated(self) -> None:
        """Start sending the updated local weights to the other ranks, which wait at their next use."""
        self.drop_quantized()  # every update of the weights passes here
        if self.zero == 3:
            self.reshard()  # full weights that were kept are stale
            return
        if self.zero == 0 or self.group.size == 1:
            return
        if self.pending_gather is not None:
            self.pending_gather.wait()
        if self.is_quantized:
            self.copy_master_to_local()  # after a skipped step, `local` holds what the other ranks saw
        if self.full is None:
            raise RuntimeError(f"ZeRO-{self.zero} keeps full weights, and a bucket has none")
        # a copy: `local` is a view of `full`, which the all-gather overwrites
        self.pending_gather = start_gather(
            self.local.clone(), self.group, out=self.full, codec=self.codec, block=self.block
        )
