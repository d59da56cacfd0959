"""`python -m quorumark`"""

from quorumark.cli import main

main()
