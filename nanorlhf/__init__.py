"""nanorlhf: SFT, reward modelling, DPO, PPO and GRPO in code that can be read."""

__version__ = "0.1.0"
