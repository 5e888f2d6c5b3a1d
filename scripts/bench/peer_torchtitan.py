"""Time torchtitan 0.3.0's own Trainer on the Llama-3-8B shape, as a yardstick for `throughput.py`.

A driver only: torchtitan (installed, never vendored) builds the model, compiles it, shards it, and runs
its own `Trainer.train_step`. What is ours is the configuration, synthetic tokens, and the clock.

torchtitan 0.3.0 asks for a torch nightly. On torch 2.11 three names that it uses do not exist:
`torch.distributed.fsdp.DataParallelMeshDims` (imported at the top of its FSDP module, used only by the
`spmd_types` and `full_dtensor` backends), `torch._library.opaque_object.CustomClassBase` (hybrid expert
parallelism) and `torch.distributed.set_timeout` (after the first step of `Trainer.train`). Here the first
gets a placeholder, so that the import works; the `partial_dtensor` backend, which never touches it, runs;
and the other two are not reached. On one GPU all of its backends do the same arithmetic.
"""

# It is no dependency of ours, so the type checker cannot find it.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.harness import StepClock, add_common_arguments, free_port, peak_memory, write_result
from scripts.bench.synthetic import token_pool


def _provide_missing_names() -> list[str]:
    """Give torch the names that torchtitan imports but never calls here; returns what was added."""
    import torch.distributed.fsdp as fsdp

    if hasattr(fsdp, "DataParallelMeshDims"):
        return []

    class DataParallelMeshDims:  # a name to import; constructing it means a backend we do not support
        def __init__(self, *args: object, **kwargs: object) -> None:
            raise RuntimeError("this torch has no DataParallelMeshDims: use spmd_backend='partial_dtensor'")

    fsdp.DataParallelMeshDims = DataParallelMeshDims  # type: ignore[attr-defined]
    return ["torch.distributed.fsdp.DataParallelMeshDims"]


class _CpuDevice:
    """What torchtitan's Trainer calls of `torch.cuda`, for a CPU: it has no CPU mode."""

    total_memory = 2**34

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: object = None) -> str:
        return "cpu"

    def get_device_properties(self, device: object = None) -> _CpuDevice:
        return self

    def memory_stats(self, device: object = None) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None: ...

    def empty_cache(self) -> None: ...


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--ac", choices=["none", "selective", "full"], default="none")
    parser.add_argument(
        "--attention",
        choices=["flex", "varlen", "sdpa"],
        default="flex",
        help="flex is torchtitan's default; sdpa is its cuDNN/flash module without document masks",
    )
    parser.add_argument(
        "--fsdp",
        action="store_true",
        help="its own parallelize function: FSDP2 over one rank, and the unchunked loss, because its\n"
        "chunked loss under FSDP needs a newer torch. Default: its checkpointing, its compile and\n"
        "its chunked loss, without FSDP",
    )
    parser.add_argument("--no-cuda-graphs", action="store_true", help="its training.disable_cuda_graphs")
    parser.add_argument("--no-compile", action="store_true")
    return parser.parse_args(argv)


def _build_trainer(args: argparse.Namespace) -> Any:
    """A `torchtitan.trainer.Trainer` for one device; torchtitan must be importable."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.distributed.compile import apply_compile
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    class NoTokenizer(BaseTokenizer):
        """The data below is token ids already; the Trainer only wants the object."""

        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any = None, *, tokenizer_path: str) -> None:
            super().__init__()

        def encode(self, *args: Any, **kwargs: Any) -> list[int]:
            raise NotImplementedError

        def decode(self, *args: Any, **kwargs: Any) -> str:
            raise NotImplementedError

        def get_vocab_size(self) -> int:
            return vocab_size

    class SyntheticLoader(BaseDataLoader):
        """Rotates over a few random batches of one document each; int64 [B, T]."""

        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, *, seq_len: int, local_batch_size: int, **_: Any) -> None:
            self.batches = token_pool(vocab_size, local_batch_size, seq_len)
            self.positions = torch.arange(seq_len).expand(local_batch_size, seq_len).contiguous()
            self.give_positions = args.attention != "sdpa"

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            step = 0
            while True:
                tokens, labels = self.batches[step % len(self.batches)]
                inputs = {"input": tokens}
                if self.give_positions:
                    inputs["positions"] = self.positions
                yield inputs, labels
                step += 1

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    def parallelize_without_fsdp(
        model: Any, *, parallel_dims: Any, compile_config: Any, ac_config: Any, dump_folder: str, **_: Any
    ) -> Any:
        if ac_config is not None:
            ac_config.build(dump_folder=dump_folder).apply(model)
        if compile_config.enable:
            apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
        return model

    backend = "flex" if args.attention == "sdpa" else args.attention
    model_spec = model_registry("debugmodel" if args.tiny else "8B", attn_backend=backend)
    vocab_size = model_spec.model.vocab_size
    if args.attention == "sdpa":
        for layer in model_spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    loss: Any = CrossEntropyLoss.Config(global_vocab_size=vocab_size)
    if not args.fsdp:
        model_spec.parallelize_fn = parallelize_without_fsdp
        loss = ChunkedLossWrapper.Config(loss_fn=loss)
    checkpointing = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}[args.ac]
    config = Trainer.Config(
        model_spec=model_spec,
        dump_folder=str(args.out),
        tokenizer=NoTokenizer.Config(),
        dataloader=SyntheticLoader.Config(),
        loss=loss,
        optimizer=default_adamw(lr=args.lr),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        training=TrainingConfig(
            local_batch_size=args.batch,
            seq_len=args.seq_len,
            steps=10**6,
            dtype="bfloat16",
            max_norm=args.max_norm,
            disable_cuda_graphs=args.no_cuda_graphs,
            gc_freq=10**6,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        activation_checkpoint=checkpointing,  # type: ignore[arg-type]
        compile=CompileConfig(enable=not args.no_compile),
        # Logging reads the loss and so waits for the device: once, at the end of the warm-up.
        metrics=MetricsProcessor.Config(log_freq=10**6),
    )
    if args.device == "cpu":
        config.optimizer.implementation = "foreach"
    return Trainer(config)


def main(argv: list[str] | None = None) -> None:
    args = _parse(sys.argv[1:] if argv is None else argv)
    shims = _provide_missing_names()
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }.items():
        os.environ.setdefault(name, value)

    import torchtitan.tools.utils as titan_utils

    if args.device == "cpu":
        # Its modules copy these two names when they load, so set them first.
        titan_utils.device_type, titan_utils.device_module = "cpu", _CpuDevice()  # type: ignore[assignment]
    trainer = _build_trainer(args)
    data = trainer.batch_generator(trainer.dataloader)

    def step() -> None:
        trainer.step += 1
        trainer.train_step(data)

    # The Trainer reads the loss only where it logs: at its first step, and at one more after the clock stops.
    losses: list[float] = []
    log = trainer.metrics_processor.log

    def keep_loss(number: int, loss: float, *rest: Any, **more: Any) -> None:
        losses.append(loss)
        log(number, loss, *rest, **more)

    trainer.metrics_processor.log = keep_loss
    step_ms = StepClock(args.device).run(step, warmup=args.warmup, steps=args.steps)
    peaks = peak_memory(args.device)
    trainer.metrics_processor.config.log_freq = 1
    step()
    write_result(
        args,
        arm="torchtitan",
        step_ms=step_ms,
        tokens_per_step=args.batch * args.seq_len,
        peaks=peaks,
        losses=losses,
        extra={
            "version": _version("torchtitan"),
            "attention": args.attention,
            "ac": args.ac,
            "fsdp": args.fsdp,
            "cuda_graphs": not args.no_cuda_graphs,
            "compile": not args.no_compile,
            "flops_per_token_its_own": float(trainer.metrics_processor.num_flops_per_token),
            "names_provided_to_torch": shims,
        },
    )
    # The figures are written. Tearing down NCCL beside live CUDA graphs can hang, which would cost the cell.
    sys.stdout.flush()
    os._exit(0)


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


if __name__ == "__main__":
    main()
