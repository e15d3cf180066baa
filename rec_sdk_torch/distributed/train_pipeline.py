"""Training pipelines with Rec SDK's signatures; they plan later batches and copy rows during a step."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..operators.devices.backends import parse_device
from ..sparse.jagged_tensor_with_timestamp import with_click_labels
from ..tbe import MAX_DEPTH, stream_context
from .prefetch import PrefetchedBatch, check_depth, find_collections, find_features, iterate_ahead

In = TypeVar("In")


class _CopiedBatch(NamedTuple):
    """A batch on the model's device, and the event that is recorded after its copy."""

    batch: Any
    event: Any


class _TrainPipeline(Generic[In]):
    """Base class of the training pipelines; `progress` performs one step.

    During a step, the next batches are planned and copied to the device. A batch must have `.to(device, non_blocking=)`
    and `.record_stream(stream)`, as TorchRec's pipelines require (`torchrec.streamable.Pipelineable`); a
    KeyedJaggedTensor has both. The model's forward takes a batch and returns `(losses, output)`. If
    DistributedModelParallel shards the model, every rank needs such a pipeline, and all ranks must perform the same
    number of steps.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device | str | int,
        return_loss: bool,
        execute_all_batches: bool,
        depth: int,
        features: Callable[[In], Any] | None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._device = parse_device(device)
        self._collections = find_collections(model)
        for name, collection in self._collections.items():
            if collection.device != self._device:
                raise ValueError(
                    f"collection {name!r} is on {collection.device}, the pipeline's device is {self._device}"
                )
        self._return_loss = return_loss
        self._execute_all_batches = execute_all_batches
        self._forward: Callable[[Any], tuple[torch.Tensor, Any]] = model
        self._zero_grad: Callable[[], object] = optimizer.zero_grad
        self._backward: Callable[[torch.Tensor], object] = _sum_backward
        self._depth = check_depth(depth)
        self._features = features or find_features
        self._module = None if self._device.type == "cpu" else torch.get_device_module(self._device)
        self._copies = None if self._module is None else self._module.Stream(self._device)
        self._source: Iterator[In] | None = None
        self._batches: Iterator[_CopiedBatch] | None = None

    def progress(self, dataloader_iter: Iterator[In]) -> Any:
        """Performs one step: forward of the next batch and, in training mode, backward and the optimizer's step.

        A call with another iterator starts anew and drops the batches that were read ahead from the former iterator.

        Returns:
            The model's output, or `(output, losses)` with `return_loss`.

        Raises:
            StopIteration: there are no more batches; `progress` may then be called with a new iterator.
        """
        if self._batches is None or self._source is not dataloader_iter:
            self.reset()
            self._source = dataloader_iter
            drain = self._execute_all_batches
            self._batches = iterate_ahead(dataloader_iter, self._depth, self._start_batch, self._collections, drain)
        try:
            copied = next(self._batches)
        except StopIteration:
            self.reset()
            raise
        batch = self._wait_for_copy(copied)
        training = self._model.training
        if training:
            self._zero_grad()
        losses, output = self._forward(batch)
        if training:
            self._backward(losses)
            self._optimizer.step()
        return (output, losses) if self._return_loss else output

    def reset(self) -> None:
        """Drops the current iterator and the batches read from it; the next `progress` starts a new one."""
        batches, self._batches, self._source = self._batches, None, None
        if batches is not None:
            batches.close()  # type: ignore[attr-defined]  # a generator

    def _start_batch(self, batch: In) -> tuple[_CopiedBatch, PrefetchedBatch | None]:
        """Starts to copy a batch to the device and to plan it."""
        self._attach_click_labels(batch, batch)
        started = PrefetchedBatch(self._collections, self._features(batch), self._depth) if self._depth else None
        if self._module is None:
            return _CopiedBatch(batch, None), started
        with stream_context(self._copies):
            copied = batch.to(self._device, non_blocking=True)  # type: ignore[attr-defined]
            event = self._module.current_stream(self._device).record_event()
        self._attach_click_labels(copied, batch)
        if started is not None:
            started.add_copy(self._features(copied))
        return _CopiedBatch(copied, event), started

    def _attach_click_labels(self, batch: In, original: In) -> None:
        """Attaches `click_labels` of `original`, if any, to the features of `batch`; tables may score ids by them."""
        labels = getattr(original, "click_labels", None)
        if isinstance(labels, torch.Tensor):
            selected = self._features(batch)
            for features in [selected] if isinstance(selected, KeyedJaggedTensor) else selected.values():
                if labels.numel() == features.stride():  # otherwise the labels do not belong to these features
                    with_click_labels(features, labels)

    def _wait_for_copy(self, copied: _CopiedBatch) -> Any:
        if self._module is not None:
            stream = self._module.current_stream(self._device)
            stream.wait_event(copied.event)
            copied.batch.record_stream(stream)
        return copied.batch


class EmbCacheTrainPipelineContext:
    """Default of Rec SDK's option `context_type`, for scripts that pass it; these pipelines create no contexts."""


class EmbCacheTrainPipelineSparseDist(_TrainPipeline[In]):
    """Training pipeline for models with cached embeddings, with the interface of Rec SDK's pipeline; see `progress`.

    Rec SDK requires a call of `wait_pipeline_compute_swapinfo` before a save; this pipeline does not.

    Example:
        >>> import torch
        >>> from torchrec import KeyedJaggedTensor
        >>> import rec_sdk_torch as rst
        >>> config = rst.EmbCacheEmbeddingBagConfig(
        ...     name="t", num_embeddings=100, embedding_dim=4, feature_names=["item"]
        ... )
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.tables = rst.EmbCacheEmbeddingBagCollection([config], device="cpu")
        ...         self.dense = torch.nn.Linear(4, 1)
        ...
        ...     def forward(self, batch):
        ...         output = self.dense(self.tables(batch).values())
        ...         return output.square().mean(), output
        >>> model = Model()
        >>> rst.apply_optimizer_in_backward(torch.optim.SGD, model.tables.parameters(), {"lr": 0.1})
        >>> optimizer = torch.optim.SGD(model.dense.parameters(), lr=0.1)
        >>> pipeline = rst.EmbCacheTrainPipelineSparseDist(model, optimizer, "cpu", "cpu", return_loss=True)
        >>> ids = (torch.tensor([n, n + 1]) for n in range(3))
        >>> batches = (KeyedJaggedTensor(["item"], each, lengths=torch.tensor([1, 1])) for each in ids)
        >>> output, loss = pipeline.progress(batches)  # StopIteration when there are no more
        >>> output.shape
        torch.Size([2, 1])
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        cpu_device: torch.device | str,
        npu_device: torch.device | str | int,
        return_loss: bool = False,
        evict_step_interval: int | None = None,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        context_type: type | None = None,
        pipeline_postproc: bool = False,
        custom_model_fwd: Callable[[In], tuple[torch.Tensor, Any]] | None = None,
        custom_model_zero_grad: Callable[[], object] | None = None,
        custom_model_bwd: Callable[[torch.Tensor], object] | None = None,
        *,
        depth: int = 2,
        features: Callable[[In], Any] | None = None,
    ) -> None:
        """Creates a pipeline.

        Args:
            model: contains collections of this package. In training mode `progress` trains it, otherwise it only runs
                forward.
            optimizer: the optimizer of the dense parameters.
            cpu_device: the host.
            npu_device: the device of the model, of any type.
            return_loss: `progress` returns `(output, losses)` instead of the output.
            evict_step_interval: training steps between evictions of ids, for all tables that evict ids; None uses the
                tables' configs.
            execute_all_batches: whether to train the `depth` batches that are still queued when the data ends; if
                False, they are dropped.
            apply_jit, context_type, pipeline_postproc: Rec SDK's options; other values than the defaults raise an
                error.
            custom_model_fwd: function that replaces the model's forward: batch -> (losses, output).
            custom_model_zero_grad: function that replaces `optimizer.zero_grad`.
            custom_model_bwd: function that replaces `losses.sum(dim=0).backward()`: losses -> any value.
            depth: 0 to 12, see `prefetch`.
            features: see `prefetch`.

        Raises:
            ValueError: the model has no collection, or one on another device; `depth` is out of range; an option of Rec
                SDK that is not supported.
        """
        if torch.device(cpu_device).type != "cpu":
            raise ValueError(f"cpu_device is {cpu_device!r}, expected the host: torch.device('cpu')")
        _reject_options(apply_jit=apply_jit, pipeline_postproc=pipeline_postproc)
        if context_type not in (None, EmbCacheTrainPipelineContext):
            raise ValueError(
                f"context_type is {context_type!r}: this pipeline makes no contexts, leave it None or Rec SDK's "
                "default, EmbCacheTrainPipelineContext"
            )
        super().__init__(model, optimizer, npu_device, return_loss, execute_all_batches, depth, features)
        if evict_step_interval is not None:
            for collection in self._collections.values():
                collection.set_evict_step_interval(evict_step_interval)
        self._forward = custom_model_fwd or self._forward
        self._zero_grad = custom_model_zero_grad or self._zero_grad
        self._backward = custom_model_bwd or self._backward

    def wait_pipeline_compute_swapinfo(self) -> None:
        """Blocks until all batches that were read ahead and can be planned now are planned.

        Rec SDK requires this call before a save; with this pipeline, a save may begin at any time.
        """
        for collection in self._collections.values():
            collection.wait_for_plans()


class HybridTrainPipelineSparseDist(_TrainPipeline[In]):
    """Training pipeline for models with cached or hashed embeddings, with Rec SDK's interface; see `progress`.

    Example:
        >>> import torch
        >>> from torchrec import KeyedJaggedTensor
        >>> import rec_sdk_torch as rst
        >>> config = rst.HashEmbeddingBagConfig(
        ...     name="t", num_embeddings=100, embedding_dim=4, feature_names=["item"]
        ... )
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.tables = rst.HashEmbeddingBagCollection([config], device="cpu")
        ...         self.dense = torch.nn.Linear(4, 1)
        ...
        ...     def forward(self, batch):
        ...         output = self.dense(self.tables(batch).values())
        ...         return output.square().mean(), output
        >>> model = Model()
        >>> rst.apply_optimizer_in_backward(torch.optim.SGD, model.tables.parameters(), {"lr": 0.1})
        >>> optimizer = torch.optim.SGD(model.dense.parameters(), lr=0.1)
        >>> pipeline = rst.HybridTrainPipelineSparseDist(model, optimizer, "cpu", return_loss=True)
        >>> ids = (torch.tensor([n, n + 1]) for n in range(3))
        >>> batches = (KeyedJaggedTensor(["item"], each, lengths=torch.tensor([1, 1])) for each in ids)
        >>> output, loss = pipeline.progress(batches)  # StopIteration when there are no more
        >>> output.shape
        torch.Size([2, 1])
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device | str | int,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        return_loss: bool = False,
        pipe_n_batch: int = 6,
        *,
        features: Callable[[In], Any] | None = None,
    ) -> None:
        """Creates a pipeline.

        Args:
            model: contains collections of this package. In training mode `progress` trains it, otherwise it only runs
                forward.
            optimizer: the optimizer of the dense parameters.
            device: the device of the model, of any type.
            execute_all_batches: whether to train the `pipe_n_batch` batches that are still queued when the data ends;
                if False, they are dropped.
            apply_jit: Rec SDK's option; True raises an error.
            return_loss: `progress` returns `(output, losses)` instead of the output.
            pipe_n_batch: number of batches that are planned and exchanged ahead, 1 to 12; the `depth` of `prefetch`.
            features: see `prefetch`.

        Raises:
            ValueError: the model has no collection, or one on another device; `pipe_n_batch` is out of range;
                `apply_jit` is True.
            TypeError: `pipe_n_batch` is not an integer.
        """
        _reject_options(apply_jit=apply_jit)
        if isinstance(pipe_n_batch, bool) or not isinstance(pipe_n_batch, numbers.Integral):
            raise TypeError(f"pipe_n_batch is {pipe_n_batch!r}, expected a whole number from 1 to {MAX_DEPTH}")
        if not 1 <= pipe_n_batch <= MAX_DEPTH:
            raise ValueError(f"pipe_n_batch is {pipe_n_batch}, allowed are 1 to {MAX_DEPTH}")
        super().__init__(model, optimizer, device, return_loss, execute_all_batches, int(pipe_n_batch), features)


def _reject_options(**options: bool) -> None:
    """Raises an error if an option that only Rec SDK supports is set."""
    for name, value in options.items():
        if value:
            raise ValueError(f"{name}={value!r} is not supported: leave it False")


def _sum_backward(losses: torch.Tensor) -> None:
    losses.sum(dim=0).backward() if losses.dim() else losses.backward()
