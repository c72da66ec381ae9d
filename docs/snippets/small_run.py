import torch
from torch import nn
from torch.nn import functional as F

import aftershock as ak

generator = torch.Generator().manual_seed(0)
centres = torch.randn(4, 16, generator=generator)  # four classes
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def draw():
    labels = torch.randint(4, (32,), generator=generator)
    return centres[labels] + 2 * torch.randn(32, 16, generator=generator), labels


def loss_fn(model, batch):
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def train_step(batch):
    optimizer.zero_grad()
    loss = loss_fn(model, batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


for _ in range(50):
    train_step(draw())
