"""Rewards: scoring in processes that can be killed."""
