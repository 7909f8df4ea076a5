"""Analyses: they read the model and leave artifacts (moments, orders) or costs; they never change it."""
