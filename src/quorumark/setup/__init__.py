"""Making a consortium's key: `dkg` without a dealer (the default), `dealer` with one."""
