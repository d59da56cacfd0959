"""Verification: is this model ours? (docs/verification.md)"""
