"""A script for `accelerate launch` that leaves everything to the configuration file."""

import torch
from accelerate import Accelerator
from recording import Recording, accelerators_of_cpu, arguments, sharded_modules, tiny_llama, tokens
from torch.utils.data import DataLoader


def main() -> None:
    options, recording = arguments(), Recording()
    accelerators_of_cpu()
    recording.begin("launched")
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = tiny_llama(tie_word_embeddings=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader([tokens(step, 0, batch=1)[0] for step in range(16)], batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    recording.note("sharded modules", sharded_modules(model))
    for batch in loader:
        recording.step(model, optimizer, model(input_ids=batch, labels=batch).loss, accelerator.backward)
    recording.end(model)
    recording.save(options.out)


main()
