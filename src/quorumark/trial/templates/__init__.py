"""Files to begin with: `quorumark try --template images > my.py`. Each runs as it is, and imports nothing of ours."""
