"""accelerate and transformers on CPUs, in forked ranks: small random models, nothing downloaded.

    python hugging_face_world.py DEADLINE CASE...
    python -m commkit run hugging_face_world.py DEADLINE CASE...

Each case gets a world of its own, which the libraries start by themselves.  Prints {case: [what
each rank has computed]}.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings

warnings.simplefilter("ignore")
os.environ.update(
    ACCELERATE_USE_CPU="true",
    CUDA_VISIBLE_DEVICES="",
    HF_HUB_OFFLINE="1",
    HF_HOME=tempfile.mkdtemp(prefix="hf-"),
    TOKENIZERS_PARALLELISM="false",
)

import forked  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.distributed_c10d as c10d  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

WORLD = 2


def language_model():
    set_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )


def texts(count):
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(0, 64, (count, 12), generator=generator)
    return [{"input_ids": one, "labels": one.clone()} for one in tokens]


def total(model):
    return [p.detach().double().sum().item() for p in model.parameters()]


def accelerated(directory):
    """A loop by hand: prepare, backward, and accelerate's own collectives."""
    accelerator = Accelerator(cpu=True)
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(texts(16), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        losses.append(accelerator.gather(loss.detach().reshape(1)).tolist())
    rank = accelerator.process_index
    return {
        "losses": losses,
        "parameters": total(model),
        "reduced": accelerator.reduce(torch.tensor([rank + 1.0]), "sum").tolist(),
        "padded": accelerator.pad_across_processes(torch.ones(rank + 1), dim=0).tolist(),
        "type": str(accelerator.distributed_type),
    }


def trained(directory):
    """transformers' Trainer, with a checkpoint."""
    arguments = TrainingArguments(
        output_dir=directory,
        use_cpu=True,
        max_steps=4,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_steps=4,
        report_to=[],
        disable_tqdm=True,
        seed=5,
    )
    model = language_model()
    trainer = Trainer(model=model, args=arguments, train_dataset=texts(32))
    trainer.train()
    trainer.accelerator.wait_for_everyone()
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "parameters": total(trainer.accelerator.unwrap_model(trainer.model)),
        "parallel": str(arguments.parallel_mode),
        "saved": os.path.exists(os.path.join(directory, "checkpoint-4", "model.safetensors")),
    }


def tensor_parallel(directory):
    """A model whose layers from_pretrained spreads over the ranks; it makes the mesh itself."""
    saved = os.path.join(directory, f"model-{os.environ['RANK']}")
    language_model().save_pretrained(saved)
    model = LlamaForCausalLM.from_pretrained(saved, tp_plan="auto")
    tokens = torch.stack([one["input_ids"] for one in texts(2)])
    logits = model(tokens).logits
    assert model._device_mesh.size() == WORLD
    return {"logits": logits.double().sum(-1).tolist()}


CASES = {case.__name__: case for case in (accelerated, trained, tensor_parallel)}


def body(name, directory):
    found = CASES[name](directory)
    by_commkit = forked.by_commkit()
    names = [group.group_name for group in c10d._world.pg_map]
    world = dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    return {"found": found, "by_commkit": by_commkit, "names": names, "world": world}


def one(name, deadline):
    with tempfile.TemporaryDirectory() as directory:
        return forked.run(WORLD, body, name, directory, deadline=deadline)


def main():
    deadline, *names = sys.argv[1:]
    forked.report(forked.each(names, lambda name: one(name, float(deadline))))


if __name__ == "__main__":
    main()
