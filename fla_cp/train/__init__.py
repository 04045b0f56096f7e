"""The trainer: `torchrun launch/train.py --cp 4`, or `fla-cp-train --cp 4` once installed."""
