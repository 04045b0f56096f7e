"""Accelerate's Accelerator with context parallelism for hybrid models.

    accelerator = CPAccelerator(
        parallelism_config=ParallelismConfig(cp_size=4),
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        ...

docs/accelerate.md says what a script may do, what is refused, and why.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, RandomSampler

from fla_cp.comm.exchange import make_exchange
from fla_cp.context import FLACPContext
from fla_cp.integrations.rates import rate_names, shard_rates
from fla_cp.integrations.whole_batches import LAYOUTS, Place, take_whole_batches
from fla_cp.partition.checks import check_conv1d_kernel_size, check_exchange

try:
    from accelerate import Accelerator
    from accelerate.data_loader import get_sampler
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.state import PartialState
    from accelerate.utils import (
        DataLoaderConfiguration,
        DistributedType,
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
        broadcast_object_list,
        gather_object,
        recursively_apply,
    )
except ImportError as error:
    raise ImportError(
        "CPAccelerator needs accelerate 1.15 or later: pip install 'fla_cp[train]'"
    ) from error

USE_CONFIG = "ACCELERATE_USE_PARALLELISM_CONFIG"
"""Set by `accelerate launch --use_parallelism_config`."""

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class CPAccelerator(Accelerator):
    """An Accelerator whose ranks along `cp` share each sequence of a hybrid model.

    Takes the arguments of accelerate's Accelerator, and by name:
    parallelism_config: sizes of dp_replicate, dp_shard and cp; also from `accelerate launch`.
    fsdp_plugin: FSDP2 (fsdp_version=2), which shards parameters over dp_shard x cp.
    layout: "contiguous", "zigzag", or "auto": zig-zag ranges for batches in which they leave the
        busiest rank at least 5% less work in softmax attention, if the model is one that
        `parallelize` knows or has `fla_cp.nn.Attention` or `MultiHeadLatentAttention`. A rank then
        has two ranges of tokens, see `context.token_ranges`.
    exchange: how states travel between ranks, as for `build_cp_context`.
    conv1d_kernel_size: width of the model's convolutions; None: found in the model.

    The ranks of a cp group behave as one: each is given the same batch, returns its loss and logs
    the same. Gradients are means over all ranks, so that they are those of data parallelism alone.
    It also runs on CPUs over gloo, where accelerate itself refuses cp.

    Raises ValueError for options with which the training would differ from that on one rank: tensor
    and sequence parallelism, FSDP1, DeepSpeed, Megatron-LM, FP8, TorchDynamo, and data loaders that
    dispatch batches from one rank.
    """

    def __init__(
        self,
        *args: Any,
        parallelism_config: ParallelismConfig | None = None,
        layout: str = "auto",
        exchange: str = "auto",
        conv1d_kernel_size: int | None = None,
        **keywords: Any,
    ) -> None:
        if layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
        check_exchange(exchange)
        make_exchange(exchange, None, 1)  # refuses an unknown name
        check_conv1d_kernel_size(conv1d_kernel_size)
        given = inspect.signature(Accelerator.__init__).bind(self, *args, **keywords).arguments
        del given["self"]
        launched = os.environ.get(USE_CONFIG, "false").lower() == "true"
        if parallelism_config is None and launched:
            parallelism_config = ParallelismConfig()
        started = int(os.environ.get("WORLD_SIZE", "1"))
        _check(given, parallelism_config, started)
        config = parallelism_config or ParallelismConfig()
        plugin = given["fsdp_plugin"] = _fsdp_plugin(given, needed=started > 1)
        if started > 1 and not torch.accelerator.is_available():
            given["cpu"] = True  # accelerate would take each rank for a process of its own
        loaders = given.setdefault("dataloader_config", None) or DataLoaderConfiguration()
        _check_loaders(loaders)
        loaders.dispatch_batches = False  # None would dispatch the batches of iterable data sets
        given["dataloader_config"] = loaders
        with _without(USE_CONFIG):
            super().__init__(**given)
        if self.num_processes > 1 and not self.is_fsdp2:
            self._shard_on_cpu(plugin)
        self.state.parallelism_config = config
        self.state.device_mesh = config.get_device_mesh(self.device.type)
        config._validate_accelerator(self)
        group = self.torch_device_mesh.get_group("cp") if config.cp_enabled else None
        self._place = Place(group, layout, exchange, conv1d_kernel_size)

    def _shard_on_cpu(self, plugin: FullyShardedDataParallelPlugin) -> None:
        """Tells accelerate to run FSDP2. On GPUs it does so by itself, but not on CPUs."""
        for state in (self.state, PartialState()):
            state.distributed_type = DistributedType.FSDP
        self.state.fsdp_plugin = plugin

    @property
    def context(self) -> FLACPContext | None:
        """The context of the last call of a prepared model. Its `unshard` joins the ranks' parts of
        what that call returned for each token, such as logits."""
        return self._place.context

    @property
    def context_parallel_rank(self) -> int:
        """This rank's place among those that share a sequence."""
        return self.process_index % self._place.size

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """As accelerate's, but on the calling thread. By default torch runs it on a thread of the
        device, and to wake that thread takes the host longer than a short layer does."""
        with torch.autograd.set_multithreading_enabled(False):
            super().backward(loss, **kwargs)

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """As accelerate's. A model is one that `parallelize` knows, or whose forward takes
        cp_context. It is then called with whole batches, equal on all ranks of a cp group:

        input_ids, labels and other tensors [B, T, ..], labels not shifted. attention_mask,
        position_ids, seq_idx, seq_lens, cu_seqlens or cu_seq_lens_q describe documents and padding,
        see `documents_of`; without them each row is a document.
        The loss is that of the whole batch. Logits and all other results for each token are [1,
        local_tokens, ..]: this rank's part of all rows, see `context`.

        A model of yours gets this rank's [1, local_tokens, ..] and cp_context. Its loss must be
        this rank's share. If its forward takes them, it also gets shift_labels (each token's
        target) and num_items_in_batch (the number of targets in the batch), and divides by the
        latter.

        Raises ValueError for another model. A call raises ValueError for documents that are
        described in another way, and if the ranks of a cp group are given different batches.
        """
        rounded: list[nn.Module] = []
        for part in args:
            if isinstance(part, AcceleratedScheduler) and not isinstance(
                part, DataParallelScheduler
            ):
                raise ValueError(
                    "a scheduler that another Accelerator has prepared would take a step for each "
                    "rank of a cp group: pass the scheduler itself"
                )
            if isinstance(part, nn.Module) and not getattr(part, "_is_accelerate_prepared", False):
                take_whole_batches(part, self._place)
                if self.is_fsdp2:
                    _name_layers(self.state.fsdp_plugin, part)
                    if _casts_rates(self.state.fsdp_plugin, part):
                        rounded.append(part)
        with ExitStack() as stack:
            for part in args:
                if isinstance(part, nn.Module):
                    stack.enter_context(_ties_kept(part))
            for part in rounded:
                stack.enter_context(self._rates_kept(part, args))
            return super().prepare(*args, device_placement=device_placement)

    def _rates_kept(self, model: nn.Module, prepared: Sequence[Any]) -> AbstractContextManager[Any]:
        """The model's decay rates stay float32 if it is prepared in this context, together with
        the objects in `prepared`, which include its optimizers."""
        plugin = self.state.fsdp_plugin
        if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
            if self.is_main_process:
                _warn_of_rates(plugin, model)
            return nullcontext()
        mesh = self.torch_device_mesh[tuple(self.parallelism_config.fsdp_dim_names)]
        if plugin.cpu_ram_efficient_loading:
            return _called_with_ties(model, partial(shard_rates, model, mesh))
        _shard_rates_of(model, mesh, [x for x in prepared if isinstance(x, torch.optim.Optimizer)])
        return nullcontext()

    def _prepare_cp(self, *args: Any) -> Any:
        """Does nothing, where accelerate would prepare torch's context parallelism."""
        return args

    def prepare_data_loader(
        self,
        data_loader: DataLoader,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> DataLoader:
        """As accelerate's. The ranks of a cp group read the same batches, shuffled alike."""
        _check_loaders(self.dataloader_config)
        sampler = get_sampler(data_loader)
        if self.num_processes > 1 and isinstance(sampler, RandomSampler) and not sampler.generator:
            seed = torch.empty((), dtype=torch.int64, device="cpu").random_().item()
            (seed,) = broadcast_object_list([seed])
            sampler.generator = torch.Generator("cpu").manual_seed(seed)
        return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As accelerate's, which takes a step of the schedule for each process, because each reads
        batches of its own. Here the ranks of a cp group read one batch and take one step."""
        if isinstance(scheduler, DataParallelScheduler):
            return super().prepare_scheduler(scheduler)
        prepared = super().prepare_scheduler(scheduler)
        self._schedulers.pop()
        times = 1 if self.split_batches else self.num_processes // self._place.size
        self._schedulers.append(DataParallelScheduler(prepared, times))
        return self._schedulers[-1]

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """As accelerate's; returns the norm over all ranks, a tensor without dimensions."""
        norm = super().clip_grad_norm_(parameters, max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As accelerate's, from one rank of each cp group, since they have the same samples."""
        size = self._place.size
        if size == 1:
            return super().gather_for_metrics(input_data, use_gather_object)
        tensors = not use_gather_object
        try:
            recursively_apply(lambda x: x, input_data, error_on_other_type=True)
        except TypeError:
            tensors = False
        if tensors:
            data = recursively_apply(lambda x: self._of_groups(self.gather(x)), input_data)
        else:
            found = gather_object([input_data])[::size]
            data = [x for part in found for x in (part if isinstance(part, list) else [part])]
        state = self.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return data
        return (
            recursively_apply(lambda x: x[: state.remainder], data)
            if tensors
            else data[: state.remainder]
        )

    def _of_groups(self, x: Tensor) -> Tensor:
        """The rows of the first rank of each cp group, out of the rows [ranks * B, ..] of all."""
        return x.unflatten(0, (self.num_processes, -1))[:: self._place.size].flatten(0, 1)

    @contextmanager
    def maybe_context_parallel(
        self,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: set[Tensor] | None = None,
    ) -> Iterator[None]:
        """Leaves the buffers whole, because the prepared model cuts its arguments itself.
        Accelerate's method cuts them into heads and tails."""
        yield


class DataParallelScheduler(AcceleratedScheduler):
    """Takes as many steps of the schedule as there are batches in an optimiser's step."""

    def __init__(self, prepared: AcceleratedScheduler, times: int) -> None:
        super().__init__(
            prepared.scheduler,
            prepared.optimizers,
            step_with_optimizer=prepared.step_with_optimizer,
            split_batches=True,  # one step of the schedule at a time
        )
        self.times = times

    def step(self, *args: Any, **keywords: Any) -> None:
        together = self.step_with_optimizer and self.gradient_state.sync_gradients
        for _ in range(self.times if together else 1):
            last = getattr(self.scheduler, "total_steps", None)
            if not together or last is None or self.scheduler._step_count <= last:
                super().step(*args, **keywords)


def _check(given: Mapping[str, Any], config: ParallelismConfig | None, started: int) -> None:
    """Raises ValueError for what does not go with context parallelism here."""
    if config is None and started > 1:
        raise ValueError(
            f"parallelism_config must be given for {started} ranks, for example "
            f"ParallelismConfig(cp_size={started})"
        )
    for name in ("tp_size", "sp_size"):
        size = getattr(config, name, 1)
        if size != 1:
            raise ValueError(f"{name} must be 1, got {size}; give these ranks to cp_size")
    if config is not None and config.total_size != started:
        sizes = (config.dp_replicate_size, config.dp_shard_size, config.cp_size)
        product = " x ".join(map(str, sizes))
        raise ValueError(
            f"dp_replicate_size x dp_shard_size x cp_size = {product} must be the number of ranks, "
            f"but {started} were started: accelerate launch --num_processes {config.total_size}"
        )
    engines = {
        "deepspeed_plugin": "ACCELERATE_USE_DEEPSPEED",
        "deepspeed_plugins": "ACCELERATE_USE_DEEPSPEED",
        "megatron_lm_plugin": "ACCELERATE_USE_MEGATRON_LM",
    }
    for name, variable in engines.items():
        if given.get(name) is not None or os.environ.get(variable, "false").lower() == "true":
            raise ValueError(f"{name} must be left out: CPAccelerator shards with FSDP2")
    if _precision(given) == "fp8":
        raise ValueError("mixed_precision must be no, fp16 or bf16, got fp8")
    plugin, backend = given.get("dynamo_plugin"), given.get("dynamo_backend")
    if plugin is not None:
        backend = plugin.backend
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no") if backend is None else backend
    if str(getattr(backend, "value", backend)).lower() != "no":
        raise ValueError(
            f"dynamo_backend must be no, got {backend}: the model's call reads the batch on the "
            "host, which torch.compile cannot trace; compile parts of the model instead"
        )


def _precision(given: Mapping[str, Any]) -> str:
    wanted = given.get("mixed_precision")
    return str(os.environ.get("ACCELERATE_MIXED_PRECISION", "no") if wanted is None else wanted)


def _check_loaders(config: DataLoaderConfiguration) -> None:
    if config.dispatch_batches:
        raise ValueError(
            "dispatch_batches must be False or None, got True: the rank that dispatches gives each "
            "rank of a cp group rows of its own; with dispatch_batches=False all ranks read the "
            "data and take their share"
        )


def _fsdp_plugin(
    given: Mapping[str, Any], *, needed: bool
) -> FullyShardedDataParallelPlugin | None:
    """The plugin of the script or of `accelerate launch`, with exact sums of gradients."""
    plugin = given.get("fsdp_plugin")
    if plugin is None and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        plugin = FullyShardedDataParallelPlugin()
    version = getattr(plugin, "fsdp_version", None)
    if version != 2 and (needed or plugin is not None):
        got = "none" if plugin is None else f"fsdp_version={version}"
        raise ValueError(
            "fsdp_plugin must be FullyShardedDataParallelPlugin(fsdp_version=2), got " + got
        )
    dtype = PRECISIONS.get(_precision(given))
    if plugin is not None and plugin.mixed_precision_policy is None and dtype is not None:
        # accelerate would add up the ranks' gradients, and return the loss, in 16 bits
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32
        )
    return plugin


def _name_layers(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> None:
    """Names the layers that FSDP2 shards one by one, unless the script has done so. By default
    accelerate takes all names that the model's class has, and fails if the model lacks one of these
    layers, such as those of a vision tower."""
    names = getattr(model, "_no_split_modules", None)
    if names and plugin.transformer_cls_names_to_wrap is None:
        found = {type(part).__name__ for part in model.modules()}
        plugin.transformer_cls_names_to_wrap = sorted(found.intersection(names))


def _casts_rates(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> bool:
    """Whether FSDP2 would cast decay rates of recurrences to 16 bits."""
    dtype = getattr(plugin.mixed_precision_policy, "param_dtype", None)
    return dtype is not None and dtype.itemsize < 4 and bool(rate_names(model))


def _warn_of_rates(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> None:
    """Warns that FSDP2 casts the decay rates of recurrences to 16 bits."""
    dtype, names = plugin.mixed_precision_policy.param_dtype, rate_names(model)
    warnings.warn(
        f"mixed precision casts the decay rates of the model to {dtype}, which is too coarse for "
        f"them ({len(names)} parameters, {names[0]} among them). They would stay float32 without "
        "cpu_offload. With it, give the fsdp_plugin "
        "mixed_precision_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32), and call the "
        "model under autocast (docs/accelerate.md)",
        stacklevel=4,
    )


def _shard_rates_of(
    model: nn.Module, mesh: DeviceMesh, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Calls `shard_rates`, and gives the optimizers the parameters that it makes."""
    before = dict(model.named_parameters())
    for name in rate_names(model):
        before[name].data = before[name].data.float()  # as accelerate casts all others later
    shard_rates(model, mesh)
    after = dict(model.named_parameters())
    made = {x: after[name] for name, x in before.items()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [made.get(x, x) for x in group["params"]]


@contextmanager
def _called_with_ties(model: nn.Module, call: Callable[[], object]) -> Iterator[None]:
    """Calls `call` whenever accelerate ties the weights of a model, which it does right after it
    has moved the model to the meta device, before it shards anything."""
    own, tie = "tie_weights" in vars(model), getattr(model, "tie_weights", lambda: None)

    def tie_weights() -> None:
        tie()
        call()

    vars(model)["tie_weights"] = tie_weights
    try:
        yield
    finally:
        if own:
            vars(model)["tie_weights"] = tie
        else:
            del vars(model)["tie_weights"]


@contextmanager
def _ties_kept(model: nn.Module) -> Iterator[None]:
    """In the block, preparing a model without `tie_weights` keeps shared parameters shared.

    With efficient loading, for which `accelerate launch` asks, accelerate moves the model to the
    meta device and back. This makes a separate parameter for each name. accelerate then calls
    `tie_weights`, which has to share them again.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    ties = [same for same in names.values() if len(same) > 1]
    if not ties or hasattr(model, "tie_weights"):
        yield
        return

    def tie_weights() -> None:
        for first, *others in ties:
            parameter = model.get_parameter(first)
            for name in others:
                owner, _, last = name.rpartition(".")
                setattr(model.get_submodule(owner), last, parameter)

    with _called_with_ties(model, tie_weights):
        yield


@contextmanager
def _without(variable: str) -> Iterator[None]:
    """Removes a variable from the environment in the block."""
    value = os.environ.pop(variable, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[variable] = value
