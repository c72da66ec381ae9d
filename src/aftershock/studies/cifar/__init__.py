"""The paper's CIFAR-10 networks."""
