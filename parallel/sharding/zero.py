"""ZeroHooks: when the weights of a part are gathered, and when its gradients are reduced (see the table
in bucket.py).

A part is a unit that a stage runs at once: the embedding, a block, the output head. Hooks on its module, and
on the module's input and output tensors, call the scheduler; the model is unaware of it.

    begin_forward    wait for the part's weights; start the all-gather of the next part's (ZeRO-3)
    end_forward      free them (ZeRO-3)
    begin_backward   like begin_forward, for the previous part; allocate the part's gradients (ZeRO-2, 3)
    end_backward     start reducing the part's gradients; wait for the reduction of the part after it (under
                     ZeRO-0 and 1 finish_grad_reductions waits at the end of the step)

So a reduction overlaps with at least one part's backward, and ZeRO-2 and 3 never hold the full gradients of
more than two parts. Gradients are reduced when the last one of a microbatch (ZeRO-2, 3) or of the step (0, 1)
is ready. Autograd triggers this: the gradient of a part's output starts its backward, the gradient of its
input ends it. If the input has no gradient (an embedding, or the first part above frozen ones), the end of
the stage's backward does. A bucket shared by two parts (a tied table) keeps full weights and gradients until
both have finished their last backward of the step.

A bucket that is exchanged with no other rank needs none of this (Bucket.is_scheduled): its weights and
gradients are always full, and finish_grad_reductions completes them after the last backward.

Every rank of a group runs the same parts in the same order, so all ranks start the same exchanges in the same
order.
"""
from collections.abc import Sequence

from torch import Tensor, is_grad_enabled, nn

from parallel.sharding.bucket import Bucket


class ZeroHooks:
    """Start and wait for the exchanges of one stage's buckets.

    The pipeline (parallel/pipeline/executor.py) sets these before each of its ops:

    is_last_microbatch   the following backward is the step's last of this stage
    input_grads_only     the backward computes no weight gradients; a later op computes those, and the
                         reductions follow it
    backward_follows     the stage's next op after this forward is its backward. The last block then keeps
                         full weights, as the head always does: its backward needs them first
    """

    def __init__(
        self, buckets_of_parts: Sequence[list[Bucket]], *, first_is_embedding: bool, last_is_head: bool
    ) -> None:
        self.parts = list(buckets_of_parts)
        self.first_is_embedding = first_is_embedding
        self.last_is_head = last_is_head
        self.last_block = len(self.parts) - 2 if last_is_head else len(self.parts) - 1
        self.is_last_microbatch = False
        self.input_grads_only = False
        self.backward_follows = False
        self.reducing: list[Bucket] = []  # their reductions were started by the previous end_backward
        self.lowest: int | None = None  # the part of the last forward whose input has no gradient

    @classmethod
    def without_buckets(cls) -> "ZeroHooks":
        """Return a scheduler without work, for a stage that only computes: its weights are in no bucket."""
        return cls([], first_is_embedding=False, last_is_head=False)

    # ---- hooks ---------------------------------------------------------------------------------------------

    def attach(self, modules: Sequence[nn.Module]) -> None:
        """Register the hooks: one module for each part, in forward order.

        The first argument of a module is its input; its output, or the first of several, is a tensor. The
        gradient of the accompanying residual (model/block.py) is ready at the same time.
        """
        if len(modules) != len(self.parts):
            raise ValueError(f"{len(modules)} modules for {len(self.parts)} parts")
        for part, module in enumerate(modules):
            self.attach_to(module, part)

    def attach_to(self, module: nn.Module, part: int) -> None:
        """Register the hooks of one part."""
        def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self.begin_forward(part)

        def after(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
            self.end_forward(part, inputs[0], output)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def begin_forward(self, part: int) -> None:
        """Wait for the part's weights and start the all-gather of the next part's."""
        self.unshard(part, next_part=part + 1)
        if self.is_head(part) and is_grad_enabled():  # the loss computes its gradients in the forward
            self.allocate_grads(part)

    def end_forward(self, part: int, x: Tensor, output: Tensor | tuple[Tensor, ...]) -> None:
        """Free the weights (ZeRO-3) unless the backward needs them next, and hook the backward."""
        is_head_in_training = self.is_head(part) and is_grad_enabled()
        y = output if isinstance(output, Tensor) else output[0]
        is_needed_next = part == self.last_block and self.backward_follows and y.requires_grad
        if not is_head_in_training and not is_needed_next:
            for bucket in self.parts[part]:
                if bucket.zero == 3 and bucket.num_users == 1:
                    bucket.weights.reshard()

        if not y.requires_grad:
            return
        y.register_hook(lambda _: self.begin_backward(part))
        if x.requires_grad:
            x.register_hook(lambda _: self.end_input_grad(part))
        else:
            self.lowest = part

    def end_input_grad(self, part: int) -> None:
        """Handle the complete gradient of the part's input.

        This ends the part's backward, unless the weight gradients come later.
        """
        if not self.input_grads_only:
            self.end_backward(part)

    def begin_backward(self, part: int) -> None:
        """Wait for the part's weights, start the all-gather of the previous part's, allocate gradients.

        An embedding's backward reads no weights, and parts below the lowest one have no backward.
        """
        first_with_weights = max(self.lowest or 0, 1 if self.first_is_embedding else 0)
        if part >= first_with_weights:
            next_part = part - 1 if part > first_with_weights else None
            self.unshard(part, next_part)
        self.allocate_grads(part)

    def end_backward(self, part: int) -> None:
        """Reduce the gradients of a part over the ranks, once those of a microbatch are computed.

        Continue the reductions that the previous end_backward started (of the part after it in the model),
        and start this part's if they are due.
        """
        for bucket in self.reducing:
            bucket.grads.continue_reduce()
        self.reducing = []

        for bucket in self.parts[part]:
            if not bucket.trains:
                if bucket.zero == 3 and bucket.num_users == 1:
                    bucket.weights.reshard()
                continue
            if bucket.sharding.track_noise_scale:
                bucket.grads.record_first_microbatch()
            bucket.num_finished_users += self.is_last_microbatch
            is_last = bucket.num_finished_users == bucket.num_users
            reduces_each_microbatch = bucket.zero >= 2 and bucket.num_users == 1
            if is_last or reduces_each_microbatch:
                bucket.grads.start_reduce(is_last)
                self.reducing.append(bucket)
                if bucket.zero == 3:
                    bucket.weights.reshard()
            if is_last:
                bucket.num_finished_users = 0

    # ---- called by the hooks and the pipeline --------------------------------------------------------------

    def is_head(self, part: int) -> bool:
        return self.last_is_head and part == len(self.parts) - 1

    def unshard(self, part: int, next_part: int | None) -> None:
        """Wait for the full weights of a part, and start the all-gather of those that are used next."""
        for bucket in self.parts[part]:
            if bucket.zero > 0:
                bucket.weights.wait_unshard()
        if next_part is not None and next_part < len(self.parts):
            for bucket in self.parts[next_part]:
                if bucket.zero == 3:
                    bucket.weights.start_unshard()

    def allocate_grads(self, part: int) -> None:
        """Allocate the full gradients of the part, if ZeRO-2 or 3 has freed them."""
        for bucket in self.parts[part]:
            if bucket.zero >= 2:
                bucket.grads.allocate()

    def end_lowest_backward(self) -> None:
        """Call after a backward of the stage: the lowest part has no input gradient to end its backward."""
        if self.lowest is not None:
            self.end_backward(self.lowest)

    def begin_weight_grads(self) -> None:
        """Call before deferred weight gradients."""
        for part in range(len(self.parts)):
            self.allocate_grads(part)

    def end_weight_grads(self) -> None:
        """Call after deferred weight gradients."""
        for part in reversed(range(len(self.parts))):
            self.end_backward(part)
