"""Does the mark work for an image model? Run it: quorumark try FILE.py. Then put in your own model and data.

quorumark calls three functions, and two more if they are here:

    make()                  a torch module with its initial weights
    data(member, members)   the data of one member, 0 … members−1; only train() looks inside
    train(weights, data)    trains on one member's data: from named tensors to named tensors of the same shapes.
                            It may also take seed, round_no (from 1) and rate (the learning rate's factor)
    evaluate(weights)       optional: right or wrong for each test example, or one number; larger is better
    example()               optional: an input of the model, to find which channels belong together
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.set_num_threads(1)  # small steps: a second thread costs more than it brings

PIXELS, LABELS = load_digits(return_X_y=True)  # 1,797 handwritten digits of 8 × 8 pixels
IMAGES = torch.tensor(PIXELS / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
CLASSES = torch.tensor(LABELS)
ORDER = torch.randperm(len(CLASSES), generator=torch.Generator().manual_seed(0))
TEST, TRAIN = ORDER[:360], ORDER[360:]


def make():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128), nn.ReLU(),
        nn.Linear(128, 10),
    )  # fmt: skip


def data(member, members):
    mine = TRAIN[member::members]
    return IMAGES[mine], CLASSES[mine]


def train(weights, data, seed):
    net, (inputs, labels) = make(), data
    net.load_state_dict(weights)
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.0)
    order = torch.Generator().manual_seed(seed)
    for batch in torch.randperm(len(labels), generator=order).split(32):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(inputs[batch]), labels[batch]).backward()
        optimiser.step()
    return net.state_dict()


def evaluate(weights):
    net = make()
    net.load_state_dict(weights)
    net.eval()
    with torch.no_grad():
        return net(IMAGES[TEST]).argmax(1) == CLASSES[TEST]


def example():
    return IMAGES[:1]
