"""Does the mark work for a model of tables? Run it: quorumark try FILE.py. Then put in your own model and data.

quorumark calls three functions, and two more if they are here:

    make()                  a torch module with its initial weights
    data(member, members)   the data of one member, 0 … members−1; only train() looks inside
    train(weights, data)    trains on one member's data: from named tensors to named tensors of the same shapes.
                            It may also take seed, round_no (from 1) and rate (the learning rate's factor)
    evaluate(weights)       optional: right or wrong for each test example, or one number; larger is better
    example()               optional: an input of the model, to find which channels belong together
"""

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

torch.set_num_threads(1)  # small steps: a second thread costs more than it brings

FEATURES, LABELS = load_breast_cancer(return_X_y=True)  # 569 tumours, 30 features, malignant or benign
ORDER = torch.randperm(len(LABELS), generator=torch.Generator().manual_seed(0))
TEST, TRAIN = ORDER[:150], ORDER[150:]
ROWS = torch.tensor(FEATURES, dtype=torch.float32)
ROWS = (ROWS - ROWS[TRAIN].mean(0)) / ROWS[TRAIN].std(0)
CLASSES = torch.tensor(LABELS)


def make():
    return nn.Sequential(
        nn.Linear(30, 320), nn.ReLU(),
        nn.Linear(320, 320), nn.ReLU(),
        nn.Linear(320, 2),
    )  # fmt: skip


def data(member, members):
    mine = TRAIN[member::members]
    return ROWS[mine], CLASSES[mine]


def train(weights, data, seed):
    net, (rows, labels) = make(), data
    net.load_state_dict(weights)
    optimiser = torch.optim.AdamW(net.parameters(), lr=3e-4, weight_decay=1e-3)
    order = torch.Generator().manual_seed(seed)
    for _ in range(2):
        for batch in torch.randperm(len(labels), generator=order).split(8):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(rows[batch]), labels[batch]).backward()
            optimiser.step()
    return net.state_dict()


def evaluate(weights):
    net = make()
    net.load_state_dict(weights)
    net.eval()
    with torch.no_grad():
        return net(ROWS[TEST]).argmax(1) == CLASSES[TEST]


def example():
    return ROWS[:1]
