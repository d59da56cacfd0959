"""The lab: the paper's experiments as configurations of one program (docs/lab.md).

    data      image sets as arrays of bytes, splits and partitions
    augment   AutoAugment and what goes with it, for whole batches on the device
    models    the networks
    loop      federated training of all members on one device, with the mark as the ideal functionality
    observer  what can be learnt about the key from outside while a run trains
    attack    the attack suite on a run's model; `retrain`: attacks that train, side by side; `attacked`: their results
    text      texts as tokens
    language  language models on a device: training, perplexity; `tuning`: their federated fine-tuning
    removal   attacks on what language models release
    masked    the same rounds through the real protocol, for comparison
    config    configurations, and how they become runs
    results   the file that a run leaves, and docs/results.md from all of them

These modules use PyTorch throughout and import it at the top: nothing else in quorumark imports them before a command
of the lab runs.
"""
