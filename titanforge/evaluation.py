"""Validation loss on held-out text, and samples from the model, between steps of training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from titanforge.data import IGNORED, SourceSpec, build_validation_loader
from titanforge.models.generation import generate
from titanforge.parallelisms import reshard

if TYPE_CHECKING:
    from titanforge.trainer import Trainer


class Validator:
    """Evaluates the trainer's model on a fixed set of sequences, the same at every evaluation.

    Every rank reads the same number of batches (padded with uncounted labels), so none waits for
    another; the loss is the sum over all ranks' tokens divided by all ranks' valid tokens.
    """

    def __init__(self, trainer: Trainer) -> None:
        config = trainer.config
        validation, data = config.validation, config.data
        self.trainer = trainer
        self.loader = build_validation_loader(
            dataset=validation.dataset or config.training.dataset,
            dataset_path=validation.dataset_path if validation.dataset else config.training.dataset_path,
            held_out_only=validation.dataset is None,
            text_key=data.text_key,
            subset=validation.subset if validation.dataset else data.subset,
            split=validation.split if validation.dataset else data.split,
            sources=[] if validation.dataset else [SourceSpec(**vars(source)) for source in data.sources],
            tokenizer=trainer.tokenizer,
            seq_len=validation.seq_len or config.training.seq_len,
            local_batch_size=validation.local_batch_size,
            dp_rank=trainer.dp_rank,
            dp_world=trainer.dp_world,
            steps=validation.steps,
            document_mask=data.document_mask,
            validation_fraction=data.validation_fraction,
        )

    @torch.no_grad()
    def run(self) -> None:
        """Evaluate and log. A signal that arrives meanwhile ends the evaluation; the caller then stops."""
        trainer = self.trainer
        model, device = trainer.pipeline or trainer.model, trainer.device
        # Of a pipeline's ranks those with the head have the losses; they alone count the tokens.
        counts = trainer.pipeline is None or trainer.pipeline.has_last
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        with trainer.metrics.pause():
            trainer.sync_point("evaluation")
            model.eval()
            try:
                for batch in self.loader:
                    if self._told_to_stop():
                        return
                    batch = batch.to(device)
                    documents = trainer.documents(batch)
                    loss_sum = model(batch.tokens, batch.positions, documents, batch.labels)
                    # The loss is of this rank's tokens alone, the labels are those of whole sequences.
                    counted = (batch.labels != IGNORED).sum().double() / trainer.dims.cp * counts
                    totals += torch.stack([loss_sum.double(), counted])
                samples = self._samples()
            finally:
                model.train()
                for part in [trainer.model] if trainer.pipeline is None else trainer.pipeline.parts:
                    reshard(part)
            trainer.ledger.all_reduce(
                totals, trainer.dims.get_group("loss"), axis="loss", purpose="validation"
            )
            loss_sum, tokens = totals.tolist()
            trainer.metrics.log_validation(trainer.step, loss=loss_sum / max(tokens, 1), tokens=int(tokens))
            for prompt, text in samples:
                trainer.metrics.log_sample(trainer.step, prompt, text)

    def _told_to_stop(self) -> bool:
        """Whether any rank was signalled: the same answer on all ranks, which all ask."""
        _, (signalled,) = self.trainer.runtime.agree(maxima=[self.trainer.stop_signal.received])
        return bool(signalled)

    def _samples(self) -> list[tuple[str, str]]:
        """Continue each prompt. All ranks take part (a sharded model needs them) and draw the same tokens."""
        trainer, validation = self.trainer, self.trainer.config.validation
        generator = torch.Generator(device=trainer.device).manual_seed(trainer.seed + trainer.step)
        samples = []
        for prompt in validation.sample_prompts:
            # No beginning-of-text token: packed documents have none, so the model never saw it.
            tokens = trainer.tokenizer.encode(prompt)
            output = generate(
                trainer.pipeline or trainer.model,  # pyright: ignore[reportArgumentType]
                torch.tensor([tokens], device=trainer.device),
                max_new_tokens=validation.sample_tokens,
                temperature=validation.sample_temperature,
                generator=generator,
                run_to_end=trainer.runtime.world_size > 1,
                stop=self._told_to_stop,
            )
            if self._told_to_stop():  # perhaps in the middle of the text
                break
            samples.append((prompt, trainer.tokenizer.decode(output[0, len(tokens) :].tolist())))
        return samples
