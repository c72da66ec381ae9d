import torch
from torch import nn
from torch.nn import functional as F

import aftershock as ak
from aftershock import theory

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def draw():
    labels = torch.randint(2, (8,))
    inputs = torch.randn(8, 2, dtype=torch.float64)
    inputs[:, 0] += 2 * labels  # what tells the two classes apart
    return inputs, labels


def loss_fn(model, batch):
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def train_step(batch):
    optimizer.zero_grad()
    loss = loss_fn(model, batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


for _ in range(40):
    train_step(draw())

batches = [draw() for _ in range(6)]
batches[5] = (batches[5][0], 1 - batches[5][1])  # every label of the last one is wrong
probe = draw()  # watched, not trained on

point = ak.capture(model, optimizer, loss_fn)
path = point.follow(batches[:4])
change = path.replace(batches[4:], at=0)  # two changes: another ordinary batch, and the one with wrong labels
response = change.response(probe)
