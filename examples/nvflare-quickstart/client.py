"""The script of a site: receives a model, trains it, sends it back."""

import argparse

import nvflare.client as flare
from nvflare.app_common.abstract.fl_model import FLModel

from net import Net, accuracy, load_data, train


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sites", type=int)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--lr", type=float)
    args = parser.parse_args()
    flare.init()
    number = int(flare.get_site_name().removeprefix("site-"))
    train_data, test_data = load_data(number, args.sites)
    net = Net()
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        net.load_state_dict(received.params)
        found = accuracy(net, test_data)
        print(f"round {received.current_round}: accuracy {found:.3f}")
        train(net, train_data, args.epochs, args.lr)
        meta = {"NUM_STEPS_CURRENT_ROUND": args.epochs * len(train_data)}
        flare.send(FLModel(params=net.state_dict(), metrics={"accuracy": found}, meta=meta))


if __name__ == "__main__":
    main()
