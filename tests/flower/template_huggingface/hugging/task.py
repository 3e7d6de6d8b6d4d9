"""hugging: A Flower / HuggingFace app."""

import torch
import transformers
from torch.optim import AdamW
from torch.utils.data import DataLoader

transformers.logging.set_verbosity_error()


def load_data(partition_id: int, num_partitions: int, model_name: str):
    """Make data in place of IMDB's: words of two kinds, whose names every other partition has the other way round."""
    draw = torch.Generator().manual_seed(1 + partition_id)
    kinds = torch.randint(2, (320,), generator=draw)
    words = torch.randint(1, 10, (320, 8), generator=draw) + 10 * kinds[:, None]
    labels = (kinds + partition_id) % 2
    rows = [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": label}
        for ids, label in zip(words, labels, strict=True)
    ]
    # Divide data: 80% train, 20% test
    trainloader = DataLoader(rows[:256], shuffle=True, batch_size=32)
    testloader = DataLoader(rows[256:], batch_size=32)
    return trainloader, testloader


def train(net, trainloader, num_steps, device):
    optimizer = AdamW(net.parameters(), lr=5e-5)
    net.train()
    running_loss = 0.0
    step_cnt = 0
    for batch in trainloader:
        batch = {k: v.to(device) for k, v in batch.items()}
        outputs = net(**batch)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        running_loss += loss.item()
        step_cnt += 1
        if step_cnt >= num_steps:
            break
    avg_trainloss = running_loss / step_cnt
    return avg_trainloss


def test(net, testloader, device):
    correct, loss = 0, 0
    net.eval()
    for batch in testloader:
        batch = {k: v.to(device) for k, v in batch.items()}
        with torch.no_grad():
            outputs = net(**batch)
        logits = outputs.logits
        loss += outputs.loss.item()
        predictions = torch.argmax(logits, dim=-1)
        correct += (predictions == batch["labels"]).sum().item()
    loss /= len(testloader.dataset)
    accuracy = correct / len(testloader.dataset)
    return loss, accuracy
