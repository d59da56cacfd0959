"""Model, data, training: a quickstart's, on digits that scikit-learn brings along instead of a download."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A network with two convolutions and three linear layers."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 2 * 2, 512)
        self.fc2 = nn.Linear(512, 128)
        self.fc3 = nn.Linear(128, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 32 * 2 * 2)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


def load_data(number, sites):
    """A site's part of the training data (number 1, 2, …): four fifths to train, one to test."""
    pixels, labels = load_digits(return_X_y=True)
    images, targets = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(labels)
    part = torch.arange(number - 1, 1500, sites)
    cut = len(part) * 4 // 5
    train, test = (TensorDataset(images[some], targets[some]) for some in (part[:cut], part[cut:]))
    return DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=32)


def train(net, loader, epochs, lr):
    """Trains on the training set."""
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            criterion(net(images), labels).backward()
            optimizer.step()


def accuracy(net, loader):
    """The part that is right."""
    net.eval()
    with torch.no_grad():
        right = sum((net(images).argmax(1) == labels).sum().item() for images, labels in loader)
    return right / len(loader.dataset)
