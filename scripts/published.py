"""Published figures of training's memory, beside the predictor's and the allocator's on this GPU.

python -m virtual_gpu --card A100-SXM4-80GB --values small scripts/published.py

Each step in a process of its own. Writes facts/predictions/published.json; scripts/stamp.py puts it into
virtual_gpu/README.md, beside transformers' guide of 2022, whose steps are in the grid of record_predictions.
"""

import functools
import sys
from datetime import date

import torch
from record_predictions import FOLDER, alone, measured, predictions

from tutorial_utils import bounds, machine, predict

MB = 10**6
# transformers' page of BERT (pull request 28802): BertLMHeadModel of BERT-base in float16 on an A100 of 80 GB, torch
# 2.2; forward and backward over the sum of the logits, no optimizer. (batch, length) → MB that
# torch.cuda.max_memory_allocated gave with eager attention and with SDPA.
SDPA_IN_BERT = {
    (4, 256): (939.213, 764.834), (4, 512): (1970.447, 1227.162), (8, 256): (1594.295, 1226.114),
    (8, 512): (3629.401, 2134.262), (16, 256): (2874.426, 2134.262), (16, 512): (6964.659, 3961.013),
}  # fmt: skip
# transformers' text-classification examples (2021): BERT-base on MRPC at length 128. Batch → MiB that nvidia-smi
# showed in fp32 and in fp16, with a context of which nothing is said.
MRPC = {8: (4247, 4163), 16: (4971, 4793), 32: (6827, 6207), 64: (10_037, 8061)}


def bert(attention: str) -> torch.nn.Module:
    from transformers import BertConfig, BertLMHeadModel

    return BertLMHeadModel._from_config(BertConfig(), attn_implementation=attention, dtype=torch.float16)


def step(model, optimizer, inputs):
    model.zero_grad()
    outputs = model(**inputs)  # kept to the end of the step, as the published script does
    outputs.logits.sum().backward()


def text(batch: int, length: int) -> torch.Tensor:
    return torch.ones(batch, length, dtype=torch.long)


def allocated(batch: int, length: int, attention: str) -> int:
    """Bytes at the peak of the third step, as the published script asks for them."""
    with torch.device("cuda"):
        model = bert(attention).train()
    inputs = {name: text(batch, length).cuda() for name in ("input_ids", "attention_mask")}
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        step(model, None, inputs)
    return torch.cuda.max_memory_allocated()


def expected(batch: int, length: int, attention: str, gpu: machine.Gpu) -> int:
    """The same, predicted: without the mask of ones, which a real run drops and a fake one cannot look into."""
    return predict.step_memory(
        functools.partial(bert, attention), inputs={"input_ids": text(batch, length)}, step=step, card=gpu,
        optimizer=lambda model: torch.optim.SGD(model.parameters()),
    ).allocated  # fmt: skip


def main():
    gpu, here = alone(machine.this_gpu), alone(machine.facts)
    if gpu is None:
        sys.exit("published.py: no GPU that this torch can use; nothing was written")
    rows = []
    for (batch, length), published in SDPA_IN_BERT.items():
        for attention, figure in zip(("eager", "sdpa"), published):
            cell = (batch, length, attention)
            rows.append({"table": "SDPA in BERT", "batch": batch, "length": length, "attention": attention,
                         "published": figure, "predicted": alone(expected, *cell, gpu) / MB,
                         "measured": alone(allocated, *cell) / MB})  # fmt: skip
    for batch, published in MRPC.items():
        for precision, figure in zip(("fp32", "fp16"), published):
            cell = {"model": "bert-base-uncased", "batch": batch, "length": 128, "attention": "eager",
                    "precision": precision, "padded": True}  # fmt: skip
            both = alone(predictions, [cell], gpu)[0][0]["reserved"], alone(measured, cell)["reserved"]
            rows.append({"table": "MRPC", "batch": batch, "precision": precision, "published": figure,
                         **dict(zip(("predicted", "measured"), (value / 2**20 for value in both)))})  # fmt: skip
    about = {"machine": {"name": here.name, "memory_bytes": here.memory}, "versions": here.versions}
    bounds.write(FOLDER / "published.json", {**about, "date": date.today().isoformat(), "rows": rows})
    for row in rows:
        print(row)
    print("wrote published.json; now: python scripts/stamp.py")


if __name__ == "__main__":
    main()
