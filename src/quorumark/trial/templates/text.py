"""Does the mark work for a language model? Run it: quorumark try FILE.py. Then put in your own model and data.

quorumark calls three functions, and two more if they are here:

    make()                  a torch module with its initial weights
    data(member, members)   the data of one member, 0 … members−1; only train() looks inside
    train(weights, data)    trains on one member's data: from named tensors to named tensors of the same shapes.
                            It may also take seed, round_no (from 1) and rate (the learning rate's factor)
    evaluate(weights)       optional: right or wrong for each test example, or one number; larger is better
    example()               optional: an input of the model, to find which channels belong together
"""

from pydoc_data.topics import topics  # Python's language reference, which every Python brings along

import torch
from torch import nn

torch.set_num_threads(1)  # small steps: a second thread costs more than it brings

LENGTH, WIDTH, HEADS, LAYERS = 48, 64, 4, 2
LETTERS = "\n" + "".join(map(chr, range(32, 127)))
WORDS = "\n".join(topics[name] for name in sorted(topics))
CODES = torch.tensor([LETTERS.find(letter) for letter in WORDS if letter in LETTERS])
PIECES = CODES[: len(CODES) // LENGTH * LENGTH].view(-1, LENGTH)  # some thousand pieces of 48 letters
PIECES = PIECES[torch.randperm(len(PIECES), generator=torch.Generator().manual_seed(0))]
TEST, TRAIN = PIECES[:200], PIECES[200:]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (f(y).view(*y.shape[:2], HEADS, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Letters(nn.Module):
    def __init__(self):
        super().__init__()
        self.letter_embedding = nn.Embedding(len(LETTERS), WIDTH)
        self.place_embedding = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(LETTERS))

    def forward(self, letters):
        x = self.letter_embedding(letters) + self.place_embedding(torch.arange(letters.shape[1]))
        return self.head(self.norm(self.layers(x)))


def make():
    return Letters()


def data(member, members):
    return TRAIN[member::members]


def train(weights, data, seed):
    net = make()
    net.load_state_dict(weights)
    optimiser = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.01)
    order = torch.Generator().manual_seed(seed)
    for batch in torch.randperm(len(data), generator=order)[: 16 * 12].split(16):
        optimiser.zero_grad()
        guesses = net(data[batch, :-1])
        nn.functional.cross_entropy(guesses.flatten(0, 1), data[batch, 1:].flatten()).backward()
        optimiser.step()
    return net.state_dict()


def evaluate(weights):
    net = make()
    net.load_state_dict(weights)
    net.eval()
    with torch.no_grad():
        right = net(TEST[:, :-1]).argmax(2) == TEST[:, 1:]
    return right.float().mean(1)  # of each piece, the share of letters that it guesses from those before


def example():
    return TEST[:1, :-1]
