# $ python tutorial/01-hello-ranks/hello.py
# $ torchrun --standalone --nproc-per-node=3 tutorial/01-hello-ranks/hello.py
"""Print what a launcher tells each process: its rank, and how many processes there are."""

import os


def main() -> None:
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    assert 0 <= rank < world_size
    print(f"hello from rank {rank} of {world_size}")


if __name__ == "__main__":
    main()
